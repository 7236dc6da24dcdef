"""The content of a page as typed data, which `result.json` stores and both renderers read.

A page is a head and a list of sections; a section is a title, a text, a figure and a table. Titles,
captions and cells are plain text, which the renderers escape; `Section.text` is Markdown.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from cleanba.record import replace_file
from cleanba.record.files import LARGEST_INFO, decode_json, read_file

NOTHING = "–"


class Cell(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A cell whose text differs from its value.

    Attributes:
      text: what is shown.
      value: what the column is sorted by; None for the text.
      tone: how the text is coloured.
      link: relative address that the text links to; '' for none.
    """

    text: str
    value: float | int | None = None
    tone: Literal["", "good", "bad", "note"] = ""
    link: str = ""


# Numbers are shown as `shown` writes them; None is shown as a dash.
Value = Cell | str | int | float | None


class Table(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A table.

    Attributes:
      columns: names of the columns.
      rows: one value per column.
      folded: shown collapsed.
      code: column of shell commands, which the Markdown page leaves out; '' for none.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    folded: bool = False
    code: str = ""

    def numeric(self) -> list[bool]:
        """Return, for each column, whether all its values that are not empty are numbers."""
        found = []
        for column in zip(*self.rows, strict=True) if self.rows else [()] * len(self.columns):
            values = [sort_value(value) for value in column if value is not None]
            found.append(bool(values) and not any(isinstance(value, str) for value in values))
        return found


class Figure(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A figure.

    Attributes:
      name: of its files (PNG, SVG, CSV), without their endings.
      caption: what it shows.
      data: the figure whose CSV file has its data; '' if it has one of its own.
    """

    name: str
    caption: str
    data: str = ""


class Section(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A section of a page.

    Attributes:
      name: identifier, such as `scores`.
      title: its heading.
      text: Markdown; names from records in it are escaped with `render.escape`.
      figure: its figure, if it has one.
      table: its table, if it has one.
      folded: whether figure and table are shown only on request.
    """

    name: str
    title: str
    text: str = ""
    figure: Figure | None = None
    table: Table | None = None
    folded: bool = False


class Archive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The published records of a study: one file, its size in bytes, and its SHA-256."""

    name: str
    size: int
    sha256: str


class Page(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A page about a study.

    Attributes:
      name: of the study's folder.
      title: of the study.
      question: the study's question; '' if it has none.
      finding: the answer, in sentences that are computed from the tables.
      caveats: what limits the answer: completeness, number of seeds, problems, hardware.
      sections: the sections, in order.
      main_figure: the figure that shows the answer.
      paper: whose question it is; '' if it is the toolkit's own.
      remark: what the findings leave out, in the authors' words.
      commands: shell commands that reproduce the runs and the page.
      revisions: source revisions of the runs.
      versions: versions of the packages, one line per set of them.
      hardware: processors, one line per kind.
      dates: start of the first run and end of the last, UTC.
      archive: its records, if they are published.
    """

    name: str
    title: str
    question: str
    finding: tuple[str, ...]
    caveats: tuple[str, ...]
    sections: tuple[Section, ...]
    main_figure: Figure | None = None
    paper: str = ""
    remark: str = ""
    commands: tuple[str, ...] = ()
    revisions: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()
    dates: tuple[str, str] | None = None
    archive: Archive | None = None

    def table(self, name: str) -> Table | None:
        """Return the table of a section, if the page has it."""
        return next((one.table for one in self.sections if one.name == name), None)

    def figures(self) -> tuple[Figure, ...]:
        """Return all figures, in the order of the page."""
        found = (self.main_figure, *(one.figure for one in self.sections))
        return tuple(one for one in found if one is not None)


def number(value: float | None, decimals: int | None = None) -> str:
    """Format a number: 7,312, 475.3, 12.34, 0.95; a dash for none.

    Args:
      value: the number.
      decimals: number of decimals; by default fewer for larger numbers.
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    if decimals is None:
        decimals = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    return f"{value:,.{decimals}f}"


def shown(value: Value) -> str:
    """Return the text of a table's value."""
    if isinstance(value, Cell):
        return value.text
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else number(value)


def sort_value(value: Value) -> str | float | int:
    """Return the sort key of a value; '' for none, which comes last."""
    if isinstance(value, Cell):
        return value.text if value.value is None else value.value
    return "" if value is None else value


def write_json(page: Page, file: Path) -> None:
    """Write a page with sorted keys and a line for each row of a table, so that diffs can be read."""
    replace_file(file, _lines(msgspec.to_builtins(page), "") + "\n")


def read_json(file: Path) -> Page:
    """Read a page that `write_json` wrote.

    Raises:
      ValueError: if it is not a page, in one line that names the file.
    """
    try:
        return decode_json(read_file(file, LARGEST_INFO), Page)
    except OSError as error:
        raise ValueError(f"{file}: not readable ({error.strerror})") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{file}: not a result of a study: {error}") from None


def earlier_figures(file: Path) -> tuple[Figure, ...]:
    """Return the figures of a page that was written before, whose files lie in its folder.

    There are none if the page cannot be read. Names that lead elsewhere are left out.
    """
    try:
        figures = read_json(file).figures()
    except ValueError:
        return ()
    return tuple(one for one in figures if all("/" not in name for name in (one.name, one.data)))


def _lines(value: Any, indent: str) -> str:
    deeper = indent + " "
    if isinstance(value, Mapping):
        parts = [f'"{key}": {_lines(one, deeper)}' for key, one in sorted(value.items())]
        return _block("{", parts, "}", indent)
    if isinstance(value, list | tuple) and value:
        if isinstance(value[0], Mapping):
            return _block("[", [_lines(one, deeper) for one in value], "]", indent)
        if isinstance(value[0], list | tuple):
            return _block("[", [_on_one_line(one) for one in value], "]", indent)
    return _on_one_line(value)


def _block(opening: str, parts: Sequence[str], closing: str, indent: str) -> str:
    joined = ",\n".join(f"{indent} {part}" for part in parts)
    return f"{opening}\n{joined}\n{indent}{closing}"


def _on_one_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False)
