"""Estimates how long a study still takes."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Work:
    """A job of this launch: its steps, and how long it has run."""

    cores: int
    total: int  # steps
    start: int  # steps that it had when this launch began
    steps: int  # that it has now
    seconds: float = 0.0  # that it has run in this launch
    ended: bool = False

    def update(self, steps: int, seconds: float, ended: bool = False) -> None:
        """Update its state. A run that starts over, or from a checkpoint, has fewer steps than before."""
        self.start, self.steps = min(self.start, steps), steps
        self.seconds, self.ended = seconds, ended

    @property
    def part_done(self) -> float:
        """The share of its steps that it has made."""
        return min(1.0, self.steps / self.total)


def seconds_left(work: Sequence[Work], cores: int) -> float | None:
    """Estimate the time left, if each step takes as many core-seconds as those of this launch so far.

    Args:
      work: the jobs of this launch.
      cores: that they share.

    Returns:
      Seconds; None while no job has made a step.
    """
    gained = sum(one.steps - one.start for one in work)
    if not gained:
        return None
    spent = sum(one.seconds * min(one.cores, cores) for one in work)
    waiting = [one for one in work if not one.ended]
    in_use = min(sum(one.cores for one in waiting), cores)
    still = sum(max(0, one.total - one.steps) for one in waiting)
    return spent / gained * still / in_use if waiting else 0.0
