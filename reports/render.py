"""Turns the content of a report into its two pages, with everything that comes from a record escaped.

The HTML page is one file that opens anywhere: figures, style and script are inside, and its content
security policy lets no other script run, so that even an escape that was forgotten would stay text.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape

TEMPLATES = Path(__file__).parent / "templates"
GENERATOR = "made by python -m reports.build"

_MARKDOWN = re.compile(r"([\\`*{}\[\]#|!~$]|(?<![A-Za-z0-9_])_|_(?![A-Za-z0-9_]))")


def html_page(content: Mapping[str, Any], svgs: Mapping[str, Path]) -> str:
    """Return the HTML page.

    Args:
      content: what the template asks for.
      svgs: figure name -> SVG file.
    """
    script = (TEMPLATES / "report.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = _environment().get_template("report.html.j2")
    return template.render(
        **content,
        generator=GENERATOR,
        css=Markup((TEMPLATES / "report.css").read_text()),
        script=Markup(script),
        script_digest=digest,
        images={name: _data_address(path) for name, path in svgs.items()},
    )


def markdown_page(content: Mapping[str, Any]) -> str:
    """Return the Markdown page, whose figures lie in `figures/` beside it."""
    template = _markdown_environment().get_template("report.md.j2")
    return template.render(**content, generator=GENERATOR)


def html_index(entries: Sequence[Any]) -> str:
    """Return the HTML page of an index; entries as in reports/index.py."""
    css = Markup((TEMPLATES / "report.css").read_text())
    template = _environment().get_template("index.html.j2")
    return template.render(entries=entries, css=css, generator=GENERATOR)


def markdown_index(entries: Sequence[Any]) -> str:
    """Return the Markdown page of an index."""
    template = _markdown_environment().get_template("index.md.j2")
    return template.render(entries=entries, generator=GENERATOR)


def markdown_text(value: Any) -> Any:
    """Return text that Markdown shows as it is; what is markup already is left alone."""
    if isinstance(value, Markup):
        return value
    text = " ".join(str(value).split()) if value is not None else ""
    # HTML last: a backslash within an entity would break it. Quotes matter in attributes alone.
    quoted = str(escape(_MARKDOWN.sub(r"\\\1", text)))
    return Markup(quoted.replace("&#39;", "'").replace("&#34;", '"'))


def was_made_here(page: Path) -> bool:
    """Whether a page may be replaced: it is not there, or an earlier build of this command."""
    return not page.exists() or GENERATOR in page.read_text(errors="replace")[:2000]


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )


def _markdown_environment() -> jinja2.Environment:
    environment = _environment()
    environment.finalize = markdown_text
    environment.filters["code"] = lambda text: Markup(" ".join(str(text).splitlines()))
    environment.filters["address"] = lambda text: Markup(quote(str(text), safe="/%"))
    return environment


def _data_address(svg: Path) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.read_bytes()).decode()
