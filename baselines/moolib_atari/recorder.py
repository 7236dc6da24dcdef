"""Turns the peers' messages into a run record."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cleanba.record import FILE_OF_ROW, Episode, Rollout, Update
from cleanba.run.log import RunLog

LOG = "log"  # queue of the store, for messages to the recorder


def sizes_at(directory: Path, version: int, step: int, wall_time: float) -> dict[str, int]:
    """Return the size of each file of rows when a checkpoint was made.

    Args:
      directory: folder of the record.
      version: of the model in the checkpoint.
      step: agent steps learned from by then.
      wall_time: seconds of the run by then.
    """
    before = {
        # Before the first update, episodes have step 0.
        Episode: lambda row: row.step <= step and row.wall_time <= wall_time,
        Rollout: lambda row: row.learner_version < version,
        Update: lambda row: row.version <= version,
    }
    sizes = {}
    for kind, name in FILE_OF_ROW.items():
        path, size = directory / name, 0
        for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
            whole = line.endswith(b"\n")
            if not whole or not before[kind](msgspec.json.decode(line, type=kind)):
                break
            size += len(line)
        sizes[name] = size
    return sizes


class Recorder:
    """Holds rollouts back until the step that learned from them, since gradients can be lost."""

    def __init__(
        self,
        log: RunLog,
        version: int = 1,
        steps: int = 0,
        last_rollouts: Mapping[int, int] | None = None,
    ):
        """Write to the log of a run.

        Args:
          log: of the run.
          version: of the model that the run begins with or resumes from.
          steps: agent steps that this model has learned from.
          last_rollouts: number of the last rollout of each actor in the log.
        """
        self._log = log
        self._version = version
        self._last_rollouts = dict(last_rollouts or {})
        self._before = dict(self._last_rollouts)  # the last of each actor before it was restarted
        # messages of gradients, by the version and the group that they were computed in
        self._pending: dict[tuple[int, int | None], list[Mapping[str, Any]]] = {}
        self._late: list[Rollout] = []
        self._num_lost = 0
        self._groups: dict[int, int | None] = {}  # the group that stepped from each version
        self._episodes: list[Episode] = []
        self.steps = steps  # learned from
        self.begun = False  # a step has been recorded

    def restarted(self, actors: Iterable[int]) -> None:
        """Continue the rollout numbers of actors that are restarted, so that no number occurs twice."""
        self._before |= {actor: self._last_rollouts.get(actor, 0) for actor in actors}

    def receive(self, message: Mapping[str, Any]) -> None:
        """Take in one message of a peer."""
        self._episodes += msgspec.convert(message.get("episodes", []), list[Episode])
        if "rollouts" in message:
            rollouts = msgspec.convert(message["rollouts"], list[Rollout])
            for row in rollouts:
                row.rollout += self._before.get(row.actor, 0)
                last = self._last_rollouts.get(row.actor, 0)
                self._last_rollouts[row.actor] = max(last, row.rollout)
            self._add_gradient({**message, "rollouts": rollouts})
        # in a new group, all peers repeat the last step that they know of
        if "update" in message and message["update"]["version"] > self._version:
            self._write(message["update"], message["group"])

    def _add_gradient(self, gradient: Mapping[str, Any]) -> None:
        version, group = gradient["version"], gradient["group"]
        if version not in self._groups:
            self._pending.setdefault((version, group), []).append(gradient)
        elif self._groups[version] == group:  # its message arrived after that of the step
            self._late += gradient["rollouts"]
        else:
            self._num_lost += 1

    def _write(self, update: dict[str, Any], group: int | None) -> None:
        computed_at = update["gradient_version"]
        self._groups[computed_at] = group
        used = self._pending.pop((computed_at, group), [])
        gone = [key for key in self._pending if key[0] <= computed_at]
        self._num_lost += sum(len(self._pending.pop(key)) for key in gone)
        losses = [gradient["losses"] for gradient in used]
        names = losses[0] if losses else ("loss", "policy_loss", "value_loss", "entropy")
        means = {
            name: sum(some[name] for some in losses) / len(losses) if losses else None
            for name in names
            if name != "count"
        }
        row = Update(
            **update,
            **means,
            # There are no queues: one loop does everything.
            rollout_queue_get_time=0.0,
            params_queue_get_time=0.0,
            rollout_queue_put_time=0.0,
            num_lost=self._num_lost,
        )
        used_rollouts = [row for gradient in used for row in gradient["rollouts"]]
        self._log.write(row, [*self._late, *used_rollouts], self._episodes)
        self._late, self._episodes, self._num_lost = [], [], 0
        self._version, self.steps, self.begun = row.version, row.step, True
