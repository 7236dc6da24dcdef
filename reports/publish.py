"""Publishes the page of a study in the repository: `python -m reports.publish quickstart`.

Builds the page as `reports.build` does, with the SHA-256 of the study's archive (reports/archive.py), and
writes a small copy of it to `results/<study>/`: `result.json`, a Markdown page, at most three figures, and
the videos.
Then writes the index of all results, `results/README.md`. Nothing else here writes to tracked files.
"""

import hashlib
import io
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, unquote

import msgspec
import tyro
from PIL import Image

from analysis.output import bad_input
from cleanba.record import find_runs, replace_file
from cleanba.record.folder import INFO_FILE
from cleanba.run.command_line import parse
from reports import build, index, render
from reports.archive import sha256
from reports.command import run_command
from reports.page import Archive, Cell, Page, Table, Value, read_json, write_json
from reports.study import ReportError

MOST_BYTES = 150_000  # largest size of a figure
WIDTH = 1200  # pixels
COLOURS = 256
# Published are the figure that shows the answer, and one of each group: the first that the page has.
MOST_FIGURES = 3
FIGURES = (
    ("curves_steps",),
    ("aggregates", "policy_changes", "policy_lag", "final_scores"),
    ("speed",),
)


@dataclass(frozen=True)
class Args:
    """Command line."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Name of the study."""
    runs: str | None = None
    """Folder with its run records; by default runs/<name>."""
    site: str = "site"
    """Folder of all pages, where the page is built."""
    archives: str = "dist"
    """Folder of the archives that `reports.archive` wrote."""
    out: str = "results"
    """Folder of all published results."""
    published: bool = False
    """The records are those of an archive, without logs, models and TensorBoard files."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 2 for bad input."""
    try:
        args = parse(Args, sys.argv[1:] if argv is None else argv, "Publish the page of a study.")
        site, results = Path(args.site) / args.name, Path(args.out)
        render.check_replaceable(results / args.name / "README.md", results / "README.md")
        runs = Path(args.runs or f"runs/{args.name}")
        archive = archive_of(Path(args.archives) / f"{args.name}.zip", runs)
        page = build.build(args.name, runs, site, published=args.published, archive=archive)
        files = publish(page, site, results)
    except build.ERRORS as error:
        return bad_input(error)
    for file in files:
        print(file)
    return 0


def archive_of(file: Path, runs: Path) -> Archive:
    """Describe the archive of a study.

    Args:
      file: the archive.
      runs: folder of the records that it must hold.

    Raises:
      ReportError: if it is missing, or holds other records.
    """
    if not file.is_file():
        raise ReportError(f"{file} is missing: make publish writes it")
    prefix = f"{file.stem}/data/runs/{file.stem}/"
    try:
        with zipfile.ZipFile(file) as opened:
            found = {
                name.removeprefix(prefix): hashlib.sha256(opened.read(name)).hexdigest()
                for name in opened.namelist()
                if name.startswith(prefix) and name.endswith(f"/{INFO_FILE}")
            }
    except zipfile.BadZipFile as error:
        raise ReportError(f"{file}: {error}") from None
    records = {f"{path.name}/{INFO_FILE}": sha256(path / INFO_FILE) for path in find_runs(runs)}
    if found != records:
        raise ReportError(f"{file} holds other records than {runs}: make publish OVERWRITE=1")
    return Archive(file.name, file.stat().st_size, sha256(file))


def publish(page: Page, site: Path, results: Path) -> list[Path]:
    """Write the published copy of a page, and the index of all published results.

    Args:
      page: the page.
      site: its folder, with the PNG files of its figures.
      results: folder of all results.

    Returns:
      The files written.
    """
    render.check_replaceable(results / page.name / "README.md", results / "README.md")
    check_videos(page)
    folder = results / page.name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "result.json"
    if file.exists():
        earlier = read_json(file)
        for name in (*(f"{one.name}.png" for one in earlier.figures()), *videos(earlier)):
            (folder / name).unlink(missing_ok=True)
    for name, link in videos(page).items():
        replace_file(folder / name, (site / unquote(link)).read_bytes())
    page = without_links(page)
    write_json(page, file)
    images = chosen(page)
    for name in images:
        replace_file(folder / f"{name}.png", small_png(site / "figures" / f"{name}.png"))
    replace_file(folder / "README.md", render.markdown_page(page, images))
    replace_file(results / "README.md", render.markdown_index(index.entries(results)))
    names = ["result.json", "README.md", *(f"{name}.png" for name in images), *videos(page)]
    return [*(folder / name for name in names), results / "README.md"]


def check_videos(page: Page) -> None:
    """Raise ReportError if a page names a video without a link to its file."""
    if any(cell.text.endswith(".mp4") and not cell.link for cell in video_cells(page)):
        raise ReportError("videos can be published only of records below the working directory")


def without_links(page: Page) -> Page:
    """Return a page without links to run records, which are not published with it, but with its videos."""

    def plain(value: Value) -> Value:
        if not isinstance(value, Cell):
            return value
        return msgspec.structs.replace(value, link=quote(video_name(value.link)))

    def unlinked(table: Table) -> Table:
        rows = tuple(tuple(map(plain, row)) for row in table.rows)
        return msgspec.structs.replace(table, rows=rows)

    sections = tuple(
        msgspec.structs.replace(one, table=unlinked(one.table)) if one.table else one
        for one in page.sections
    )
    return msgspec.structs.replace(page, sections=sections)


def videos(page: Page) -> dict[str, str]:
    """Return the links to videos, by the names of the published files."""
    links = [cell.link for cell in video_cells(page)]
    return {video_name(link): link for link in links if video_name(link)}


def video_cells(page: Page) -> list[Cell]:
    """Return the cells of the table of videos that are not plain values."""
    table = page.table("videos")
    return [one for row in table.rows for one in row if isinstance(one, Cell)] if table else []


def video_name(link: str) -> str:
    """Return the published name of a video: `<run>__<file>`; '' if the link leads to something else."""
    path = Path(unquote(link))
    if path.suffix != ".mp4":
        return ""
    return path.name if len(path.parts) == 1 else f"{path.parts[-3]}__{path.name}"


def chosen(page: Page) -> list[str]:
    """Return the names of the figures that are published."""
    there = {one.name for one in page.figures()}
    groups = ([name for name in group if name in there] for group in FIGURES)
    names = [
        *([page.main_figure.name] if page.main_figure else []),
        *(group[0] for group in groups if group),
    ]
    return list(dict.fromkeys(names))[:MOST_FIGURES]


def small_png(file: Path) -> bytes:
    """Return a figure as a PNG of at most `MOST_BYTES`, with a palette, and narrower if necessary."""
    with Image.open(file) as image:
        image = image.convert("RGB")
    width = min(WIDTH, image.width)
    while True:
        height = round(image.height * width / image.width)
        scaled = image.resize((width, height), Image.Resampling.LANCZOS)
        written = io.BytesIO()
        scaled.quantize(COLOURS, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
        if written.tell() <= MOST_BYTES:
            return written.getvalue()
        width = width * 9 // 10


if __name__ == "__main__":
    run_command(main)
