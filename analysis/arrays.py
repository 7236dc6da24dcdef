"""Arrays of scores, as rliable takes them: algorithm -> runs x tasks, or runs x tasks x frames."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from analysis.learning_curves import Curves
from analysis.tables import KEYS, UNKNOWN, InputError, Piece, RunKey, Tables, tables

TASKS = "tasks"  # entry of a dictionary that names the tasks
SHAPES = {2: "runs x tasks", 3: "runs x tasks x frames"}

Arrays = Mapping[str, ArrayLike]


def score_tables(arrays: Arrays, source: str = "") -> Tables:
    """Return the normalized scores of matrices as tables.

    Args:
      arrays: algorithm -> `[runs, tasks]`, normalized; and, optionally, `tasks` -> their names.
      source: where they are from, such as a file: starts the names of runs and messages.

    Raises:
      InputError: if an array has another shape, holds no number or an infinite one, or has other tasks.
    """
    tasks, checked = _checked(arrays, 2, source)
    scores: list[Piece] = []
    problems: list[tuple[str, str]] = []
    for algorithm, matrix in checked.items():
        if missing := int(np.isnan(matrix).sum()):
            what = f"{missing} scores of {algorithm} are NaN, and left out"
            problems.append((source or algorithm, what))
        for task, column in zip(tasks, matrix.T, strict=True):
            for seed, value in enumerate(column):
                if not np.isnan(value):
                    run = f"{source}#{algorithm}#{seed}"
                    key = RunKey(run, algorithm, UNKNOWN, task, seed)
                    scores.append((key, {"score": [value], "std": [np.nan], "normalized": [True]}))
    return tables(scores=scores, problems=problems)


def score_curves(arrays: Arrays, frames: ArrayLike | None = None) -> Curves:
    """Return the normalized scores of algorithms along training as curves.

    Args:
      arrays: algorithm -> `[runs, tasks, frames]`; and, optionally, `tasks` -> their names.
      frames: steps of the last axis, ascending; 1, 2, ... by default.

    Raises:
      InputError: as for `score_tables`.
    """
    tasks, checked = _checked(arrays, 3)
    lengths = {array.shape[2] for array in checked.values()}
    if len(lengths) > 1:
        raise InputError(f"not equally many frames: {', '.join(map(str, sorted(lengths)))}")
    (points,) = lengths
    grid = np.arange(1.0, points + 1) if frames is None else np.asarray(frames, np.float64)
    if grid.shape != (points,) or not np.all(np.diff(grid) > 0):
        raise InputError(f"frames: {points} ascending steps are expected")
    keys, values = [], []
    for algorithm, array in checked.items():
        for task, column in zip(tasks, array.swapaxes(0, 1), strict=True):
            for seed, curve in enumerate(column):
                keys.append(RunKey(f"#{algorithm}#{seed}", algorithm, UNKNOWN, task, seed))
                values.append(curve)
    matrix = np.stack(values)
    runs = pd.DataFrame(keys, columns=KEYS)
    return Curves("step", grid, matrix, np.full_like(matrix, np.nan), runs)


def _checked(
    arrays: Arrays, dimensions: int, source: str = ""
) -> tuple[Sequence[str], dict[str, np.ndarray]]:
    """Return the names of the tasks and the arrays, with a shape that all of them may have."""
    start = f"{source}: " if source else ""
    checked = {
        str(name): _numbers(f"{start}{name}", array, dimensions)
        for name, array in arrays.items()
        if name != TASKS
    }
    if not checked:
        raise InputError(f"{start}no array of scores")
    counts = {name: array.shape[1] for name, array in checked.items()}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise InputError(f"{start}not equally many tasks: {each}")
    count = next(iter(counts.values()))
    if TASKS not in arrays:
        return [f"task {index}" for index in range(count)], checked
    tasks = [str(task) for task in np.asarray(arrays[TASKS]).ravel()]
    if len(tasks) != count or len(set(tasks)) != count:
        raise InputError(f"{start}{TASKS}: {count} different names are expected")
    return tasks, checked


def _numbers(name: str, array: ArrayLike, dimensions: int) -> np.ndarray:
    try:
        numbers = np.asarray(array, np.float64)
    except (ValueError, TypeError, OverflowError):
        raise InputError(f"{name}: not an array of numbers") from None
    if numbers.ndim != dimensions or not numbers.size:
        hint = " (`array[:, :, -1]` are the last scores)" * (numbers.ndim == 3)
        raise InputError(f"{name}: not {SHAPES[dimensions]}: the shape is {numbers.shape}{hint}")
    if np.isinf(numbers).any():
        raise InputError(f"{name}: a score is infinite")
    if np.isnan(numbers).all():
        raise InputError(f"{name}: all scores are NaN")
    return numbers
