"""Reads text files of other tools; errors name file and line."""

import csv
from collections.abc import Iterator
from pathlib import Path

from analysis.tables import InputError
from cleanba.record.files import LARGEST_TABLE, read_file


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
      InputError: if it cannot be read, is empty, or is not UTF-8 (then the line is named).
    """
    try:
        data = read_file(path, LARGEST_TABLE)
    except OSError as error:
        raise InputError(f"{path}: not readable ({error.strerror})") from None
    if not data.strip():
        raise InputError(f"{path}: empty")
    try:
        text = data.decode("utf-8-sig")  # spreadsheets write a byte order mark
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {line}: not text (UTF-8)") from None
    if "\x00" in text:
        line = text.count("\n", 0, text.index("\x00")) + 1
        raise InputError(f"{path}, line {line}: not text (a zero byte)")
    return text


def read_rows(path: Path, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of every line of a CSV or TSV file that is not blank.

    Raises:
      InputError: as `read_text`, or if a line cannot be split into cells.
    """
    reader = csv.reader(read_text(path).splitlines(), delimiter=delimiter, strict=True)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(f"{path}, line {reader.line_num}: {error}") from None
        if any(cell.strip() for cell in row):
            yield reader.line_num, row


def number(cell: str, path: Path, line: int, name: str, limit: float = float("inf")) -> float:
    """Return a cell as a number; NaN if it is empty or `nan`.

    Raises:
      InputError: if it is something else, or infinite or beyond `limit`.
    """
    try:
        value = float(cell) if cell.strip() else float("nan")
    except ValueError:
        shown = cell if len(cell) < 40 else cell[:37] + "..."
        raise InputError(f"{path}, line {line}: {name} is not a number: {shown!r}") from None
    if abs(value) > limit or value in (float("inf"), float("-inf")):
        raise InputError(f"{path}, line {line}: {name} is implausibly large")
    return value
