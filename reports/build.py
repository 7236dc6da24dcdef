"""Makes the report of a study: `python -m reports.build quickstart --runs runs/quickstart`.

Writes a page for the browser (`index.html`, one file), one for GitHub (`README.md`), and the
figures as PNG and SVG, from run records alone.
"""

import argparse
import gc
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.forks import call_all
from analysis.importers.records import read_records
from analysis.output import bad_input
from analysis.scores import EPISODES
from analysis.tables import InputError, Tables, concat, quality_frame
from cleanba.record import find_runs
from experiments import state, systems
from experiments.pool import available_cores
from experiments.study import (
    DEFAULT_PRESET,
    Study,
    StudyError,
    find_study,
    load_study,
    study_names,
)
from plots import (
    efficiency,
    final_scores,
    intervals,
    learning_curves,
    policy_lag,
    speed,
    style,
    time_spent,
)
from reports import content, render, summaries

PLAIN_WIDTH = 150


class ReportError(Exception):
    """A report that cannot be made; the message is one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 2 for bad input."""
    options = _parser().parse_args(argv)
    runs = Path(options.runs or f"runs/{options.name}")
    out = Path(options.out or f"reports/{options.name}")
    try:
        pages, headline = build(options.name, runs, out)
    except (ReportError, InputError, StudyError, OSError) as error:
        return bad_input(error)
    print_headline(headline)
    for page in pages:
        print(page)
    return 0


def build(name: str, runs: Path, out: Path) -> tuple[list[Path], content.Grid]:
    """Write the pages and figures of a study.

    Args:
      name: of the study.
      runs: folder with its run records.
      out: folder for the pages.

    Returns:
      The pages, and the headline table.

    Raises:
      ReportError: if there is nothing to report, or a page is in the way.
      InputError: if there is no run record.
    """
    pages = [out / "index.html", out / "README.md"]
    for page in pages:
        if not render.was_made_here(page):
            raise ReportError(f"{page} was not made by this command: choose another --out")
    tables = read_tolerantly(runs)
    study = _planned_study(runs)
    changed = _changed(study, runs, tables) if study else []
    done = summaries.completed(tables, changed)
    if not len(done.runs):
        said = ", by a command of its study" if changed else ""
        raise ReportError(f"{runs}: none of the {len(tables.runs)} runs there is completed{said}")
    found = (
        content.results(done, study.targets, study.target_episodes)
        if study
        else content.results(done)
    )
    source = f"source: run records of study {name}"
    figures = content.figure_texts(found, source)
    look = style.look_of(done.runs["system"], done.runs["setting"])
    score = summaries.score_name(done)
    saved = draw_figures(found, figures, look, source, out / "figures", score)
    data = page_content(name, runs, out, study, tables, done, found, figures, changed)
    html = render.html_page(data, {figure: file.svg for figure, file in saved.items()})
    for page, text in zip(pages, (html, render.markdown_page(data)), strict=True):
        page.write_text(text)
    return pages, data["headline"]


def read_tolerantly(runs: Path) -> Tables:
    """Read all records below a folder; a damaged one is named as a problem and left out."""
    cores = len(available_cores())
    try:
        return read_records([runs], cores)
    except InputError:
        folders = find_runs(runs)
        if not folders:
            raise
    found = call_all([partial(_read_or_damage, folder) for folder in folders], cores)
    parts = [one for one in found if isinstance(one, Tables)]
    damage = [one for one in found if not isinstance(one, Tables)]
    if not parts:
        raise ReportError(f"{runs}: none of the {len(folders)} records there can be read")
    tables = concat(parts)
    known = list(tables.quality.itertuples(index=False, name=None))
    return tables._replace(quality=quality_frame([*known, *damage]))


def _read_or_damage(folder: Path) -> Tables | tuple[str, str]:
    try:
        return read_records([folder])
    except InputError as error:
        return str(folder), f"damaged, left out: {Path(str(error)).name}"


def draw_figures(
    found: content.Results,
    figures: dict[str, content.FigureText],
    look: style.Look,
    source: str,
    folder: Path,
    score: str,
) -> dict[str, style.Saved]:
    """Draw and save the figures that there are data for; `score` is what normalised ones are called."""
    draw: dict[str, Callable[[], Figure]] = {
        "curves_steps": partial(learning_curves.draw, found.steps, "step", look, source),
        "curves_time": partial(learning_curves.draw, found.time, "time", look, source),
        "aggregates": partial(intervals.draw, found.aggregates, look, source, score),
        "efficiency": partial(efficiency.draw, found.efficiency, look, source, score),
        "final_scores": partial(final_scores.draw, found.scores, look, source),
        "speed": partial(speed.draw, found.speeds, look, source),
        "time_spent": partial(time_spent.draw, found.times, look, source),
        "policy_lag": partial(policy_lag.draw, found.lags, look, source),
        "policy_changes": partial(
            policy_lag.draw, found.changes, look, source, "policy changes in a rollout"
        ),
        "value_losses": partial(
            learning_curves.draw, found.value_losses, "step", look, source, "value loss"
        ),
    }
    # of an earlier build, for which there are no data now
    for name in draw.keys() - figures.keys():
        for ending in (".png", ".svg"):
            (folder / f"{name}{ending}").unlink(missing_ok=True)
    calls = [partial(_draw_and_save, draw[name], folder, name) for name in figures]
    saved = call_all(calls, len(available_cores()))  # figures of many panels take seconds each
    return dict(zip(figures, saved, strict=True))


def _draw_and_save(draw: Callable[[], Figure], folder: Path, name: str) -> style.Saved:
    return style.save(draw(), folder, name)


def page_content(
    name: str,
    runs: Path,
    out: Path,
    study: Study | None,
    tables: Tables,
    done: Tables,
    found: content.Results,
    figures: dict[str, content.FigureText],
    changed: Collection[str] = (),
) -> dict[str, Any]:
    """Return all that the templates ask for; `changed` names runs that are not the study's any more."""
    planned = [run.name for run in study.runs] if study else []
    vary = {run.system for run in study.runs if run.setting.flags} if study else set()
    problems = summaries.problems(tables, planned, settings_vary=vary, changed=changed)
    dates = sorted(
        value[:16]
        for value in (*done.runs["started"], *done.runs["ended"])
        if isinstance(value, str)
    )
    return {
        "title": study.title if study else f"Study {name}",
        "question": study.question if study else "",
        "sentences": content.summary_sentences(
            found, len(tables.runs), len(done.runs), len(problems), len(planned), bool(changed)
        ),
        "episodes": EPISODES,
        "headline": content.headline(done, found),
        "verdicts": content.verdict_grid(found.verdicts),
        "systems": content.system_grid(found.systems),
        "pairs": content.pair_grid(found.pairs),
        "aggregates": content.aggregate_grid(found.aggregates),
        "aggregates_note": content.aggregates_note(found.comparable),
        "scores": content.score_grid(found.scores),
        "targets": content.target_grid(found.targets),
        "target_episodes": study.target_episodes if study else EPISODES,
        "speed": content.speed_grid(found.speeds),
        "at_once": content.at_once_text(done.runs),
        "time": content.time_grid(found.times),
        "lag": content.lag_grid(found.lags, found.asynchrony),
        "changes": content.change_grid(found.predicted),
        "quality": content.quality_grid(problems),
        "runs": content.run_grid(tables, out),
        "figures": figures,
        "commands": _commands(name, runs, out, study),
        "revisions": content.distinct(done.runs, "revision"),
        "versions": content.distinct(done.runs, "versions"),
        "hardware": content.hardware_lines(done.runs),
        "dates": (dates[0].replace("T", " "), dates[-1].replace("T", " ")) if dates else None,
    }


def print_headline(table: content.Grid) -> None:
    """Print the headline table in the terminal."""
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in table.columns:
        right = column in table.numeric
        shown.add_column(column, justify="right" if right else "left", no_wrap=not right)
    tones = {"good": "green", "bad": "red", "note": "yellow"}
    for row in table.rows:
        shown.add_row(*(_terminal_text(cell, tones) for cell in row))
    console.print(shown)


def _terminal_text(cell: content.Cell, tones: dict[str, str]) -> Text:
    return Text(cell.text, style=tones.get(cell.tone, ""))


def _planned_study(runs: Path) -> Study | None:
    """Return the study as the launcher kept it with the records, if it did."""
    copy = runs / "study.toml"
    return load_study(copy) if copy.is_file() else None


def _changed(study: Study, runs: Path, tables: Tables) -> list[str]:
    """Return the runs that another command has completed, such as that of an older study file."""
    done = {Path(run).name for run in summaries.completed(tables).runs["run"]}
    folder = runs.resolve().parent
    return [
        run.name
        for run in study.runs
        if run.name in done
        and run.system in systems.SYSTEMS  # of others nobody knows the command
        and state.inspect(run, folder).state is state.State.CHANGED
    ]


def _commands(name: str, runs: Path, out: Path, study: Study | None) -> list[str]:
    paths = {key: content.neutral_path(str(path)) for key, path in (("runs", runs), ("out", out))}
    commands = []
    if study:
        runs_dir = content.neutral_path(str(runs.parent))
        words = _study_words(study) or [f"{paths['runs']}/study.toml"]
        commands.append(["python", "-m", "experiments.launch", *words, "--runs-dir", runs_dir])
    options = ["--runs", paths["runs"], "--out", paths["out"]]
    commands.append(["python", "-m", "reports.build", name, *options])
    return [shlex.join(words) for words in commands]


def _study_words(study: Study) -> list[str]:
    """Return how the launcher is told of a study of the toolkit; nothing if it plans other runs."""
    preset = [] if study.preset == DEFAULT_PRESET else ["--preset", study.preset]
    name = study.name.removesuffix(f"-{study.preset}") if preset else study.name
    try:
        same = (
            name in study_names() and load_study(find_study(name), study.preset).runs == study.runs
        )
    except StudyError:  # it has no such preset
        same = False
    return [name, *preset] if same else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reports.build", description="Make the report of a study."
    )
    parser.add_argument("name", help="name of the study")
    parser.add_argument("--runs", help="folder with the run records (default: runs/<name>)")
    parser.add_argument("--out", help="folder for the pages (default: reports/<name>)")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # where a reader leaves (`| head`), end quietly
    mpl.use("agg")
    gc.disable()  # what it could free of one page is little, and a tenth of the time goes to it
    sys.exit(main())
