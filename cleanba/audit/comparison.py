"""Compare two run records, or two checkpoints, bit for bit."""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET, structs

from cleanba.record import ACTIONS_FILE, Episode, Rollout, Run

TIMING = {"wall_time", "actor"}  # fields that may depend on the layout


class Difference(NamedTuple):
    """The first difference of two records."""

    text: str
    update: int | None = None  # the first update after which the parameters differ, if they do


def fingerprints(run: Run) -> list[tuple[int, str | None]]:
    """Return (update, fingerprint of the parameters after it) of a record, in order."""
    return [(row.version - 1, row.fingerprint) for row in run.updates()]


def first_difference(reference: Run, other: Run) -> Difference | None:
    """Compare everything in two records that must not depend on the layout.

    In this order: the chain of parameter fingerprints, the episodes, the policy-lag records and the recorded
    actions.

    Returns:
      The first difference, or None if the records agree.
    """
    for ours, theirs in itertools.zip_longest(fingerprints(reference), fingerprints(other)):
        if ours != theirs:
            update = (ours or theirs)[0]
            return Difference(f"parameters differ from update {update} on", update)
    for what, rows_of in (("episodes", Run.episodes), ("policy lag", Run.rollouts)):
        for ours, theirs in itertools.zip_longest(rows_of(reference), rows_of(other)):
            if _untimed(ours) != _untimed(theirs):
                return Difference(f"{what} differ: {_untimed(ours)} and {_untimed(theirs)}")
    if (reference.path / ACTIONS_FILE).read_bytes() != (other.path / ACTIONS_FILE).read_bytes():
        return Difference("actions differ")
    return None


def _untimed(row: Episode | Rollout | None) -> dict[str, Any] | None:
    """Return the fields of a row that must not depend on the layout."""
    if row is None:
        return None
    fields = structs.asdict(row)
    return {k: v for k, v in fields.items() if k not in TIMING and v is not UNSET}


def describe_tensors(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> str:
    """Name the first tensor that differs, and by how much.

    Args:
      ours: parameters of the reference by name.
      theirs: parameters of the same names and shapes.

    Returns:
      A phrase, or "" if all tensors are equal.
    """
    differing = [name for name in ours if not np.array_equal(ours[name], theirs[name])]
    if not differing:
        return ""
    a, b = (x[differing[0]].astype(np.float64) for x in (ours, theirs))
    return (
        f"{differing[0]} first ({len(differing)} of {len(ours)} tensors), by up to "
        f"{np.abs(a - b).max():.2g} where values are up to {np.abs(a).max():.2g}"
    )
