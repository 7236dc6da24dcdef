"""Reads run records (docs/run-record.md) into tables."""

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from analysis.forks import call_all
from analysis.tables import InputError, RunKey, Tables, concat, tables
from cleanba.record import Episode, RecordError, Rollout, Row, Run, Update, find_runs, read_run
from cleanba.record.consistency import contradictions
from cleanba.record.folder import PUBLISHED

# The first updates compile; the steady speed is measured from the end of the third.
SKIPPED_UPDATES = 3
OBJECT_FIELDS = {"fingerprint", "versions"}
NO_COLUMN = {"checkpoint"}  # for audits only


def read_records(paths: Sequence[Path | str], cores: int = 1, *, published: bool = False) -> Tables:
    """Read all run records at or below the given paths.

    Args:
      paths: folders of runs, or folders that hold such folders at any depth.
      cores: number of cores to read them on; with several, in forks of this process.
      published: they are published copies, without logs and the like.

    Returns:
      Tables; runs that are not `completed`, torn last lines, missing files, and NaN returns are
      reported in `quality`, and kept.

    Raises:
      InputError: if a path does not exist or holds no run, if a line of a record is damaged, or if a
        run has ended and a file of rows does not match its checksum in `run.json`.
    """
    for path in map(Path, paths):
        if not path.exists():
            raise InputError(f"{path}: no such file or folder")
    folders = find_runs(*(p.parent if Path(p).name == "run.json" else p for p in map(Path, paths)))
    if not folders:
        raise InputError(f"{', '.join(map(str, paths))}: no run record here (no run.json)")
    read = call_all([partial(_read, folder, published) for folder in folders], cores)
    return tables(
        [(one.key, one.columns["episodes"]) for one in read],
        [(one.key, one.columns["rollouts"]) for one in read],
        [(one.key, one.columns["updates"]) for one in read],
        [(one.key, one.summary) for one in read],
        problems=[(one.key.run, problem) for one in read for problem in one.problems],
    )


def read_readable_records(path: Path, cores: int = 1, *, published: bool = False) -> Tables:
    """Read all run records below a folder; a damaged one is left out, and named in `quality`.

    Args:
      path: the folder.
      cores: see `read_records`.
      published: see `read_records`.

    Raises:
      InputError: if there is no record.
    """
    try:
        return read_records([path], cores, published=published)
    except InputError:
        folders = find_runs(path)
        if not folders:
            raise
    found = call_all([partial(_read_or_damage, folder, published) for folder in folders], cores)
    parts = [one for one in found if isinstance(one, Tables)]
    damage = tables(problems=[one for one in found if not isinstance(one, Tables)])
    return concat([*parts, damage])


def _read_or_damage(folder: Path, published: bool) -> Tables | tuple[str, str]:
    try:
        return read_records([folder], published=published)
    except InputError as error:
        return str(folder), f"damaged and excluded: {str(error).removeprefix(f'{folder}/')}"


class _Record(NamedTuple):
    """One run as read: its columns by kind of line, its row in the table of runs, its problems."""

    key: RunKey
    columns: dict[str, dict[str, np.ndarray]]
    summary: dict[str, list]
    problems: list[str]


def _read(folder: Path, published: bool) -> _Record:
    try:
        run = read_run(folder)
        # Each file is read once; its checksum is compared with that of `run.json` in passing.
        rows = {"episodes": run.episodes(), "rollouts": run.rollouts(), "updates": run.updates()}
        run.check_sizes(PUBLISHED if published else None)
        run.problems += contradictions(run, rows["updates"], rows["rollouts"], rows["episodes"])
    except RecordError as error:
        raise InputError(str(error)) from None
    columns = {
        "episodes": read_columns(Episode, rows["episodes"]),
        "rollouts": read_columns(Rollout, rows["rollouts"]),
        "updates": read_columns(Update, rows["updates"]),
    }
    columns["rollouts"] |= _lag(columns["rollouts"])
    info = run.info
    key = RunKey(str(run.path), info.system, info.setting, info.env_id, info.seed)
    return _Record(key, columns, _summary(run, columns), run.problems)


def read_columns(kind: type[Row], rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Return rows by column, under the names that the file has.

    Numbers are float64 with NaN for null and for a field that a row does not have; `fingerprint` and
    `versions` are objects. A field that no row has gives no column, and neither do those of `NO_COLUMN`.
    """
    columns = {}
    for field in msgspec.structs.fields(kind):
        name = field.encode_name
        if name in NO_COLUMN:
            continue
        values = list(map(attrgetter(field.name), rows))
        if name in OBJECT_FIELDS:
            column = np.empty(len(values), dtype=object)
            column[:] = values
            columns[name] = column
            continue
        absent = values.count(UNSET)
        if (absent and absent == len(values)) or (not values and not field.required):
            continue
        if absent:
            values = [None if value is UNSET else value for value in values]
        columns[name] = np.array(values, dtype=np.float64)
    return columns


def _lag(rollouts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the policy changes within each rollout, and its policy lag (docs/run-record.md)."""
    first, last = rollouts["version_first"], rollouts["version_last"]
    # If only the first and the last version are known.
    changes, mean_version = last - first, (first + last) / 2
    for i, pairs in enumerate(rollouts["versions"]):
        steps = sum(p[1] for p in pairs)
        if steps > 0:
            changes[i] = len(pairs) - 1
            mean_version[i] = sum(p[0] * p[1] for p in pairs) / steps
    return {"changes": changes, "lag": rollouts["learner_version"] - mean_version}


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
        "status": [info.status],
        "completed": [run.completed],
        "episodes": [len(returns)],
        "steps": [ends["step"]],
        "seconds": [ends["wall_time"]],
        "sps": [steady_sps(updates["step"], updates["wall_time"])],
        "sps_overall": [ends["step"] / ends["wall_time"] if ends["wall_time"] > 0 else np.nan],
        **{
            name: [getattr(info, name)]
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


def steady_sps(step: np.ndarray, wall_time: np.ndarray) -> float:
    """Return the speed of a run without its compilation, in steps per second.

    Args:
      step: steps learned from at the end of each update, `[U]`.
      wall_time: seconds since the run started at the end of each update, `[U]`.

    Returns:
      Steps per second after the first `SKIPPED_UPDATES` updates; NaN if no update is left.
    """
    skipped = SKIPPED_UPDATES
    if len(step) <= skipped:
        return float("nan")
    seconds = wall_time[-1] - wall_time[skipped - 1]
    return float((step[-1] - step[skipped - 1]) / seconds) if seconds > 0 else float("nan")
