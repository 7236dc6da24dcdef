"""What a benchmark consists of: cases to measure, and the columns of its table."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

Values = dict[str, Any]  # measured numbers by name


class Case(NamedTuple):
    """One row of a benchmark's table."""

    name: str
    measure: Callable[[], Values]


class Column(NamedTuple):
    """One column of a benchmark's table."""

    value: str  # name of a measured value
    title: str
    format: str = ",.0f"  # format specification
    ratio: str = ""  # of a ratio: what is divided by what, its title on the page of ratios

    @property
    def width(self) -> int:
        """Characters of the column."""
        return max(9, len(self.title) + 2)


class Benchmark(Protocol):
    """A benchmark: a dataclass whose fields are its sizes, with their ranges."""

    columns: tuple[Column, ...]

    def title(self) -> str:
        """Return the line above the table: what is measured, at which sizes."""

    def cases(self) -> list[Case]:
        """Return the cases, none measured yet."""


class Row(Struct, frozen=True, kw_only=True):
    """What was measured of one case."""

    case: str
    values: Values


class Table(Struct, frozen=True, kw_only=True):
    """What was measured of the cases of one benchmark."""

    title: str
    columns: tuple[Column, ...]
    rows: list[Row]

    def ratios(self) -> tuple[Column, ...]:
        """Return the columns of ratios, titled by what is divided by what."""
        return tuple(c._replace(title=c.ratio) for c in self.columns if c.ratio)


def header(columns: tuple[Column, ...], name_width: int) -> str:
    """Return the first line of a table."""
    return f"{'case':<{name_width}}" + "".join(f"{c.title:>{c.width}}" for c in columns)


def line(columns: tuple[Column, ...], name_width: int, row: Row) -> str:
    """Return a row as a line of a table."""
    cells = [f"{format(row.values[c.value], c.format):>{c.width}}" for c in columns]
    return f"{row.case:<{name_width}}" + "".join(cells)
