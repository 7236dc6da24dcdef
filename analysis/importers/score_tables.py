"""Reads tables of scores in CSV: means per game and run times, as the Cleanba repository has them; or runs.

Two forms of CSV are read. In a wide table, a row is an environment and a column a system, with cells
`mean ± std`. In a long table, a row is the score of one run; the header names the columns `system` (or
`algorithm`), `env_id` (or `environment`, `game`, `task`), `score` and, optionally, `setting`, `seed` and
`normalized`.
"""

import codecs
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
LARGEST_SCORE = 1e15
LONG = {  # column of a long table -> its spellings
    "system": ("system", "algorithm"),
    "setting": ("setting",),
    "env_id": ("env_id", "environment", "game", "task"),
    "seed": ("seed",),
    "score": ("score",),
    "normalized": ("normalized",),
}
# Spellings of `normalized`; pandas writes 1.0 where the column has gaps.
TRUTH = {word: False for word in ("", "0", "0.0", "false", "no")}
TRUTH |= {word: True for word in ("1", "1.0", "true", "yes")}
OTHERS = ("logs.csv", "fields.csv", "run_df.csv")  # of monobeast and of openrlbenchmark


def find(path: Path) -> list[Path]:
    """Return the CSV files that are such tables, at or below a path, sorted."""
    files = [path] if path.is_file() else sorted(path.glob("**/*.csv"))
    tables = [file for file in files if file.suffix == ".csv" and file.name not in OTHERS]
    return [file for file in tables if _looks_right(file)]


def _looks_right(file: Path) -> bool:
    """Whether a CSV starts with an empty cell, holds a ±, or names the columns of a long table."""
    try:
        with open_regular(file, LARGEST_TABLE) as opened:
            start = opened.read(4000).removeprefix(codecs.BOM_UTF8)
    except OSError:
        return False
    if start.startswith((b",", b'"",')) or "±".encode() in start:
        return True
    header = start.split(b"\n", 1)[0].decode("utf-8", "replace").split(",")
    return _long_columns(header) is not None


def read(paths: Sequence[Path]) -> Tables:
    """Read wide and long tables.

    A column of a wide table is named `<system>, <hardware setting>`, such as
    `Cleanba IMPALA, 1 A100, 10 CPU`. Cells are `mean ± std` over runs; a file whose cells are plain
    numbers and whose name ends in `runtimes` holds minutes per run. A score that an earlier file has is
    left out, and `quality` counts them.

    Raises:
      InputError: if there is no table, or one is damaged; the message names file and line.
    """
    files = [file for path in paths for file in ([path] if path.is_file() else find(path))]
    if not files:
        raise InputError(f"{', '.join(map(str, paths))}: no score table (CSV) here")
    scores: list[Piece] = []
    runs: list[Piece] = []
    problems: list[tuple[str, str]] = []
    first_file: dict[RunKey, Path] = {}
    for file in dict.fromkeys(files):
        rows = list(read_rows(file))
        read_file = _read_wide if _long_columns(rows[0][1]) is None else _read_long
        pieces, times, found = read_file(file, rows)
        problems += found
        runs += times
        again: dict[Path, int] = {}
        for key, data in pieces:
            place = key._replace(run="")
            earlier = first_file.setdefault(place, file)
            if earlier != file:
                again[earlier] = again.get(earlier, 0) + 1
            else:
                scores.append((key, data))
        problems += [
            (str(file), f"{number} scores are in {earlier} too, and left out here")
            for earlier, number in again.items()
        ]
    return tables(scores=scores, runs=runs, problems=problems)


Read = tuple[list[Piece], list[Piece], list[tuple[str, str]]]  # scores, run times, problems


def _read_wide(file: Path, rows: Sequence[tuple[int, list[str]]]) -> Read:
    first, header = rows[0]
    names = [name.strip() for name in header[1:]]
    if not names:
        raise InputError(f"{file}, line {first}: no column of scores")
    if any(SPREAD.search(name) or _is_number(name) for name in names):
        raise InputError(f"{file}, line {first}: no header, which names the systems")
    if not all(names):
        raise InputError(f"{file}, line {first}: a column has no name")
    if len(set(names)) < len(names):
        raise InputError(f"{file}, line {first}: two columns have the same name")
    minutes = file.stem.endswith("runtimes")
    scores: list[Piece] = []
    runs: list[Piece] = []
    seen: set[str] = set()
    missing: dict[str, list[str]] = {}
    for line, cells in rows[1:]:
        env_id = cells[0].strip()
        if len(cells) != len(header):
            raise InputError(f"{file}, line {line}: {len(cells)} cells, not {len(header)}")
        if not env_id:
            raise InputError(f"{file}, line {line}: no environment")
        if env_id in seen:
            raise InputError(f"{file}, line {line}: {env_id} appears twice")
        seen.add(env_id)
        for name, cell in zip(names, cells[1:], strict=True):
            key = RunKey(str(file), *_system(name), env_id, SEED_OF_A_MEAN)
            mean, *rest = SPREAD.split(cell.strip(), maxsplit=1)
            value = number(mean, file, line, name, LARGEST_SCORE)
            spread = number(rest[0], file, line, name, LARGEST_SCORE) if rest else float("nan")
            if spread < 0:
                raise InputError(f"{file}, line {line}: {name}: a negative spread")
            if minutes and (rest or value < 0):
                what = "a time with a spread" if rest else "a negative time"
                raise InputError(f"{file}, line {line}: {name}: {what}")
            if value != value:
                missing.setdefault(name, []).append(env_id)
            elif minutes:
                data = {"status": ["published"], "completed": [True]}
                runs.append((key, data | {"seconds": [value * MINUTE]}))
            else:
                scores.append((key, {"score": [value], "std": [spread], "normalized": [False]}))
    if not seen:
        raise InputError(f"{file}: no environment in it")
    return scores, runs, _without_score(file, missing)


def _without_score(file: Path, missing: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [
        (str(file), f"no score of {name} on {', '.join(envs)}") for name, envs in missing.items()
    ]


def _read_long(file: Path, rows: Sequence[tuple[int, list[str]]]) -> Read:
    columns = _long_columns(rows[0][1])
    scores: list[Piece] = []
    missing: dict[str, list[str]] = {}
    counted: dict[tuple[str, str, str], int] = {}
    for line, cells in rows[1:]:
        if len(cells) != len(rows[0][1]):
            raise InputError(f"{file}, line {line}: {len(cells)} cells, not {len(rows[0][1])}")
        row = {name: cells[index].strip() for name, index in columns.items()}
        for name in ("system", "env_id"):
            if not row[name]:
                raise InputError(f"{file}, line {line}: no {name}")
        value = number(row["score"], file, line, "score", LARGEST_SCORE)
        if value != value:
            missing.setdefault(row["system"], []).append(row["env_id"])
            continue
        who = (row["system"], row.get("setting") or UNKNOWN, row["env_id"])
        counted[who] = counted.get(who, 0) + 1
        seed = number(row.get("seed", ""), file, line, "seed", LARGEST_SCORE)
        seed = counted[who] if seed != seed else int(seed)
        if seed < 0:
            raise InputError(f"{file}, line {line}: a negative seed")
        word = row.get("normalized", "").lower()
        if word not in TRUTH:
            raise InputError(
                f"{file}, line {line}: normalized is {word[:40]!r}, neither true nor false"
            )
        normalized = TRUTH[word]
        key = RunKey(f"{file}#{line}", *who, seed)
        scores.append((key, {"score": [value], "std": [float("nan")], "normalized": [normalized]}))
    if not scores:
        raise InputError(f"{file}: no score in it")
    return scores, [], _without_score(file, missing)


def _long_columns(header: Sequence[str]) -> dict[str, int] | None:
    """Return the positions of the columns of a long table; None if it is not one."""
    names = [name.strip().strip('"').lower() for name in header]
    found = {
        column: names.index(name)
        for column, spellings in LONG.items()
        for name in spellings
        if name in names
    }
    return found if {"system", "env_id", "score"} <= found.keys() else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _system(column: str) -> tuple[str, str]:
    """Return system and hardware setting of a column.

    The setting starts at the first number that stands alone, or after the first comma.
    """
    if match := COLUMN.fullmatch(column):
        return match[1], match[2]
    system, comma, setting = column.partition(", ")
    return (system, setting) if comma and system and setting else (column, UNKNOWN)
