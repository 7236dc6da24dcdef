"""Reads scores of runs in the forms that rliable takes: dictionaries of arrays, and single arrays."""

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.arrays import score_tables
from analysis.importers.text import read_text
from analysis.tables import UNKNOWN, InputError, Piece, RunKey, Tables, concat, tables
from cleanba.record.files import LARGEST_TABLE, read_array, read_arrays

SUFFIXES = (".json", ".npz", ".npy")


def find(path: Path, outside: Collection[Path] = ()) -> tuple[list[Path], list[Path]]:
    """Return the files below a folder that hold scores, and those that may be meant to but are not read.

    Args:
      path: the folder.
      outside: folders in which nothing is looked for.
    """
    files = [file for file in _files(path) if not set(file.parents) & set(outside)]
    found = [file for file in files if _looks_right(file)]
    return found, [file for file in files if file not in found and _looks_like_scores(file)]


def read(paths: Sequence[Path]) -> Tables:
    """Read the scores of algorithms.

    A `.json` or `.npz` file is a dictionary of algorithm -> matrix (runs x tasks) of normalized scores, in
    which an entry `tasks` may name the tasks; in `.json`, an algorithm may have task -> list of one raw
    score per run, which are normalized where the task has a reference (see `references`). A `.npy`
    file is one matrix, of the algorithm that its name tells. Pickles are not read, because loading one
    can run arbitrary code.

    Raises:
      InputError: if there is no such file, or one is damaged.
    """
    files = [file for path in paths for file in ([path] if path.is_file() else _files(path))]
    if not files:
        raise InputError(f"{', '.join(map(str, paths))}: no score dictionary here")
    return concat([_read(file) for file in dict.fromkeys(files)])


def _files(path: Path) -> list[Path]:
    return sorted(file for suffix in SUFFIXES for file in path.glob(f"**/*{suffix}"))


def _looks_right(file: Path) -> bool:
    """Whether a file holds matrices of numbers, or lists of numbers by algorithm and task."""
    try:
        return len(_read(file).scores) > 0
    except InputError:
        return False


def _looks_like_scores(file: Path) -> bool:
    """Whether a file that cannot be read is of arrays, damaged, or of lists in the place of scores."""
    if file.suffix != ".json":
        return True
    try:
        values = _load(file).values()
    except InputError as error:
        return "not JSON" in str(error)
    rows = [value.values() if isinstance(value, dict) else value for value in values]
    return all(
        isinstance(row, Iterable)
        and not isinstance(row, str)
        and all(isinstance(x, list) for x in row)
        for row in rows
    )


def _read(file: Path) -> Tables:
    arrays: dict[str, Any] = {}
    scores: list[Piece] = []
    problems: list[tuple[str, str]] = []
    for algorithm, runs in _load(file).items():
        if not isinstance(runs, dict):
            arrays[algorithm] = runs
            continue
        missing = 0
        for task, row in runs.items():
            for seed, value in enumerate(_row(file, algorithm, row)):
                missing += int(np.isnan(value))
                if not np.isnan(value):
                    key = RunKey(f"{file}#{algorithm}#{seed}", algorithm, UNKNOWN, str(task), seed)
                    scores.append((key, {"score": [value], "std": [np.nan], "normalized": [False]}))
        if missing:
            problems.append((str(file), f"{missing} scores of {algorithm} are NaN, and left out"))
    named = tables(scores=scores, problems=problems)
    return concat([score_tables(arrays, str(file)), named]) if arrays else named


def _load(file: Path) -> dict[str, Any]:
    if file.suffix != ".json":
        try:
            if file.suffix == ".npy":
                return {file.stem: read_array(file)}
            return read_arrays(file, LARGEST_TABLE)
        except OSError as error:
            raise InputError(f"{file}: not readable ({error.strerror})") from None
        except ValueError as error:
            raise InputError(f"{file}: not a {file.suffix} file ({error})") from None
    text = read_text(file)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise InputError(
            f"{file}, line {line}: not JSON ({getattr(error, 'msg', error)})"
        ) from None
    if not isinstance(data, dict) or not data:
        raise InputError(f"{file}: not a dictionary of algorithm -> scores")
    return data


def _row(file: Path, algorithm: str, row: Any) -> np.ndarray:
    """Return the scores of a task, one per run."""
    try:
        scores = np.array(row, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        scores = np.empty(0)
    if scores.ndim != 1 or not scores.size:
        raise InputError(f"{file}: {algorithm}: scores of a task are not a list of numbers")
    if np.isinf(scores).any():
        raise InputError(f"{file}: {algorithm}: a score is infinite")
    return scores
