"""The tables that every importer fills and every analysis reads."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

UNKNOWN = "-"  # a system or hardware setting that is not in the source


class InputError(Exception):
    """Input that cannot be read; the message is one line that names file and, where known, line."""


class RunKey(NamedTuple):
    """What identifies a run. `run` distinguishes runs that agree in all other keys."""

    run: str
    system: str
    setting: str
    env_id: str
    seed: int


KEYS = list(RunKey._fields)
LABELS = ("run", "system", "setting", "env_id")  # keys that repeat over rows, stored as categories

# Column -> dtype, after the keys. NaN where the source has no value.
CURVES = {"step": "f8", "wall_time": "f8", "return": "f8", "length": "f8"}
ROLLOUTS = {
    "actor": "f8",
    "group": "f8",
    "rollout": "f8",
    "steps": "f8",
    "wall_time": "f8",
    "version_first": "f8",
    "version_last": "f8",
    "changes": "f8",
    "learner_version": "f8",
    "lag": "f8",
    "versions": object,
}
UPDATES = {"version": "f8", "step": "f8", "wall_time": "f8", "fingerprint": object}
RUNS = {
    "status": object,
    "completed": bool,
    "episodes": "f8",
    "steps": "f8",
    "seconds": "f8",
    "sps": "f8",
    "sps_overall": "f8",
    "hyperparameters": object,
    "hardware": object,
    "versions": object,
    "revision": object,
    "command": object,
    "started": object,
    "ended": object,
    "error": object,
}
SCORES = {"score": "f8", "std": "f8", "normalized": bool}


class Tables(NamedTuple):
    """Everything that was read. All but `quality` start with the columns of `RunKey`.

    Attributes:
      curves: one row per finished episode (or, for logs that hold averages only, per logged
        average): step (agent steps), wall_time (s since the run started), return, length; and
        `episodes`, the number of episodes that a row averages, if the source has it (NaN or absent: one).
      rollouts: one row per rollout: actor, group, rollout, steps, wall_time, version_first,
        version_last, changes (policy changes within it), learner_version (when it was used), lag
        (learner_version minus the mean version over its steps), versions (pairs version, steps).
      updates: one row per learner update, with all the fields that its source has.
      runs: one row per run: status, completed, episodes, steps, seconds, sps (steps/s after the
        first updates), sps_overall (steps/s of the whole run), hyperparameters, hardware, ...
      scores: one row per run or, for published tables, per mean over runs (then `std` is their
        standard deviation and `seed` is -1), of sources that hold final scores only; `normalized`
        says whether the score is already normalized.
      quality: one row per problem: run (or path), problem.
    """

    curves: pd.DataFrame
    rollouts: pd.DataFrame
    updates: pd.DataFrame
    runs: pd.DataFrame
    scores: pd.DataFrame
    quality: pd.DataFrame


Piece = tuple[RunKey, Mapping[str, Sequence | np.ndarray]]


def stack(pieces: Sequence[Piece], columns: Mapping[str, object]) -> pd.DataFrame:
    """Concatenate the columns of several runs.

    Args:
      pieces: one per run, its key and its columns, all of one length; a column of `columns` that a
        run does not have becomes NaN (None for objects), further columns are kept.
      columns: column -> dtype, in the order wanted.

    Returns:
      A frame with the columns of `RunKey`, of `columns` and any further ones. Keys that are text
      are categories, so that ten million rows do not hold ten million strings.
    """
    lengths = [len(next(iter(data.values()))) if data else 0 for _, data in pieces]
    frame = {}
    for name in KEYS:
        values = [getattr(key, name) for key, _ in pieces]
        if name in LABELS:
            categories = sorted(set(values))
            code = {value: i for i, value in enumerate(categories)}
            codes = np.repeat(np.array([code[v] for v in values], dtype=np.int32), lengths)
            frame[name] = pd.Categorical.from_codes(codes, categories=categories)
        else:
            frame[name] = np.repeat(np.array(values, dtype=np.int64), lengths)
    further = dict.fromkeys(name for _, data in pieces for name in data if name not in columns)
    for name, dtype in {**columns, **dict.fromkeys(further)}.items():
        parts = [
            _column(data.get(name), length, dtype)
            for (_, data), length in zip(pieces, lengths, strict=True)
            if length
        ]
        frame[name] = np.concatenate(parts) if parts else np.empty(0, dtype=dtype or "f8")
    return pd.DataFrame(frame, copy=False)


def _column(values: Sequence | np.ndarray | None, length: int, dtype: object) -> np.ndarray:
    if values is None:
        return np.full(length, None if dtype is object else np.nan, dtype=dtype or "f8")
    if dtype is object:
        column = np.empty(length, dtype=object)  # np.array() would turn equal lists into a matrix
        column[:] = list(values)
        return column
    return np.asarray(values, dtype=dtype)


def quality_frame(problems: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """Build the data-quality table from pairs of run (or path) and problem; each pair once."""
    rows = list(dict.fromkeys(problems))
    return pd.DataFrame(rows, columns=["run", "problem"], dtype=object)


def tables(
    curves: Sequence[Piece] = (),
    rollouts: Sequence[Piece] = (),
    updates: Sequence[Piece] = (),
    runs: Sequence[Piece] = (),
    scores: Sequence[Piece] = (),
    problems: Iterable[tuple[str, str]] = (),
) -> Tables:
    """Build `Tables` from the data of an importer; tables that it lacks are empty."""
    return Tables(
        stack(curves, CURVES),
        stack(rollouts, ROLLOUTS),
        stack(updates, UPDATES),
        stack(runs, RUNS),
        stack(scores, SCORES),
        quality_frame(problems),
    )


def concat(parts: Sequence[Tables]) -> Tables:
    """Concatenate the tables of several importers."""
    if len(parts) == 1:
        return parts[0]
    return Tables(*(_concat_frames(frames) for frames in zip(*parts, strict=True)))


def _concat_frames(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    filled = [frame for frame in frames if len(frame)]
    if len(filled) <= 1:
        return filled[0] if filled else frames[0]
    joined = pd.concat([frame.astype(_as_text(frame)) for frame in filled], ignore_index=True)
    return joined.astype({name: "category" for name in LABELS if _is_label(joined, name)})


def _as_text(frame: pd.DataFrame) -> dict[str, object]:
    return {name: object for name in LABELS if _is_label(frame, name)}


def _is_label(frame: pd.DataFrame, name: str) -> bool:
    return name in frame and "system" in frame  # the quality table's `run` is plain text


def split_runs(frame: pd.DataFrame) -> list[tuple[RunKey, pd.DataFrame]]:
    """Split a table into its runs, sorted by key; rows keep their order, and are not copied."""
    if frame.empty:
        return []
    column = frame["run"]
    codes = column.cat.codes.to_numpy() if column.dtype == "category" else pd.factorize(column)[0]
    starts = np.flatnonzero(np.diff(codes, prepend=-2))
    if len(starts) != len(np.unique(codes)):  # the rows of some run are not contiguous
        order = np.argsort(codes, kind="stable")
        frame, codes = frame.iloc[order], codes[order]
        starts = np.flatnonzero(np.diff(codes, prepend=-2))
    parts = [
        frame.iloc[a:b] for a, b in zip(starts, np.append(starts[1:], len(codes)), strict=True)
    ]
    keys = [RunKey(*(part[name].iloc[0] for name in KEYS)) for part in parts]
    return sorted(zip(keys, parts, strict=True), key=lambda pair: pair[0])
