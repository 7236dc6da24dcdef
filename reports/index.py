"""Builds the pages of all studies that have records, and their index: `python -m reports.index`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from analysis.output import bad_input
from cleanba.record import replace_file
from cleanba.run.command_line import parse
from reports import build, render
from reports.command import run_command
from reports.page import Page, read_json
from reports.study import ReportError


@dataclass(frozen=True)
class Args:
    """Command line."""

    runs: str = "runs"
    """Folder of all records."""
    out: str = "site"
    """Folder of all pages."""
    build: bool = True
    """Build the pages first; without it, list those that are there."""


def entries(folder: Path) -> list[Page]:
    """Return the pages below a folder, sorted by name, from their `result.json`.

    Raises:
      ValueError: if one cannot be read.
    """
    return [read_json(file) for file in sorted(folder.glob("*/result.json"))]


def readable_entries(folder: Path) -> list[Page]:
    """Return the pages below a folder that can be read, and name the others, such as old ones.

    Raises:
      ValueError: if none can be read.
    """
    found, errors = [], []
    for file in sorted(folder.glob("*/result.json")):
        try:
            found.append(read_json(file))
        except ValueError as error:
            errors.append(error)
    if errors and not found:
        raise errors[0]
    for error in errors:
        print(f"not listed: {error}", file=sys.stderr)
    return found


def write(folder: Path) -> Path:
    """Write the HTML index of the pages below a folder, and return it.

    Raises:
      ReportError: if there is no page, or a file that this command did not write is in the way.
    """
    found, file = readable_entries(folder), folder / "index.html"
    if not found:
        raise ReportError(f"{folder}: there is no page there")
    render.check_replaceable(file)
    docs = (folder / "docs/index.html").is_file()
    replace_file(file, render.html_index(found, thumbnails(folder, found), docs))
    return file


def thumbnails(folder: Path, pages: Sequence[Page]) -> dict[str, str]:
    """Return the addresses of the pictures that show the findings of pages, by the pages' names."""
    found = {}
    for page in pages:
        names = (
            [f"{page.main_figure.name}.svg", f"{page.main_figure.name}.png"]
            if page.main_figure
            else []
        )
        for picture in (f"{page.name}/figures/{name}" for name in names):
            if page.name not in found and (folder / picture).is_file():
                found[page.name] = quote(picture)
    return found


def build_all(runs: Path, out: Path) -> int:
    """Build the pages of all studies that have records; return 1 if one could not be made, else 0."""
    code = 0
    for study in sorted(path.parent for path in runs.glob("*/study.toml")):
        try:
            build.build(study.name, study, out / study.name)
            print(f"{study.name}: {out / study.name / 'index.html'}", flush=True)
        except build.ERRORS as error:
            print(f"{study.name}: no page: {error}", file=sys.stderr)
            code = 1
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 if a page could not be made, or 2 for bad input."""
    code = 0
    try:
        args = parse(Args, sys.argv[1:] if argv is None else argv, "Build all pages.")
        runs, out = Path(args.runs), Path(args.out)
        code = build_all(runs, out) if args.build else 0
        print(write(out))
    except build.ERRORS as error:
        return bad_input(error)
    return code


if __name__ == "__main__":
    run_command(main)
