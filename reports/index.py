"""Builds the reports of all studies that there are records of, and an index: `python -m reports.index`."""

import argparse
import html
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl

from analysis.output import bad_input
from analysis.tables import InputError
from experiments.study import StudyError
from reports import build, render


class Entry(NamedTuple):
    """A report in the index.

    Attributes:
      name: of its folder.
      title: of its page.
      question: that it answers; '' if its study does not say.
      sentences: what it found, in short.
    """

    name: str
    title: str
    question: str
    sentences: list[str]


def entries(folder: Path) -> list[Entry]:
    """Return the reports below a folder, by the names of theirs."""
    return [
        _entry(page)
        for page in sorted(folder.glob("*/index.html"))
        if render.GENERATOR in page.read_text(errors="replace")[:2000]
    ]


def _entry(page: Path) -> Entry:
    """Read what the index says of a report from the head of its page, where all text is escaped."""
    header = re.search(r"<header>\n(.*?)<nav>", page.read_text(), re.S)[1]

    def texts(tag: str) -> list[str]:
        return [html.unescape(text) for text in re.findall(rf"{tag}(.*?)</", header, re.S)]

    question = texts('<p class="question">')
    return Entry(page.parent.name, texts("<h1>")[0], "".join(question), texts("<p>"))


def write(folder: Path) -> list[Path]:
    """Write the index of the reports below a folder, as a page for the browser and one for GitHub.

    Raises:
      ReportError: if a page that was not made here is in the way, or there is no report.
    """
    pages = [folder / "index.html", folder / "README.md"]
    found = entries(folder)
    if not found:
        raise build.ReportError(f"{folder}: there is no report there")
    for page in pages:
        if not render.was_made_here(page):
            raise build.ReportError(f"{page} was not made by this command: choose another --out")
    pages[0].write_text(render.html_index(found))
    pages[1].write_text(render.markdown_index(found))
    return pages


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 if a report could not be made, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m reports.index", description="Build all reports, and their index."
    )
    parser.add_argument("--runs", default="runs", help="folder of all records (default: runs)")
    parser.add_argument("--out", default="reports", help="folder of all reports")
    options = parser.parse_args(argv)
    runs, out = Path(options.runs), Path(options.out)
    code = 0
    for study in sorted(path.parent for path in runs.glob("*/study.toml")):
        try:
            build.build(study.name, study, out / study.name)
            print(f"{study.name}: {out / study.name / 'index.html'}", flush=True)
        except (build.ReportError, InputError, StudyError, OSError) as error:
            print(f"{study.name}: no report: {error}", file=sys.stderr)
            code = 1
    try:
        for page in write(out):
            print(page)
    except (build.ReportError, OSError) as error:
        return bad_input(error)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # where a reader leaves (`| head`), end quietly
    mpl.use("agg")
    sys.exit(main())
