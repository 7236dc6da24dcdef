"""Prints results as tables, as JSON or as CSV, and reports bad input."""

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

LEAST_WRAPPED = 12  # characters of a column that is wrapped
FOR_READING = ("table", "markdown", "latex")  # rounded, in few columns
FORMATS = ("table", "json", "csv", "markdown", "latex")


def bad_input(error: Exception) -> int:
    """Print one line about unusable input or output; return the exit code, 2."""
    message = str(error)
    if isinstance(error, OSError):
        message = f"{error.filename}: {error.strerror}" if error.filename else message
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def span(values: Collection[float], spec: str = "") -> str:
    """Format the smallest and the largest value with `spec`: `3 to 6`, or `3` if they look equal."""
    low, high = format(min(values), spec), format(max(values), spec)
    return low if low == high else f"{low} to {high}"


def plain(value: Any) -> Any:
    """Return a value as plain JSON types: NaN and infinities become null, arrays become lists."""
    if isinstance(value, pd.DataFrame):
        return [plain(row) for row in value.astype(object).to_dict("records")]
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(v) for v in value]
    if hasattr(value, "item"):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def flat(value: pd.DataFrame | Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a result as a flat table: nested mappings become columns `outer.inner`."""
    if isinstance(value, pd.DataFrame):
        return value
    return pd.json_normalize([plain(row) for row in value], sep=".")


def render(results: Mapping[str, Any], form: str) -> str:
    """Return results as text.

    Args:
      results: name -> table (frame, or list of mappings), the main one first, and `quality`.
      form: `table` (all of them, for reading), `json` (all of them), or `csv`, `markdown` or `latex` (the
        main one).
    """
    if form == "json":
        return json.dumps(plain(results), indent=1, allow_nan=False)
    if form == "csv":
        return flat(next(iter(results.values()))).to_csv(index=False).rstrip("\n")
    if form in ("markdown", "latex"):
        main = next(value for value in results.values() if not isinstance(value, str))
        return (_markdown if form == "markdown" else _latex)(flat(main))
    return "\n\n".join(_section(name, value) for name, value in results.items())


def _section(name: str, value: Any) -> str:
    title = name.replace("_", " ")
    if not isinstance(value, (pd.DataFrame, list)):
        return textwrap.fill(f"{title}: {value}", _terminal_width())
    frame = flat(value)
    if frame.empty:
        return f"{title}: none"
    return f"{title}\n{_columns(frame.astype(object).map(_cell))}"


def _columns(cells: pd.DataFrame) -> str:
    """Return a table of text, of which the widest columns are wrapped if the terminal is too narrow."""
    widths = {name: max(map(len, [name, *cells[name]])) for name in cells}
    while sum(widths.values()) + len(widths) - 1 > _terminal_width():
        widest = max(widths, key=widths.get)
        if widths[widest] <= max(LEAST_WRAPPED, len(widest)):
            break
        widths[widest] -= 1
    right = {name for name in cells if cells[name].map(_is_number).all()}
    lines = []
    for row in [{name: name for name in cells}, *cells.to_dict("records")]:
        parts = {
            name: [text] if len(text) <= widths[name] else textwrap.wrap(text, widths[name])
            for name, text in row.items()
        }
        for number in range(max(map(len, parts.values()))):
            line = [
                f"{(part[number:] or [''])[0]:{'>' if name in right else '<'}{widths[name]}}"
                for name, part in parts.items()
            ]
            lines.append(" ".join(line).rstrip())
    return "\n".join(lines)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell == "-"
    return True


def _terminal_width() -> int:
    """Return the width of the terminal, or COLUMNS; without either there is no limit."""
    return shutil.get_terminal_size((sys.maxsize, 0)).columns


def _markdown(frame: pd.DataFrame) -> str:
    rows = [list(frame.columns), ["---"] * len(frame.columns)]
    rows += [
        [_cell(value).replace("|", "\\|") for value in row]
        for row in frame.astype(object).to_numpy()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _latex(frame: pd.DataFrame) -> str:
    rows = [[_escaped(_cell(value)) for value in row] for row in frame.astype(object).to_numpy()]
    lines = [
        " & ".join(row) + r" \\" for row in [[_escaped(name) for name in frame.columns], *rows]
    ]
    body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
    return "\n".join([rf"\begin{{tabular}}{{{'l' * len(frame.columns)}}}", *body, r"\end{tabular}"])


def _escaped(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, (float, np.floating)):
        if math.isinf(value):
            return str(value)
        return f"{value:.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:.4g}"
    return str(value)
