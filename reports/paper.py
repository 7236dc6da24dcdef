"""Draws the figures of the Cleanba paper and of HTS-RL's: `python -m reports.paper fig3`.

The data are the records of the figure's study, or data published by the authors of the paper and of
moolib (`--published FOLDER`), which suffice for some figures or parts of them.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure

from analysis import importers, lag_tables, queueing, selection, speed, study_tables, summary
from analysis.output import bad_input
from analysis.scores import EPISODES, Rule, final_scores
from analysis.tables import InputError, Tables, tables
from cleanba.run.command_line import BadInput, parse
from experiments import state
from experiments.study import StudyError, find_study, load_study
from plots import (
    claims,
    efficiency,
    intervals,
    learning_curves,
    policy_lag,
    profiles,
    run_times,
    speed_curves,
    style,
)
from plots import final_scores as score_dots
from reports.command import run_command


class PaperFigure(NamedTuple):
    """A figure of a paper.

    Attributes:
      study: the study whose records it is drawn from; '' for a simulation.
      parts: its images, by name in `PARTS`.
      published: files or folders of published data that it can be drawn from.
      published_source: name of these data.
    """

    study: str
    parts: tuple[str, ...]
    published: tuple[str, ...] = ()
    published_source: str = ""


AUTHORS = "means over 3 seeds, from the tables of Cleanba's authors"
COMPARISON = ("efficiency", "aggregates", "run_times")
FIGURES: Mapping[str, PaperFigure] = {
    "fig2": PaperFigure(
        "monobeast_lag",
        ("returns", "value_losses", "changes"),
    ),
    "fig3": PaperFigure(
        "base",
        COMPARISON,
        ("cleanba-static/main_10CPU.csv", "cleanba-static/main_10CPU_runtimes.csv"),
        AUTHORS,
    ),
    "fig4": PaperFigure(
        "workstation",
        COMPARISON,
        ("cleanba-static/spec_out.csv", "cleanba-static/spec_out_runtimes.csv"),
        AUTHORS,
    ),
    "fig5": PaperFigure(
        "reproducible",
        ("returns", "returns_by_time", "scores", "aggregates", "run_times"),
        ("cleanba-static/smootheness.csv", "cleanba-static/smootheness_runtimes.csv"),
        AUTHORS,
    ),
    "fig6": PaperFigure("architectures", ("efficiency", "aggregates")),
    "fig7": PaperFigure(
        "moolib_sets",
        ("efficiency", "iqm", "profiles", "aggregates", "run_times"),
        ("moolib-data",),
        "logs published by moolib's authors: one set, other runs than the paper's",
    ),
    "fig8": PaperFigure("wrappers", ("efficiency", "aggregates")),
    "fig9": PaperFigure("ppo_as_impala", ("efficiency", "aggregates")),
    "fig10": PaperFigure("large_batches", ("returns", "returns_by_time")),
    "fig11": PaperFigure("large_batches", ("scaling",)),
    "hts_fig4": PaperFigure("", ("claims",)),
    "hts_fig4_left": PaperFigure(
        "hts_step_times",
        ("speedup_by_variance", "speed_by_step_time"),
    ),
    "hts_fig4_right": PaperFigure(
        "hts_environments",
        ("speed_by_environments",),
    ),
    "hts_fig5a": PaperFigure("hts_atari", ("returns", "returns_by_time")),
    "hts_fig5b": PaperFigure("hts_football", ("returns", "returns_by_time")),
}


class Source(NamedTuple):
    """Where a figure's data come from."""

    tables: Tables
    words: str
    look: style.Look
    score: str  # name of a normalized score
    window: int = EPISODES  # episodes that a score averages


def _comparable(source: Source) -> Source:
    """Exclude environments or systems so that all systems have scores on the same environments."""
    found = selection.comparable(source.tables)
    left_out = "; ".join(found.environments) or style.names_under(found.systems)
    if not left_out:
        return source
    rest = selection.without(source.tables, found.environments, found.systems)
    return source._replace(tables=rest, words=f"{source.words} · without {left_out}")


def _over_environments(
    draw: Callable[[Source], Figure | None],
) -> Callable[[Source], Figure | None]:
    def of_the_same(source: Source) -> Figure | None:
        source = _comparable(source)
        if source.tables.runs["status"].eq("published").all():  # its words give their number
            return draw(source)
        seeds = style.counts_text(
            source.tables.runs.groupby(selection.GROUP, observed=True).size(), "seeds"
        )
        return draw(source._replace(words=f"{seeds} · {source.words}"))

    return of_the_same


def _aggregate_curves(source: Source, metric: str) -> Figure | None:
    curves = study_tables.efficiency(source.tables, (metric,), source.window)
    return efficiency.draw(curves, source.look, source.words, source.score) if len(curves) else None


def _aggregates(source: Source) -> Figure | None:
    frame = study_tables.aggregate_table(source.tables, source.window)
    return intervals.draw(frame, source.look, source.words, source.score) if len(frame) else None


def _profiles(source: Source) -> Figure | None:
    scores = final_scores(source.tables, Rule(source.window))
    frame = summary.profiles(scores, summary.thresholds(scores))
    return profiles.draw(frame, source.look, source.words, source.score) if len(frame) else None


def _run_times(source: Source) -> Figure | None:
    frame = pd.DataFrame(summary.run_times(source.tables))
    if not len(frame):
        return None
    if source.tables.runs["status"].eq("published").all():
        frame["runs"] = np.nan  # the number of runs of a published mean is unknown
    return run_times.draw(frame, source.look, source.words)


def _returns(x: str) -> Callable[[Source], Figure | None]:
    def draw(source: Source) -> Figure | None:
        means, runs = study_tables.learning_curves(source.tables, source.window)
        if not means[x].notna().any():
            return None
        return learning_curves.draw(means, source.look, source.words, x=x, runs=runs)

    return draw


def _value_losses(source: Source) -> Figure | None:
    frame = study_tables.value_losses(source.tables)
    if not len(frame):
        return None
    return learning_curves.draw(frame, source.look, source.words, "value loss")


def _changes(source: Source) -> Figure | None:
    frame = lag_tables.lag_table(source.tables, "changes")
    if not len(frame):
        return None
    return policy_lag.draw(frame, source.look, source.words, "policy changes in a rollout")


def _scaling(source: Source) -> Figure | None:
    frame = speed.speed_by_devices(source.tables)
    if not len(frame):
        return None
    return speed_curves.draw(
        frame, source.look, source.words, "devices", "in proportion to the fewest"
    )


def _speed_by(name: str, what: str) -> Callable[[Source], Figure | None]:
    def draw(source: Source) -> Figure | None:
        frame = speed.speed_by_option(source.tables, name)
        return speed_curves.draw(frame, source.look, source.words, what) if len(frame) else None

    return draw


def _speedup_by_variance(source: Source) -> Figure | None:
    speeds = speed.speed_by_option(source.tables, "step_delay_seconds")
    frame = speed.speedups(speeds)
    frame["x"] = (1000 * frame["x"]) ** 2  # variance of an exponential distribution
    if not len(frame):
        return None
    what, y = "variance of a step's time (ms²)", "times as fast as the synchronous system"
    return speed_curves.draw(frame, source.look, source.words, what, y=y)


def _scores(source: Source) -> Figure | None:
    scores, words = source.tables.scores, source.words
    if len(scores):
        frame = scores.rename(columns={"score": "value"}).assign(
            low=scores["score"] - scores["std"], high=scores["score"] + scores["std"], runs=np.nan
        )
        frame["each"] = [()] * len(frame)
        return score_dots.draw(frame, source.look, words, "standard deviations")
    frame = study_tables.score_table(source.tables, source.window)
    return score_dots.draw(frame, source.look, words) if len(frame) else None


def _claims(source: Source) -> Figure:
    panels = (
        (
            "(a) synchronized every 4 steps",
            "run time",
            "variance of a step's time",
            "variance",
            queueing.figure_4a,
        ),
        (
            "(b) step times of rate 2",
            "run time",
            "synchronization interval",
            "interval",
            queueing.figure_4b,
        ),
        (
            "(c) asynchronous actors",
            "latency (updates)",
            "actors",
            "actors",
            queueing.figure_4c,
        ),
    )
    return claims.draw(
        [
            (title, y, pd.DataFrame(simulate()).rename(columns={column: x}))
            for title, y, x, column, simulate in panels
        ],
        source.words,
    )


PARTS: Mapping[str, Callable[[Source], Figure | None]] = {
    "efficiency": _over_environments(lambda source: _aggregate_curves(source, "median")),
    "iqm": _over_environments(lambda source: _aggregate_curves(source, "iqm")),
    "aggregates": _over_environments(_aggregates),
    "profiles": _over_environments(_profiles),
    "run_times": _over_environments(_run_times),
    "returns": _returns("step"),
    "returns_by_time": _returns("seconds"),
    "value_losses": _value_losses,
    "changes": _changes,
    "scaling": _scaling,
    "speedup_by_variance": _speedup_by_variance,
    "speed_by_step_time": _speed_by("step_delay_seconds", "mean step time (s), exponential"),
    "speed_by_environments": _speed_by("num_envs", "environments"),
    "scores": _scores,
    "claims": _claims,
}


def read_runs(name: str, runs: Path, preset: str) -> Source:
    """Read the records of a study.

    Args:
      name: of the study, or the path of its file.
      runs: folder of all studies' records.
      preset: size of the study.

    Raises:
      InputError: if there is no completed run.
    """
    study = load_study(find_study(name), preset)
    folder = runs / study.name
    if not folder.is_dir():
        command = f"make study STUDY={name} PRESET={preset}"
        raise InputError(f"{folder}: no such folder; {command} makes it")
    if (copy := folder / "study.toml").is_file():  # what was run is what counts
        study = load_study(copy)
    # runs that another command completed do not count
    done = [
        folder / run.name
        for run in study.runs
        if run.program is not None  # the command of other systems is not known
        and state.inspect(run, runs).state is state.State.COMPLETED
    ]
    if not done:
        raise InputError(f"{folder}: no completed run of the study")
    found = importers.read(done, "records")
    words = f"{len(found.runs)} of {len(study.runs)} runs of study {study.name}"
    look, score = _look(found), selection.score_name(found)
    return Source(found, words, look, score, study.score_episodes)


SIMULATION = Source(
    tables(),
    "one simulation of each by analysis/queueing.py, of 10,000 states and 16 environments\n"
    "the ranges and the rates of (c) are stand-ins for the paper's",
    style.look_of((), ()),
    "",
)


def read_published(name: str, figure: PaperFigure, folder: Path) -> Source:
    """Read published data of a figure.

    Raises:
      InputError: if there are no published data, or they are not in the folder.
    """
    if not figure.published:
        raise InputError(f"{name}: there are no published data to draw it from")
    found = importers.read([folder / path for path in figure.published])
    name = selection.score_name(found)
    return Source(found, figure.published_source, _look(found), name)


def _look(found: Tables) -> style.Look:
    frames = [frame for frame in (found.runs, found.scores, found.curves) if len(frame)]
    both = [set(zip(frame["system"], frame["setting"], strict=True)) for frame in frames]
    pairs = set.union(*both)
    return style.look_of((system for system, _ in pairs), (setting for _, setting in pairs))


def draw(name: str, source: Source, out: Path, suffix: str) -> tuple[list[Path], list[str]]:
    """Draw the parts of a figure.

    Args:
      name: of the figure.
      source: its data.
      out: folder for the images.
      suffix: of their names.

    Returns:
      The PNG files, each with an SVG beside it, and the parts that these data do not cover.
    """
    files, missing = [], []
    for part in FIGURES[name].parts:
        figure = PARTS[part](source)
        if figure is None:
            missing.append(part)
        else:
            files.append(style.save(figure, out, f"{name}_{part}{suffix}").png)
    return files, missing


@dataclass(frozen=True)
class Args:
    """Command line."""

    name: tyro.conf.Positional[Literal[tuple(FIGURES)]]
    """Figure to draw."""
    source: Literal["runs", "published"] = "runs"
    """Source of the data."""
    published: str | None = None
    """Folder with published data."""
    runs: str = "runs"
    """Folder of all records."""
    study: str | None = None
    """Study to draw it from, by name or as a file; by default the figure's own."""
    preset: str = "cpu"
    """Size of the study."""
    out: str = "site/paper"
    """Folder for the images."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 2 for bad input."""
    try:
        options = parse(Args, sys.argv[1:] if argv is None else argv, "Draw a figure of a paper.")
        figure = FIGURES[options.name]
        suffix = "" if options.preset == "cpu" else f"_{options.preset}"
        if options.source == "published":
            if options.published is None:
                raise InputError("--source published needs --published FOLDER")
            source = read_published(options.name, figure, Path(options.published))
            suffix = "_published"
        elif not figure.study:
            source, suffix = SIMULATION, ""
        else:
            name = options.study or figure.study
            source = read_runs(name, Path(options.runs), options.preset)
            if name != figure.study:
                suffix = f"_{Path(name).stem}{suffix}"
        files, missing = draw(options.name, source, Path(options.out), suffix)
        if not files:
            raise InputError(f"{options.name}: these data have none of {', '.join(missing)}")
    except (BadInput, InputError, StudyError, OSError) as error:
        return bad_input(error)
    for file in files:
        print(file)
    if missing:
        print(f"not in these data: {', '.join(missing)}")
    return 0


if __name__ == "__main__":
    run_command(main)
