"""Checkpoints of a run: what the learner carries, and how long each file of the record was.

A checkpoint is a folder `checkpoints/<update>/` of the record: `state/`, the arrays as Orbax writes
them, and `checkpoint.json`, its marker, written last and in one step. A folder without a marker is no
checkpoint. Environments are not in it: EnvPool cannot save one, so a resumed run rebuilds them from
the recorded actions (training.py). Nothing in a checkpoint is unpickled.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from cleanba.record import CHECKPOINTS_FOLDER, RecordError, jsonable, replace_file

MARKER = "checkpoint.json"

# Orbax tells of each step of each checkpoint; the run's own lines are enough.
logging.getLogger("absl").setLevel(logging.WARNING)


class Checkpoint(NamedTuple):
    """A complete checkpoint; its arrays are read by `restore`."""

    folder: Path
    update: int  # updates made before it
    wall_time: float  # seconds of the run, up to it
    sizes: dict[str, int]  # of the record's files, by name
    digests: list[str]  # of each environment group's trajectory, as in cleanba/actions.py
    pinned: dict[str, Any]  # what a run that resumes from it must have in common


def _checkpointer() -> ocp.Checkpointer:
    # Every process keeps to itself: the first one writes, and each reads for itself.
    process = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"p{process}"
    )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _digest_files(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MARKER
    }


def _digest_json(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def save(
    run: Path,
    tree: Any,
    *,
    update: int,
    wall_time: float,
    sizes: Mapping[str, int],
    digests: list[str],
    pinned: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint, then its marker, then delete older checkpoints.

    Args:
      run: folder of the run record.
      tree: arrays that the learner carries.
      update: updates made.
      wall_time: seconds of the run.
      sizes: size of each file of the record, which must be on disk already.
      digests: of each group's trajectory.
      pinned: what a run that resumes must have in common.
      keep: checkpoints to keep; 0 keeps all.

    Returns:
      The folder of the checkpoint.
    """
    folder = run / CHECKPOINTS_FOLDER / f"{update:08d}"
    if folder.exists():  # begun by a run that was killed before it wrote the marker
        shutil.rmtree(folder)
    _checkpointer().save(folder.absolute() / "state", jax.device_get(tree))
    body = {
        "update": update,
        "wall_time": wall_time,
        "sizes": dict(sizes),
        "digests": digests,
        "pinned": jsonable(pinned),
        "files": _digest_files(folder),
    }
    replace_file(folder / MARKER, json.dumps({"sha256": _digest_json(body), **body}, indent=1))
    if keep:
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
    """Read and check a checkpoint, but for its arrays.

    Raises:
      RecordError: with one line, if it is damaged.
    """
    damaged = f"{folder} is damaged (moved away, the checkpoint before it is used, if there is one)"
    try:
        body = json.loads((folder / MARKER).read_bytes())
        digest = body.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise RecordError(f"{damaged}: {MARKER} is not readable") from None
    if digest != _digest_json(body):
        raise RecordError(f"{damaged}: {MARKER} is not as it was written")
    found = _digest_files(folder)
    for name in sorted(body["files"].keys() | found.keys()):
        if body["files"].get(name) != found.get(name):
            what = "is missing" if name not in found else "is not as it was written"
            raise RecordError(f"{damaged}: {name} {what}")
    del body["files"]
    return Checkpoint(folder, **body)


def check_same(then: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """Refuse to go on with what another configuration began.

    Args:
      then: what was pinned, by part (hyperparameters, versions, ...) and name.
      now: the same of this run.
      what: what is to be resumed, for the message.

    Raises:
      RecordError: with one line, that names everything that differs.
    """
    now = jsonable(now)  # as it is on disk
    differences = [
        f"{name} {then.get(part, {}).get(name)!r} then, {now[part].get(name)!r} now"
        for part in now
        for name in sorted({*then.get(part, {}), *now[part]})
        if then.get(part, {}).get(name) != now[part].get(name)
    ]
    if differences:
        raise RecordError(f"{what} cannot be resumed: {'; '.join(differences)}")


def restore(checkpoint: Checkpoint, like: Any) -> Any:
    """Read the arrays of a checkpoint.

    Args:
      checkpoint: which one.
      like: a pytree of the same structure, shapes and types.

    Returns:
      The pytree, as NumPy arrays.
    """
    return _checkpointer().restore(checkpoint.folder.absolute() / "state", jax.device_get(like))


def named_arrays(checkpoint: Checkpoint, entry: str) -> dict[str, np.ndarray]:
    """Return one entry of a checkpoint's tree as arrays by their path, such as `['Dense_0']['bias']`."""
    tree = _checkpointer().restore(checkpoint.folder.absolute() / "state")[entry]
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
