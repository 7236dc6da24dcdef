"""The name of a hardware layout: which devices act, which learn, in how many processes and threads.

`a0-l1,2-d1-t2`: in one process (d1), two actor threads (t2) on device 0 (a0), learners on devices 1
and 2 (l1,2). It is the spelling of Cleanba's README, followed by the actor threads. Runs are named
with it and analyses parse it, so this module imports neither jax nor torch.
"""

import re
from dataclasses import dataclass

_NAME = re.compile(r"a(\d+(?:,\d+)*)-l(\d+(?:,\d+)*)-d(\d+)(?:-t(\d+))?", re.ASCII)


@dataclass(frozen=True)
class Layout:
    """The devices, processes and threads of a run."""

    actors: tuple[int, ...] = (0,)
    """Ids of the devices of each process that compute actions."""
    learners: tuple[int, ...] = (0,)
    """Ids of the devices of each process that compute gradients."""
    processes: int = 1
    """Number of processes."""
    threads: int | None = None
    """Actor threads for each actor device; None where the name leaves them out, as in Cleanba's README."""

    def __post_init__(self):
        """Check the numbers.

        Raises:
          ValueError: if a device is named twice, or a number is too small.
        """
        for ids in (self.actors, self.learners):
            if not ids or min(ids) < 0 or len(set(ids)) != len(ids):
                raise ValueError(f"device ids {ids}: must be one or more different ids from 0 on")
        if self.processes < 1 or (self.threads is not None and self.threads < 1):
            raise ValueError("a layout has at least one process and one actor thread")

    @property
    def name(self) -> str:
        """The layout's name, such as `a0-l1,2-d1-t2`."""
        actors, learners = (",".join(map(str, ids)) for ids in (self.actors, self.learners))
        threads = "" if self.threads is None else f"-t{self.threads}"
        return f"a{actors}-l{learners}-d{self.processes}{threads}"

    @classmethod
    def parse(cls, name: str) -> "Layout":
        """Return the layout of a name; `Layout.parse(name).name == name`.

        Raises:
          ValueError: with one line, if it is not the name of a layout.
        """
        match = _NAME.fullmatch(name)
        try:
            if match is None:
                raise ValueError("no match")
            actors, learners = (tuple(map(int, ids.split(","))) for ids in match.group(1, 2))
            layout = cls(actors, learners, int(match[3]), int(match[4]) if match[4] else None)
            if layout.name != name:
                raise ValueError("leading zeros")
        except ValueError:
            raise ValueError(f"not a layout: {name!r} (an example: a0-l1,2-d1-t2)") from None
        return layout
