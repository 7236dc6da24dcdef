"""Segments of a run's training, which an audit repeats from one checkpoint to the next.

The updates of a run are cut at its checkpoints. A segment begins with the initial parameters or with those
of a checkpoint, and ends with the fingerprint of the next checkpoint or of the run's end. The author of the
run does not know which segments will be drawn.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec import UNSET

from cleanba.environments import Episode
from cleanba.record import RecordError, Run, Update, checkpoints, fingerprint
from cleanba.record.encoding import jsonable
from cleanba.record.folder import CHECKPOINTS_FOLDER

# Fields of an update that depend on time, and those that are compared on their own.
MEASURED = (
    "wall_time", "update_seconds", "rollout_queue_get_time", "params_queue_get_time",
    "rollout_queue_put_time", "rollout_time", "inference_time", "env_time", "training_time",
)  # fmt: skip
DIGESTS = ("fingerprint", "checkpoint")


class NotRepeatable(Exception):
    """The training cannot be repeated here; the message is one line with the reason."""


class Mismatch(Exception):
    """The record contradicts what was computed; the message is one line with the first difference."""


class Replayed(NamedTuple):
    """One rollout of all N environments of a run."""

    actions: np.ndarray  # int32 [T, N]
    digest: bytes  # of the trajectories so far, see `record.actions`
    episodes: list[Episode]  # that ended, in the order of steps and environments


class Repeated(NamedTuple):
    """One repeated update."""

    rollout: Replayed
    metrics: dict[str, Any]  # fields of `record.Update`, without those that depend on time


class Repetition(Protocol):
    """What an audit needs of a system: a run whose updates can be repeated, from its beginning."""

    def replay(self, actions: np.ndarray) -> Replayed:
        """Step the environments through the recorded actions [T, N] of the next rollout."""

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load the learner's state from the arrays of the checkpoint that was saved after the updates so far.

        Raises:
          RecordError: with one line, if they are not those of this run's network and optimizer.
        """

    def update(self) -> Repeated:
        """Make the next update."""

    def fingerprint(self) -> str:
        """Return the fingerprint of the parameters."""

    def arrays(self) -> Mapping[str, np.ndarray]:
        """Return what a checkpoint holds after the updates so far."""

    def close(self) -> None:
        """Free the environments."""


class Segment(NamedTuple):
    """Updates from `start` + 1 to `end`."""

    start: int
    end: int


def segments_of(run: Run, updates: Sequence[Update]) -> list[Segment]:
    """Return the segments of a run, in order. They are divided by the checkpoints that the record holds.

    Checkpoints of which only the digest is recorded do not divide segments; their digests are compared.
    """
    cuts = [
        number
        for number, row in enumerate(updates, start=1)
        if row.checkpoint is not UNSET and (_folder(run, number) / checkpoints.MARKER).is_file()
    ]
    ends = sorted({*cuts, len(updates)} - {0})
    return [Segment(*pair) for pair in zip([0, *ends], ends, strict=False)]


def _folder(run: Run, update: int) -> Path:
    return run.path / CHECKPOINTS_FOLDER / f"{update:08d}"


def draw(segments: Sequence[Segment], count: int, rng: np.random.Generator) -> list[Segment]:
    """Draw `count` of the segments without replacement, or all if there are not more."""
    count = min(count, len(segments))
    chosen = rng.choice(len(segments), size=count, replace=False)
    return [segments[i] for i in sorted(chosen)]


def chance_of_missing(share: float, segments: Sequence[Segment], drawn: int) -> float:
    """Return the largest probability with which falsified updates are all missed.

    The falsified updates are in as few segments as can hold them, the longest.

    Args:
      share: share of the run's updates that are falsified, more than 0.
      segments: all segments of the run.
      drawn: number of segments that were drawn, without replacement.
    """
    lengths = sorted((end - start for start, end in segments), reverse=True)
    held = np.cumsum(lengths)
    # Rounding must not ask for one segment more than the share fills.
    bad = 1 + int(np.searchsorted(held, share * held[-1] * (1 - 1e-12)))
    return math.comb(len(lengths) - bad, drawn) / math.comb(len(lengths), drawn)


def begin(run: Run, repetition: Repetition, segment: Segment, updates: Sequence[Update]) -> None:
    """Bring the learner to the beginning of a segment.

    Raises:
      Mismatch: if the checkpoint is not the one that the record describes.
    """
    if segment.start == 0:
        return
    where = f"checkpoint of update {segment.start}"
    try:
        arrays = checkpoints.load(checkpoints.read(_folder(run, segment.start)))
        if fingerprint(arrays) != updates[segment.start - 1].checkpoint:
            raise Mismatch(f"{where}: its arrays differ from the digest in updates.jsonl")
        repetition.restore(arrays)
    except RecordError as error:
        raise Mismatch(f"{where}: {error}") from None


def check_update(row: Update, repetition: Repetition, metrics: Mapping[str, Any]) -> None:
    """Compare a recorded update with the one that was made again.

    Args:
      row: the record's.
      repetition: after the update.
      metrics: of the update.

    Raises:
      Mismatch: with the first field that differs.
    """
    where = f"update {row.version - 1}"
    recorded = {
        name: value
        for name, value in msgspec.structs.asdict(row).items()
        if name not in (*MEASURED, *DIGESTS, "version", "step") and value is not UNSET
    }
    metrics = jsonable(dict(metrics))
    for name in sorted({*recorded, *metrics}):
        then, now = (x.get(name, "nothing") for x in (recorded, metrics))
        if then != now:
            raise Mismatch(f"{where}: {name} {then} recorded, {now} computed")
    if row.fingerprint is not None and row.fingerprint != repetition.fingerprint():
        raise Mismatch(f"{where}: the parameters differ from their fingerprint")
    if row.checkpoint is not UNSET and row.checkpoint != fingerprint(repetition.arrays()):
        raise Mismatch(
            f"{where}: parameters or optimizer state differ from the checkpoint's digest"
        )
