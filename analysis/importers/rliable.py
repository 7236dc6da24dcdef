"""Reads score dictionaries in the form that rliable takes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.importers.text import read_text
from analysis.tables import UNKNOWN, InputError, Piece, RunKey, Tables, tables
from cleanba.record.files import LARGEST_TABLE, read_arrays

SUFFIXES = (".json", ".npz")


def find(path: Path) -> list[Path]:
    """Return the `.npz` and `.json` files at or below a path that may be score dictionaries."""
    if path.is_file():
        return [path] if path.suffix in SUFFIXES else []
    return sorted(file for suffix in SUFFIXES for file in path.glob(f"**/*{suffix}"))


def read(paths: Sequence[Path]) -> Tables:
    """Read dictionaries of algorithm -> scores.

    Scores are a matrix (runs x tasks) of normalised scores, as rliable takes them, or task -> list
    of one score per run; lists of tasks that have a reference (see `references`) are raw
    scores, and are normalised. `.json` and `.npz` are read; pickles are not, because loading one
    can run arbitrary code.

    Raises:
      InputError: if there is no such file, or one is damaged.
    """
    files = [file for path in paths for file in ([path] if path.is_file() else find(path))]
    if not files:
        raise InputError(f"{', '.join(map(str, paths))}: no score dictionary here")
    scores: list[Piece] = []
    problems: list[tuple[str, str]] = []
    for file in dict.fromkeys(files):
        for algorithm, runs in _load(file).items():
            if isinstance(runs, dict):
                named = {str(task): _row(file, algorithm, row) for task, row in runs.items()}
                normalized = False
            else:
                matrix = _matrix(file, algorithm, runs)
                named = {f"task {i}": column for i, column in enumerate(matrix.T)}
                normalized = True
            if missing := sum(int(np.isnan(column).sum()) for column in named.values()):
                problems.append(
                    (str(file), f"{missing} scores of {algorithm} are NaN, and left out")
                )
            for task, column in named.items():
                for seed, value in enumerate(column):
                    if np.isnan(value):
                        continue
                    key = RunKey(f"{file}#{algorithm}#{seed}", algorithm, UNKNOWN, task, seed)
                    data = {"score": [value], "std": [np.nan], "normalized": [normalized]}
                    scores.append((key, data))
    return tables(scores=scores, problems=problems)


def _load(file: Path) -> dict[str, Any]:
    if file.suffix == ".npz":
        try:
            return read_arrays(file, LARGEST_TABLE)
        except OSError as error:
            raise InputError(f"{file}: not readable ({error.strerror})") from None
        except ValueError as error:
            raise InputError(f"{file}: not a .npz file ({error})") from None
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


def _matrix(file: Path, algorithm: str, runs: Any) -> np.ndarray:
    try:
        matrix = np.array(runs, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        matrix = np.empty(0)
    if matrix.ndim != 2 or not matrix.size:
        raise InputError(f"{file}: {algorithm}: scores are not a matrix (runs x tasks)")
    if np.isinf(matrix).any():
        raise InputError(f"{file}: {algorithm}: a score is infinite")
    return matrix


def _row(file: Path, algorithm: str, row: Any) -> np.ndarray:
    return _matrix(file, algorithm, [row])[0]
