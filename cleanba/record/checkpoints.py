"""Checkpoints of a run: the learner's state, and the length of each file of the record.

A checkpoint is a folder `checkpoints/<update>/` of the record with two files: `arrays.npz`, the arrays by
name, and `checkpoint.json`, the marker, which is written last and atomically. A folder without a marker is
no checkpoint. Environments are not in it, because EnvPool cannot save its state: a resumed run rebuilds
them from the recorded actions (training.py). Nothing in a checkpoint is unpickled.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from cleanba.record.encoding import ENCODER, describe_error, jsonable
from cleanba.record.files import (
    LARGEST_ARRAYS,
    LARGEST_INFO,
    decode_json,
    open_regular,
    read_arrays,
    read_file,
)
from cleanba.record.folder import CHECKPOINTS_FOLDER, RecordError, replace_file
from cleanba.record.schema import Count, CutFile, Digest, Seconds

MARKER = "checkpoint.json"
ARRAYS = "arrays.npz"


class _Body(msgspec.Struct, kw_only=True):
    """What a marker holds about its checkpoint; see `Checkpoint`."""

    update: Count
    wall_time: Seconds
    sizes: dict[CutFile, Count]
    digests: list[str]
    pinned: dict[str, dict[str, Any]]
    arrays: Digest  # SHA-256 of arrays.npz


class _Marker(msgspec.Struct):
    """`checkpoint.json`."""

    sha256: Digest  # of the body as it is in the file
    body: msgspec.Raw


class Checkpoint(NamedTuple):
    """A complete checkpoint; `load` reads its arrays."""

    folder: Path
    update: int  # updates made before it
    wall_time: float  # seconds of the run, up to it
    sizes: dict[str, int]  # of the record's files in bytes, by name
    digests: list[str]  # of each environment group's trajectory, as in cleanba/record/actions.py
    pinned: dict[str, dict[str, Any]]  # must be equal in a run that resumes from it


def save(
    run: Path,
    arrays: Mapping[str, np.ndarray],
    *,
    update: int,
    wall_time: float,
    sizes: Mapping[str, int],
    digests: list[str],
    pinned: Mapping[str, Mapping[str, Any]],
    keep: int | Literal["all"],
) -> Path:
    """Write a checkpoint, then its marker, then delete older checkpoints.

    Args:
      run: folder of the run record.
      arrays: the learner's state, by name.
      update: updates made.
      wall_time: seconds of the run.
      sizes: size in bytes of each file of the record, which must be on disk already.
      digests: of each group's trajectory.
      pinned: values that must be equal in a run that resumes, by part and name.
      keep: checkpoints to keep, the newest.

    Returns:
      The folder of the checkpoint.
    """
    folder = run / CHECKPOINTS_FOLDER / f"{update:08d}"
    if folder.exists():  # left by a run that was killed before it wrote the marker
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    with open(folder / ARRAYS, "w+b") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    body = _Body(
        update=update,
        wall_time=wall_time,
        sizes=dict(sizes),
        digests=digests,
        pinned=jsonable(pinned),
        arrays=digest,
    )
    data = ENCODER.encode(body)
    marker = _Marker(hashlib.sha256(data).hexdigest(), msgspec.Raw(data))
    replace_file(folder / MARKER, ENCODER.encode(marker))
    if keep != "all":
        for older in _complete(run)[:-keep]:
            (older / MARKER).unlink()
            shutil.rmtree(older)
    return folder


def _complete(run: Path) -> list[Path]:
    return sorted(marker.parent for marker in run.glob(f"{CHECKPOINTS_FOLDER}/*/{MARKER}"))


def newest(run: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, or None; its files have been checked.

    Raises:
      RecordError: with one line, if it is damaged.
    """
    complete = _complete(run)
    return read(complete[-1]) if complete else None


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint except for its arrays, and compare the checksums of both files.

    Raises:
      RecordError: with one line, if it is damaged.
    """
    damaged = f"{folder} is damaged (move it away to use the previous checkpoint)"
    try:
        marker = decode_json(read_file(folder / MARKER, LARGEST_INFO), _Marker)
    except (OSError, msgspec.DecodeError):
        raise RecordError(f"{damaged}: {MARKER} is not readable") from None
    if hashlib.sha256(marker.body).hexdigest() != marker.sha256:
        raise RecordError(f"{damaged}: {MARKER} has changed since it was written")
    try:
        body = decode_json(marker.body, _Body)
    except msgspec.DecodeError as error:
        raise RecordError(f"{damaged}: {MARKER}: {describe_error(error)}") from None
    try:
        with open_regular(folder / ARRAYS, LARGEST_ARRAYS) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise RecordError(f"{damaged}: {ARRAYS} is missing") from None
    except OSError as error:
        raise RecordError(f"{damaged}: {ARRAYS}: {error.strerror}") from None
    if found != body.arrays:
        raise RecordError(f"{damaged}: {ARRAYS} has changed since it was written")
    return Checkpoint(folder, body.update, body.wall_time, body.sizes, body.digests, body.pinned)


def load(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint by name.

    Raises:
      RecordError: with one line, if they cannot be read.
    """
    path = checkpoint.folder / ARRAYS
    try:
        return read_arrays(path)
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: {error}") from None


def check_arrays(arrays: Mapping[str, np.ndarray], like: Mapping[str, Any]) -> None:
    """Check that arrays have the names, shapes and dtypes of a run's state.

    Args:
      arrays: of a checkpoint.
      like: the state, or its shapes and dtypes.

    Raises:
      RecordError: with one line, for the first that differs.
    """
    found, expected = (
        {name: (array.shape, array.dtype) for name, array in one.items()} for one in (arrays, like)
    )
    for name in sorted({*found, *expected}):
        if found.get(name) != expected.get(name):
            raise RecordError(f"the checkpoint is that of another run: {name}")


def check_same(
    then: Mapping[str, Any], now: Mapping[str, Any], what: str, verb: str = "resumed"
) -> None:
    """Refuse to resume with another configuration.

    Args:
      then: what was pinned, by part (hyperparameters, versions, ...) and name.
      now: the same of this run.
      what: what is to be resumed, for the message.
      verb: what is to be done with it.

    Raises:
      RecordError: with one line that lists all differences.
    """
    now = jsonable(now)  # as it is on disk
    differences = [
        f"{name} {then.get(part, {}).get(name)!r} then, {now[part].get(name)!r} now"
        for part in now
        for name in sorted({*then.get(part, {}), *now[part]})
        if then.get(part, {}).get(name) != now[part].get(name)
    ]
    if differences:
        raise RecordError(f"{what} cannot be {verb}: {'; '.join(differences)}")
