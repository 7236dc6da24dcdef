"""Builds a site for any static host: `python -m reports.site`.

The site has the pages of all studies in `runs/` and, for studies without records there, those of `results/`;
the documentation; and an index of all. Links between them are relative, so that it can be hosted anywhere.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from markdown_it import MarkdownIt
from markdown_it.token import Token

from analysis.output import bad_input
from cleanba.record import replace_file
from cleanba.run.command_line import parse
from reports import build, index, render
from reports.command import run_command
from reports.page import Page, earlier_figures, read_json
from reports.study import ReportError

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/*.md",
    "results/benchmarks.md",
    "results/certificates/*.md",
)
_EXTERNAL = re.compile("[a-z]+:")


@dataclass(frozen=True)
class Args:
    """Command line."""

    runs: str = "runs"
    """Folder of all records."""
    results: str = "results"
    """Folder of all published results."""
    out: str = "site"
    """Folder of the site."""
    repository: str = ""
    """Address of the source files, for links to them; by default these are not links."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 if a page could not be made, or 2 for bad input."""
    try:
        args = parse(Args, sys.argv[1:] if argv is None else argv, "Build the site.")
        out = Path(args.out)
        code = index.build_all(Path(args.runs), out)
        for folder in sorted(path.parent for path in Path(args.results).glob("*/result.json")):
            if not (Path(args.runs) / folder.name / "study.toml").is_file():
                write_published(folder, out / folder.name)
        write_docs(ROOT, out, args.repository)
        print(index.write(out))
    except build.ERRORS as error:
        return bad_input(error)
    return code


def write_published(folder: Path, out: Path) -> None:
    """Write the HTML page of published results.

    Args:
      folder: with `result.json`, the figures and the videos.
      out: folder of the page.

    Raises:
      ReportError: if a file that no command here wrote is in the way.
    """
    page = read_json(folder / "result.json")
    render.check_replaceable(out / "index.html")
    figures = out / "figures"
    for old in earlier_figures(out / "result.json"):
        (figures / f"{old.name}.png").unlink(missing_ok=True)
    figures.mkdir(parents=True, exist_ok=True)
    images = {}
    for one in page.figures():
        picture = folder / f"{one.name}.png"
        if picture.is_file():
            shutil.copy(picture, figures)
            images[one.name] = render.data_address(picture)
    page = with_figures(page, images)
    for video in folder.glob("*.mp4"):
        shutil.copy(video, out)
    replace_file(out / "index.html", render.html_page(page, images, index="../index.html"))
    shutil.copy(folder / "result.json", out)


def with_figures(page: Page, there: Collection[str]) -> Page:
    """Return a page without the figures whose files are not there, and without empty sections."""
    sections = (
        msgspec.structs.replace(one, figure=None)
        if one.figure and one.figure.name not in there
        else one
        for one in page.sections
    )
    return msgspec.structs.replace(
        page, sections=tuple(one for one in sections if one.figure or one.table or one.text)
    )


def write_docs(root: Path, out: Path, repository: str = "") -> list[Path]:
    """Write the documentation as HTML.

    Args:
      root: of the source.
      out: folder of the site.
      repository: address of the source files; '' if links to them are to be text.

    Returns:
      The pages.
    """
    written = []
    (out / "docs").mkdir(parents=True, exist_ok=True)
    for source in sorted(path for pattern in PAGES for path in root.glob(pattern)):
        here = place(source.relative_to(root).as_posix())

        def resolve(target: str, source: Path = source, here: str = here) -> str:
            return address(target, source, here, root, out, repository)

        title, body = html_of(source.read_text(), resolve)
        replace_file(out / here, render.html_document(title, body))
        written.append(out / here)
    return written


def place(source: str) -> str:
    """Return where the site has a file of the repository; '' if it does not have it."""
    folder, _, name = source.rpartition("/")
    if source == "README.md":
        return "docs/index.html"
    if source == "results/README.md":
        return "index.html"
    if name == "README.md" and folder.startswith("results/"):
        return f"{folder.removeprefix('results/')}/index.html"
    if source == "results/benchmarks.md":
        return "docs/benchmarks.html"
    if folder == "results/certificates":
        return f"docs/certificate-{name.removesuffix('.md')}.html"
    if folder.startswith("results/") and name.endswith(".png"):
        return f"{folder.removeprefix('results/')}/figures/{name}"
    if folder in ("", "docs") and name.endswith(".md"):
        return f"docs/{name.removesuffix('.md')}.html"
    return ""


def address(target: str, source: Path, here: str, root: Path, out: Path, repository: str) -> str:
    """Return where a link leads on the site; '' for nowhere.

    Args:
      target: of the link.
      source: the file that has it.
      here: its place on the site.
      root: of the source.
      out: folder of the site.
      repository: address of the source files, or ''.

    Raises:
      ReportError: if the repository has no such file.
    """
    if _EXTERNAL.match(target) or target.startswith("#"):
        return target
    path, hash_sign, fragment = target.partition("#")
    file = Path(os.path.normpath(source.parent / path))
    if not file.exists():
        raise ReportError(f"{source.relative_to(root)}: {target}: no such file")
    relative = file.relative_to(root).as_posix()
    there = place(relative)
    if there and (there.startswith("docs/") or there == "index.html" or (out / there).is_file()):
        return os.path.relpath(there, os.path.dirname(here)) + hash_sign + fragment
    return f"{repository.rstrip('/')}/{relative}" if repository else ""


def html_of(text: str, resolve: Callable[[str], str]) -> tuple[str, str]:
    """Return the title and the HTML of a Markdown page, with an anchor at each heading.

    Args:
      text: Markdown.
      resolve: target of a link -> its address, or '' to make it text.
    """
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(re.sub("<!--.*?-->\n?", "", text, flags=re.DOTALL))
    title = ""
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            heading = tokens[at + 1].content
            title = title or heading
            token.attrSet("id", re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-"))
        if token.children:
            token.children = _resolved(token.children, resolve)
    body = markdown.renderer.render(tokens, markdown.options, {})
    scrolled = body.replace("<table>", '<div class="scroll" tabindex="0"><table>')
    return title, scrolled.replace("</table>", "</table></div>")


def _resolved(tokens: Sequence[Token], resolve: Callable[[str], str]) -> list[Token]:
    kept, dropped = [], 0
    for token in tokens:
        if token.type == "image":
            token.attrSet("src", resolve(str(token.attrGet("src"))))
        if token.type == "link_open":
            target = resolve(str(token.attrGet("href")))
            if not target:
                dropped += 1
                continue
            token.attrSet("href", target)
        if token.type == "link_close" and dropped:
            dropped -= 1
            continue
        kept.append(token)
    return kept


if __name__ == "__main__":
    run_command(main)
