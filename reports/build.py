"""Builds the page of a study from run records: `python -m reports.build quickstart`.

Writes the page as HTML (`index.html`, one file), as Markdown (`README.md`) and as data (`result.json`), and
the figures as PNG and SVG.
"""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import pandas as pd
import tyro
from rich import box
from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text

from analysis.forks import call_all
from analysis.output import bad_input
from analysis.tables import InputError
from cleanba.record import RecordError, replace_file
from cleanba.record.redaction import of_published
from cleanba.run.command_line import BadInput, parse
from experiments.pool import available_cores
from experiments.study import StudyError
from plots import style
from plots.learning_curves import MANY
from reports import cells, findings, render
from reports.caveats import caveats
from reports.command import run_command
from reports.explorer import specification
from reports.page import (
    Archive,
    Cell,
    Figure,
    Page,
    Section,
    Table,
    Value,
    earlier_figures,
    shown,
    write_json,
)
from reports.sections import SECTIONS
from reports.study import ReportError, StudyRuns, commands, read_study

# Errors that are reported to the user in one line.
ERRORS = (BadInput, RecordError, ReportError, InputError, StudyError, OSError, ValueError)
PLAIN_WIDTH = 150
LONG = ("speed", "time", "lag")  # sections that many environments make long
LARGE = 100_000  # bytes of a figure; larger ones, and all of an archive, are compressed in the page


@dataclass(frozen=True)
class Args:
    """Command line."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Name of the study."""
    runs: str | None = None
    """Folder with its run records; by default runs/<name>."""
    out: str | None = None
    """Folder for the page; by default site/<name>."""
    published: bool = False
    """The records are those of an archive, without logs. The page is that of the archive."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 2 for bad input."""
    try:
        args = parse(Args, sys.argv[1:] if argv is None else argv, "Build the page of a study.")
        out = Path(args.out or f"site/{args.name}")
        runs = Path(args.runs or f"runs/{args.name}")
        page = build(args.name, runs, out, published=args.published)
    except ERRORS as error:
        return bad_input(error)
    print_table(page.table("summary"))
    print(out / "index.html")
    print(out / "README.md")
    return 0


def build(
    name: str, runs: Path, out: Path, *, published: bool = False, archive: Archive | None = None
) -> Page:
    """Write the page of a study.

    Args:
      name: of the study.
      runs: folder with its run records.
      out: folder for the page.
      published: the records are published copies, without logs and the like.
      archive: where they are published, for the page to name.

    Raises:
      ReportError: if no run is completed, or a file that this command did not write is in the way.
      InputError: if there is no run record.
    """
    render.check_replaceable(out / "index.html", out / "README.md")
    study = read_study(name, runs, out, published=published)
    page = msgspec.structs.replace(page_of(study), archive=archive)
    figures = {one.name for one in page.figures()}
    folder = out / "figures"
    stored = {one.data or one.name for one in page.figures()}
    for old in earlier_figures(out / "result.json"):
        for name in (f"{old.name}.png", f"{old.name}.svg") if old.name not in figures else ():
            (folder / name).unlink(missing_ok=True)
        if (old.data or old.name) not in stored:
            (folder / f"{old.data or old.name}.csv").unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.svg" for name in sorted(figures)]
    large = [file for file in files if published or file.stat().st_size > LARGE]
    tables = [folder / f"{name}.csv" for name in sorted(stored)]
    html = render.html_page(
        page,
        {file.stem: render.data_address(file) for file in files if file not in large},
        svgs={file.stem: render.compressed(file) for file in large},
        # An archive has the records themselves, and its page nothing that an audit does not check.
        data={} if published else {file.stem: render.compressed(file) for file in tables},
        explorer="" if published else _chart(study, page),
        index="" if published else "../index.html",
    )
    replace_file(out / "index.html", html)
    replace_file(out / "README.md", render.markdown_page(page, figures, "figures/"))
    write_json(page, out / "result.json")
    return page


def page_of(study: StudyRuns) -> Page:
    """Return the page of a study; its figures are saved below `study.out`."""
    with of_published() if study.published else contextlib.nullcontext():
        return _page_of(study)


def _page_of(study: StudyRuns) -> Page:
    # these take a few seconds each for studies of the papers' sizes
    calls = [partial(section, study) for section in SECTIONS]
    found = tuple(one for one in call_all(calls, len(available_cores())) if one is not None)
    plan, done = study.plan, study.done
    main_figure, found = _with_main_figure(study, found)
    if done.runs["env_id"].nunique() > MANY:
        found = tuple(
            msgspec.structs.replace(one, folded=True) if one.name in LONG else one for one in found
        )
    limits = caveats(
        len(done.runs),
        len(study.tables.runs),
        len(plan.runs) if plan else 0,
        bool(study.changed),
        study.scores["runs"].tolist(),
        study.problems,
        _compile_seconds_saved(done.runs),
    )
    dates = sorted(
        value[:16].replace("T", " ")
        for value in (*done.runs["started"], *done.runs["ended"])
        if isinstance(value, str)
    )
    hardware = tuple(hardware_lines(done.runs))
    return Page(
        name=study.name,
        title=plan.title if plan else f"Study {study.name}",
        question=plan.question if plan else "",
        finding=tuple(map(cells.neutral, findings.findings(study))),
        caveats=limits + ((f"Measured on: {'; '.join(hardware)}.",) if hardware else ()),
        sections=found,
        main_figure=main_figure,
        paper=plan.paper if plan else "",
        remark=plan.remark if plan else "",
        commands=commands(study),
        revisions=tuple(_revisions(done.runs)),
        versions=tuple(_versions(done.runs)),
        hardware=hardware,
        dates=(dates[0], dates[-1]) if dates else None,
    )


def _chart(study: StudyRuns, page: Page) -> str:
    """Return the specification of the interactive curves; '' if the page has no curves."""
    if "curves_steps" not in {one.name for one in page.figures()}:
        return ""
    return specification(sorted(study.curves.means["env_id"].astype(str).unique()), study.look)


def _with_main_figure(
    study: StudyRuns, sections: tuple[Section, ...]
) -> tuple[Figure | None, tuple[Section, ...]]:
    """Take the figure that shows the answer out of its section, which may end up empty."""
    figures = {one.figure.name: one for one in sections if one.figure}
    asked = study.plan.main_figure if study.plan else ""
    usual = ("aggregates", "curves_steps", "final_scores", "speed")
    name = next((one for one in (asked, *usual) if one in figures), None)
    if name is None:
        return None, sections
    rest = (
        msgspec.structs.replace(one, figure=None) if one is figures[name] else one
        for one in sections
    )
    return figures[name].figure, tuple(one for one in rest if one.figure or one.table or one.text)


def hardware_lines(runs: pd.DataFrame) -> list[str]:
    """Return one line per kind of hardware that the runs found, with the settings if it differs."""
    lines: dict[str, dict[str, None]] = {}
    for hardware, setting in zip(runs["hardware"], runs["setting"].astype(str), strict=True):
        if isinstance(hardware, Mapping):
            cores = hardware.get("cpu_affinity")
            parts = [str(hardware.get(name) or "") for name in ("platform", "device_kind")]
            if isinstance(cores, list):
                parts.append(f"{style.counts_text([len(cores)], 'CPU cores')} per run")
            pool = hardware.get("xla_cpu_pool_size")
            parts += [f"XLA's CPU thread pool of size {pool}"] if pool else []
            line = cells.neutral(", ".join(part for part in parts if part))
            lines.setdefault(line, {})[setting] = None
    lines.pop("", None)
    if len(lines) == 1:
        return list(lines)
    return [cells.neutral(f"{line} ({', '.join(settings)})") for line, settings in lines.items()]


def _compile_seconds_saved(runs: pd.DataFrame) -> list[float]:
    """Return what the compilation cache saved at least, of the runs that used it."""
    found = (
        one.get("compile_seconds_saved") for one in runs["hardware"] if isinstance(one, Mapping)
    )
    # older records have -0.0 too
    return [abs(seconds) for seconds in found if isinstance(seconds, float | int) and seconds >= 0]


def _revisions(runs: pd.DataFrame) -> list[str]:
    # not `cells.neutral`, which would redact forty hexadecimal digits as a token
    known = [one for one in runs["revision"] if isinstance(one, str) and one]
    return list(dict.fromkeys(" ".join(one.split()) for one in known))


def _versions(runs: pd.DataFrame) -> list[str]:
    known = [one for one in runs["versions"] if isinstance(one, Mapping)]
    lines = (", ".join(f"{name} {version}" for name, version in one.items()) for one in known)
    return list(dict.fromkeys(cells.neutral(line) for line in lines))


def print_table(table: Table) -> None:
    """Print a table in the terminal."""
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    printed = TerminalTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column, numeric in zip(table.columns, table.numeric(), strict=True):
        printed.add_column(column, justify="right" if numeric else "left", no_wrap=not numeric)
    for row in table.rows:
        printed.add_row(*map(_terminal_text, row))
    console.print(printed)


def _terminal_text(value: Value) -> Text:
    tones = {"good": "green", "bad": "red", "note": "yellow"}
    tone = value.tone if isinstance(value, Cell) else ""
    return Text(shown(value), style=tones.get(tone, ""))


if __name__ == "__main__":
    run_command(main)
