"""Reads tables of 'mean ± std' per game, and of run times, as the Cleanba repository has them."""

import re
from collections.abc import Sequence
from pathlib import Path

from analysis.importers.text import number, read_rows
from analysis.tables import UNKNOWN, InputError, Piece, RunKey, Tables, tables
from cleanba.record.files import LARGEST_TABLE, open_regular

SEED_OF_A_MEAN = -1  # a published mean over runs has no seed
SPREAD = re.compile(r"\s*(?:±|\+/-|\+-)\s*")
COLUMN = re.compile(r"(.+?),?\s+(\d+\s+\w+.*)")  # Moolib IMPALA, 1 A100, 10 CPU
MINUTE = 60.0
OTHERS = ("logs.csv", "fields.csv", "run_df.csv")  # of monobeast and of openrlbenchmark


def find(path: Path) -> list[Path]:
    """Return the CSV files that are such tables, at or below a path, sorted."""
    files = [path] if path.is_file() else sorted(path.glob("**/*.csv"))
    tables = [file for file in files if file.suffix == ".csv" and file.name not in OTHERS]
    return [file for file in tables if _looks_right(file)]


def _looks_right(file: Path) -> bool:
    """Whether the first line of a CSV starts with an empty cell, or its cells hold a ±."""
    try:
        with open_regular(file, LARGEST_TABLE) as opened:
            start = opened.read(4000)
    except OSError:
        return False
    return start.startswith((b",", b'"",')) or "±".encode() in start


def read(paths: Sequence[Path]) -> Tables:
    """Read tables with one row per environment and one column per system.

    A column is named `<system>, <hardware setting>`, such as `Cleanba IMPALA, 1 A100, 10 CPU`.
    Cells are `mean ± std` over runs; a file whose cells are plain numbers and whose name ends in
    `runtimes` holds minutes per run.

    Raises:
      InputError: if there is no table, or one is damaged; the message names file and line.
    """
    files = [file for path in paths for file in ([path] if path.is_file() else find(path))]
    if not files:
        raise InputError(f"{', '.join(map(str, paths))}: no score table (CSV) here")
    scores: list[Piece] = []
    runs: list[Piece] = []
    problems: list[tuple[str, str]] = []
    for file in dict.fromkeys(files):
        rows = list(read_rows(file))
        first, header = rows[0]
        if len(header) < 2:
            raise InputError(f"{file}, line {first}: no column of scores")
        minutes = file.stem.endswith("runtimes")
        seen: set[str] = set()
        for line, cells in rows[1:]:
            env_id = cells[0].strip()
            if len(cells) != len(header):
                raise InputError(f"{file}, line {line}: {len(cells)} cells, not {len(header)}")
            if not env_id:
                raise InputError(f"{file}, line {line}: no environment")
            if env_id in seen:
                problems.append((str(file), f"{env_id} appears twice"))
            seen.add(env_id)
            for name, cell in zip(header[1:], cells[1:], strict=True):
                key = RunKey(str(file), *_system(name), env_id, SEED_OF_A_MEAN)
                mean, *rest = SPREAD.split(cell.strip(), maxsplit=1)
                value = number(mean, file, line, name)
                if value != value:
                    problems.append((str(file), f"no score of {name} on {env_id}"))
                elif minutes:
                    data = {"status": ["published"], "completed": [True]}
                    runs.append((key, data | {"seconds": [value * MINUTE]}))
                else:
                    std = number(rest[0], file, line, name) if rest else float("nan")
                    scores.append((key, {"score": [value], "std": [std], "normalized": [False]}))
        if not seen:
            raise InputError(f"{file}: no environment in it")
    return tables(scores=scores, runs=runs, problems=problems)


def _system(column: str) -> tuple[str, str]:
    """Return system and hardware setting of a column; the setting starts at its first number."""
    match = COLUMN.fullmatch(column.strip())
    return (match[1], match[2]) if match else (column.strip(), UNKNOWN)
