"""Turns what the peers tell into a run record."""

from collections.abc import Iterable, Mapping
from typing import Any

from baselines.run_log import RunLog

LOG = "log"  # queue of the store, of what is to be recorded


class Recorder:
    """Holds back rollouts until the step that learned from them, since gradients can be lost."""

    def __init__(
        self,
        log: RunLog,
        version: int = 1,
        steps: int = 0,
        last_rollouts: Mapping[int, int] | None = None,
    ):
        """Write to a log that has begun.

        Args:
          log: of the run.
          version: of the model that the run goes on from.
          steps: that it has learned from.
          last_rollouts: number of the last rollout of each actor in the log, where the run goes on.
        """
        self._log = log
        self._version = version
        self._last_rollouts = dict(last_rollouts or {})
        self._before = dict(
            self._last_rollouts
        )  # number of each actor's last one in an earlier life
        # by the version and the group that gradients were computed in: the losses and the rollouts
        self._pending: dict[tuple[int, int | None], list[Mapping[str, Any]]] = {}
        self._late: list[dict[str, Any]] = []
        self._num_lost = 0
        self._groups: dict[int, int | None] = {}  # that stepped from each version
        self._episodes: list[dict[str, Any]] = []
        self.steps = steps  # learned from
        self.begun = False  # has told of a step

    def restarted(self, actors: Iterable[int]) -> None:
        """Go on counting the rollouts of actors that begin anew, so that no number comes twice."""
        self._before |= {actor: self._last_rollouts.get(actor, 0) for actor in actors}

    def hear(self, said: Mapping[str, Any]) -> None:
        """Take in one message of a peer."""
        self._episodes += said.get("episodes", [])
        if "rollouts" in said:
            for row in said["rollouts"]:
                row["rollout"] += self._before.get(row["actor"], 0)
                last = self._last_rollouts.get(row["actor"], 0)
                self._last_rollouts[row["actor"]] = max(last, row["rollout"])
            self._take(said)
        # in a new group, all peers repeat the last step that they know of
        if "update" in said and said["update"]["version"] > self._version:
            self._write(said["update"], said["group"])

    def _take(self, gradient: Mapping[str, Any]) -> None:
        version, group = gradient["version"], gradient["group"]
        if version not in self._groups:
            self._pending.setdefault((version, group), []).append(gradient)
        elif self._groups[version] == group:  # overtaken by the message of the step
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
        # one loop does everything: nobody waits in a queue
        waits = dict.fromkeys(
            ("rollout_queue_get_time", "params_queue_get_time", "rollout_queue_put_time"), 0.0
        )
        rollouts = [*self._late, *(row for gradient in used for row in gradient["rollouts"])]
        self._log.write(
            update | means | waits | {"num_lost": self._num_lost, "fingerprint": None},
            rollouts,
            self._episodes,
        )
        self._late, self._episodes, self._num_lost = [], [], 0
        self._version, self.steps, self.begun = update["version"], update["step"], True
