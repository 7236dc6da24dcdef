"""Reads run records (docs/run-record.md) into tables."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.forks import call_all
from analysis.tables import InputError, RunKey, Tables, tables
from cleanba.record import LINE_FILES, RecordError, Run, find_runs, read_run

# The first updates compile; the steady speed is measured from the end of the third.
SKIPPED_UPDATES = 3
# Beyond this, a float64 no longer holds every integer: a step of this size is damage.
LARGEST = 2**53

TEXT_FIELDS = {"fingerprint", "versions"}
REQUIRED = {
    "episodes": ("step", "wall_time", "return"),
    "updates": ("version", "step", "wall_time"),
    "rollouts": ("actor", "rollout", "steps", "wall_time", "version_first", "version_last"),
}


def read_records(paths: Sequence[Path | str], cores: int = 1) -> Tables:
    """Read all run records at or below the given paths.

    Args:
      paths: folders of runs, or folders that hold such folders at any depth.
      cores: how many to read them on, in forks of this process where there are several.

    Returns:
      Tables; runs that are not `completed`, torn last lines, missing files, and NaN returns are
      named in `quality`, and kept.

    Raises:
      InputError: if a path does not exist or holds no run, or a record is damaged.
    """
    for path in map(Path, paths):
        if not path.exists():
            raise InputError(f"{path}: no such file or folder")
    folders = find_runs(*(p.parent if Path(p).name == "run.json" else p for p in map(Path, paths)))
    if not folders:
        raise InputError(f"{', '.join(map(str, paths))}: no run record here (no run.json)")
    read = call_all([partial(_read, folder) for folder in folders], cores)
    return tables(
        [(one.key, one.columns["episodes"]) for one in read],
        [(one.key, one.columns["rollouts"]) for one in read],
        [(one.key, one.columns["updates"]) for one in read],
        [(one.key, one.summary) for one in read],
        problems=[(one.key.run, problem) for one in read for problem in one.problems],
    )


class _Record(NamedTuple):
    """One run as read: its columns by kind of line, its row in the table of runs, its problems."""

    key: RunKey
    columns: dict[str, dict[str, np.ndarray]]
    summary: dict[str, list]
    problems: list[str]


def _read(folder: Path) -> _Record:
    try:
        run = read_run(folder)
        key = _key(run)
        columns = {kind: read_columns(run, kind) for kind in LINE_FILES}
    except RecordError as error:
        raise InputError(str(error)) from None
    columns["rollouts"] |= _lag(columns["rollouts"])
    summary = _summary(run, columns)
    return _Record(key, columns, summary, run.problems)


def _key(run: Run) -> RunKey:
    info = run.info
    for name in ("system", "setting", "env_id"):
        if not isinstance(info[name], str):
            raise InputError(f"{run.path / 'run.json'}: {name} is not text")
    if not isinstance(info["seed"], int) or abs(info["seed"]) >= LARGEST:
        raise InputError(f"{run.path / 'run.json'}: seed is not an integer")
    return RunKey(str(run.path), info["system"], info["setting"], info["env_id"], info["seed"])


def read_columns(run: Run, kind: str) -> dict[str, np.ndarray]:
    """Return the rows of `<kind>.jsonl` of one run by column.

    Numbers are float64 with NaN for null; `fingerprint` and `versions` are objects.

    Raises:
      InputError: if a field is missing, is not a number, or is too large to be true; the message
        names file and line.
      RecordError: if a line is not a JSON object.
    """
    rows = run.lines(kind)
    path = run.path / f"{kind}.jsonl"
    names = dict.fromkeys(name for row in rows[:1] + rows[-1:] for name in row)
    for name in REQUIRED[kind]:
        names.setdefault(name)
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if name in TEXT_FIELDS:
            column = np.empty(len(rows), dtype=object)
            column[:] = values
            columns[name] = column
        elif set(map(type, values)) <= {int, float, type(None)}:
            columns[name] = _numbers(values, path, name)
        elif name in REQUIRED[kind] or _has_number(values):
            bad = next(i for i, v in enumerate(values) if not _is_number(v))
            raise InputError(f"{path}, line {bad + 1}: {name} is not a number")
        # else: a field of text that some other system writes, and nothing here reads
        if name in REQUIRED[kind] and np.isnan(columns[name]).any():
            _check_present(rows, path, name)
    if kind == "rollouts":
        _check_versions(columns, path)
    return columns


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, type(None))


def _has_number(values: Sequence[Any]) -> bool:
    return any(type(v) in (int, float) for v in values)


def _numbers(values: list[Any], path: Path, name: str) -> np.ndarray:
    try:
        column = np.array(values, dtype=np.float64)
        limit = np.inf if name == "return" else LARGEST
        too_large = np.flatnonzero(np.isinf(column) | (np.abs(column) > limit))
    except OverflowError:
        too_large = [i for i, v in enumerate(values) if v is not None and abs(v) > LARGEST]
    if len(too_large):
        raise InputError(f"{path}, line {too_large[0] + 1}: {name} is too large to be true")
    return column


def _check_present(rows: list[dict], path: Path, name: str) -> None:
    for number, row in enumerate(rows, start=1):
        if name not in row:
            raise InputError(f"{path}, line {number}: the field {name!r} is missing")


def _check_versions(columns: dict[str, np.ndarray], path: Path) -> None:
    for number, pairs in enumerate(columns.get("versions", ()), start=1):
        good = isinstance(pairs, list) and all(
            isinstance(p, list) and len(p) == 2 and all(type(v) in (int, float) for v in p)
            for p in pairs
        )
        if not (good or pairs is None):
            raise InputError(f"{path}, line {number}: versions is not a list of [version, steps]")


def _lag(rollouts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Policy changes within each rollout, and its policy lag (docs/run-record.md)."""
    first, last = rollouts["version_first"], rollouts["version_last"]
    learner = rollouts.get("learner_version", np.full(len(first), np.nan))
    changes, mean_version = last - first, (first + last) / 2  # where only the ends are known
    for i, pairs in enumerate(rollouts.get("versions", ())):
        steps = sum(p[1] for p in pairs) if pairs else 0
        if steps > 0:
            changes[i] = len(pairs) - 1
            mean_version[i] = sum(p[0] * p[1] for p in pairs) / steps
    return {"changes": changes, "lag": learner - mean_version}


def _summary(run: Run, columns: dict[str, dict[str, np.ndarray]]) -> dict[str, list]:
    """Summarise one run as one row of the table of runs."""
    info, updates = run.info, columns["updates"]
    ends = {
        name: max(
            (np.nanmax(c[name]) for c in columns.values() if _finite(c, name)), default=np.nan
        )
        for name in ("step", "wall_time")
    }
    returns = columns["episodes"]["return"]
    if np.isnan(returns).any():
        run.problems.append(f"{int(np.isnan(returns).sum())} episodes have no return (NaN)")
    if run.completed and not len(returns):
        run.problems.append("no episode was finished")
    return {
        "status": [info["status"]],
        "completed": [run.completed],
        "episodes": [len(returns)],
        "steps": [ends["step"]],
        "seconds": [ends["wall_time"]],
        "sps": [steady_sps(updates["step"], updates["wall_time"])],
        "sps_overall": [ends["step"] / ends["wall_time"] if ends["wall_time"] > 0 else np.nan],
        **{
            name: [info.get(name)]
            for name in (
                "hyperparameters",
                "hardware",
                "versions",
                "revision",
                "command",
                "started",
                "ended",
                "error",
            )
        },
    }


def _finite(columns: dict[str, np.ndarray], name: str) -> bool:
    return name in columns and bool(np.isfinite(columns[name]).any())


def steady_sps(step: np.ndarray, wall_time: np.ndarray, skipped: int = SKIPPED_UPDATES) -> float:
    """Return the speed of a run without its compilation, in steps per second.

    Args:
      step: steps learned from at the end of each update, `[U]`.
      wall_time: seconds since the run started at the end of each update, `[U]`.
      skipped: the clock starts at the end of this update (the first ones compile).

    Returns:
      Steps after that update, divided by the seconds after it; NaN if none are left.
    """
    if len(step) <= skipped:
        return float("nan")
    seconds = wall_time[-1] - wall_time[skipped - 1]
    return float((step[-1] - step[skipped - 1]) / seconds) if seconds > 0 else float("nan")


def is_record(path: Path) -> bool:
    """Whether a path is a run record or holds one."""
    return path.name == "run.json" or any(
        "run.json" in files for _, _, files in os.walk(path, followlinks=True)
    )
