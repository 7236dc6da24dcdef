"""Renders a page to HTML and to Markdown; everything that comes from a record is escaped.

The HTML page is one file that opens offline: figures, style and script are inside, and its content
security policy allows no other script, so that a missed escape could not run one either.
"""

import base64
import gzip
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markdown_it import MarkdownIt
from markupsafe import Markup
from markupsafe import escape as html_escape

from cleanba.record.schema import HIDDEN
from reports import page as pages
from reports.explorer import bundle
from reports.page import NOTHING, Cell, Figure, Page, Section, Table, Value
from reports.study import ReportError

TEMPLATES = Path(__file__).parent / "templates"
GENERATOR = "made by python -m reports"
OWN = "This toolkit"  # the group of studies of no paper

_MARKUP = re.compile(r"([\\`*{}\[\]#|!~$]|(?<![A-Za-z0-9_])_|_(?![A-Za-z0-9_]))")
_CODE = re.compile(r"(?<!\\)\\`(.+?)(?<!\\)\\`")  # in what `escape` returns
_HIDDEN = re.compile(rf"(?![\n\t])[{HIDDEN}]")
_MARKDOWN = MarkdownIt("commonmark", {"html": False})


def visible(value: Any) -> Any:
    """Return a text with escapes such as `\\u202e` for characters that hide or reorder others."""
    if isinstance(value, str) and _HIDDEN.search(value):
        return type(value)(_HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", value))
    return value


def escape(text: object) -> str:
    """Return text that Markdown shows literally, on one line."""
    line = visible(" ".join(str(text).split()))
    # HTML last: a backslash within an entity would break it. Quotes matter only in attributes.
    quoted = str(html_escape(_MARKUP.sub(r"\\\1", line)))
    return quoted.replace("&#39;", "'").replace("&#34;", '"')


def escape_prose(text: str) -> str:
    """Return text that Markdown shows literally, except that pairs of backticks enclose code."""
    return _CODE.sub(r"<code>\1</code>", escape(text))


def html_page(
    page: Page,
    images: Mapping[str, str],
    *,
    svgs: Mapping[str, str] | None = None,
    data: Mapping[str, str] | None = None,
    explorer: str = "",
    index: str = "",
) -> str:
    """Return the HTML page.

    Args:
      page: the page.
      images: figure name -> address of the picture, such as `data_address` makes.
      svgs: figure name -> the picture as `compressed` makes it, which the page's script shows
      data: figure name -> its data, as `compressed` makes them.
      explorer: of `explorer.specification`, which needs the data of `curves_steps`; '' for none.
      index: address of the page that lists all studies; '' for none.
    """
    script = (TEMPLATES / "report.js").read_text()
    vega = bundle() if explorer else ""
    return _template("report.html.j2").render(
        page=page,
        generator=GENERATOR,
        css=Markup((TEMPLATES / "report.css").read_text()),
        script=Markup(script),
        vega=Markup(vega),
        script_digests=[_digest(one) for one in (script, vega) if one],
        images=images,
        svgs=svgs or {},
        data=data or {},
        explorer=Markup(explorer),
        index=index,
    )


def html_index(entries: Sequence[Page], thumbnails: Mapping[str, str], docs: bool = False) -> str:
    """Return the HTML index of pages, each in a folder of its name.

    Args:
      entries: the pages.
      thumbnails: name of a page -> address of the picture that shows its finding.
      docs: whether the documentation is beside it, in docs/.
    """
    css = Markup((TEMPLATES / "report.css").read_text())
    papers = sorted({page.paper for page in entries}, key=lambda paper: (not paper, paper))
    groups = [(paper or OWN, [one for one in entries if one.paper == paper]) for paper in papers]
    return _template("index.html.j2").render(
        groups=groups, thumbnails=thumbnails, docs=docs, css=css, generator=GENERATOR
    )


def html_document(title: str, body: str) -> str:
    """Return a page of the documentation.

    Args:
      title: of the page.
      body: HTML.
    """
    css = Markup((TEMPLATES / "report.css").read_text())
    return _template("document.html.j2").render(
        title=title, body=Markup(body), css=css, generator=GENERATOR
    )


def markdown_page(page: Page, figures: Collection[str], folder: str = "") -> str:
    """Return the Markdown page.

    Args:
      page: the page.
      figures: names of the figures whose PNG files lie in the folder; others are left out.
      folder: of the figures, relative to the page, with its slash.
    """
    lines = [f"<!-- {GENERATOR} -->", f"# {escape(page.title)}", ""]
    lines += [escape_prose(page.question), ""] if page.question else []
    lines += [f"**{escape(sentence)}**\n" for sentence in page.finding]
    if page.main_figure:
        lines += [*_markdown_figure(page.main_figure, page.title, figures, folder), ""]
    lines += [escape_prose(page.remark), ""] if page.remark else []
    lines += ["What limits this answer:", ""] if page.caveats else []
    lines += [f"- {escape(sentence)}" for sentence in page.caveats]
    for section in page.sections:
        lines += _markdown_section(section, figures, folder)
    lines += ["", "## Reproduce this page", ""]
    if page.commands:
        lines += [
            "```sh",
            *(" ".join(command.splitlines()) for command in page.commands),
            "```",
            "",
        ]
    lines += [f"- {escape(line)}" for line in provenance(page)]
    return "\n".join(lines) + "\n"


def provenance(page: Page) -> list[str]:
    """Return the lines about source, packages, processors and dates."""
    lines = [f"source revision {revision}" for revision in page.revisions]
    lines += [*page.versions, *page.hardware]
    if page.dates:
        lines.append(f"runs from {page.dates[0]} to {page.dates[1]} (UTC)")
    if page.archive:
        name, size, digest = page.archive.name, page.archive.size, page.archive.sha256
        lines.append(f"records: {name}, {size:,} bytes, SHA-256 {digest}")
        lines.append(f"to verify them: make audit ARCHIVE={name}")
    return lines


def _markdown_section(section: Section, figures: Collection[str], folder: str) -> list[str]:
    blocks = [section.text] if section.text else []
    if section.figure:
        blocks += _markdown_figure(section.figure, section.title, figures, folder)
    if section.table:
        table = "\n".join(markdown_table(section.table))
        summary = "<details><summary>The numbers</summary>"
        blocks.append(f"{summary}\n\n{table}\n\n</details>" if section.table.folded else table)
    if not blocks:
        return []
    return ["", f"## {escape(section.title)}", "", "\n\n".join(blocks)]


def _markdown_figure(
    figure: Figure, title: str, figures: Collection[str], folder: str
) -> list[str]:
    """Return a figure and its caption as blocks of Markdown; [] if its file is not there."""
    if figure.name not in figures:
        return []
    address = f"{folder}{quote(figure.name)}.png"
    return [f"![{escape(title)}]({address})", f"\n{escape(figure.caption)}"]


def markdown_table(table: Table) -> list[str]:
    """Return a table as lines of Markdown, without its column of commands."""
    kept = [i for i, name in enumerate(table.columns) if name != table.code]
    numeric = table.numeric()
    return [
        f"| {' | '.join(escape(table.columns[i]) for i in kept)} |",
        f"| {' | '.join('---:' if numeric[i] else '---' for i in kept)} |",
        *(f"| {' | '.join(_markdown_cell(row[i]) for i in kept)} |" for row in table.rows),
    ]


def _markdown_cell(value: Value) -> str:
    text = escape(pages.shown(value)) or NOTHING
    if isinstance(value, Cell):
        text = f"**{text}**" if value.tone in ("good", "bad") else text
        text = f"[{text}]({quote(value.link, safe='/%')})" if value.link else text
    return text


def markdown_index(entries: Sequence[Page]) -> str:
    """Return the Markdown index of pages: one row for each, in a folder of its name."""
    rows = []
    for page in entries:
        link = f"[{escape(page.name)}]({quote(page.name)}/README.md)"
        found = "<br>".join(escape(sentence) for sentence in page.finding) or NOTHING
        data = "<br>".join(escape(sentence) for sentence in page.caveats)
        records = f"{page.archive.size / 1e6:,.1f} MB" if page.archive else NOTHING
        question = escape_prose(page.question or page.title)
        rows.append(f"| {link} | {question} | {found} | {data} | {records} |")
    return "\n".join(
        [
            f"<!-- {GENERATOR} -->",
            "# What the studies found",
            "",
            "This table is written by `make publish-results` from `*/result.json`. Every study has a page "
            "with its tables; `make report` makes the same page for the browser. The last column is the size "
            "of the published records; the SHA-256 is on the page (docs/audit.md).",
            "",
            "| study | question | finding | data | records |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def check_replaceable(*pages: Path) -> None:
    """Raise ReportError if one of the pages exists, and this package has not written it."""
    for page in pages:
        if page.exists() and GENERATOR not in page.read_text(errors="replace")[:2000]:
            raise ReportError(f"{page} was not made by this command: choose another --out")


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=visible,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "markdown": lambda text: Markup(_MARKDOWN.render(text)),
        "shown": pages.shown,
        "sort_value": pages.sort_value,
        "code": _with_code,
    }
    environment.globals |= {"provenance": provenance}
    environment.tests["cell"] = lambda value: isinstance(value, Cell)
    return environment.get_template(name)


def _with_code(text: str) -> Markup:
    """Return a text as HTML in which pairs of backticks enclose code."""
    parts = [html_escape(visible(part)) for part in text.split("`")]
    last = "`" + parts.pop() if len(parts) % 2 == 0 else ""
    coded = (f"<code>{part}</code>" if i % 2 else str(part) for i, part in enumerate(parts))
    return Markup("".join(coded) + last)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def data_address(image: Path) -> str:
    """Return an SVG or PNG file as an address."""
    kind = {".svg": "image/svg+xml", ".png": "image/png"}[image.suffix]
    return f"data:{kind};base64,{base64.b64encode(image.read_bytes()).decode()}"


def compressed(file: Path) -> str:
    """Return a file as gzip in base64; the same file gives the same text."""
    return base64.b64encode(gzip.compress(file.read_bytes(), mtime=0)).decode()
