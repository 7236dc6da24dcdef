"""What synchronous systems record and repeat: rollout and update take turns, in one process."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET, UnsetType

from cleanba import record
from cleanba.audit.segments import Repeated, Replayed
from cleanba.environments import Episode
from cleanba.run.command_line import BadInput


def check_batches(
    *, num_envs: int, num_steps: int, num_minibatches: int, total_timesteps: int
) -> None:
    """Check that a batch can be cut into minibatches, and that there is one.

    Raises:
      BadInput: with one line.
    """
    batch_size = num_envs * num_steps
    if batch_size % num_minibatches:
        raise BadInput(
            f"--num-minibatches {num_minibatches}: must divide the {batch_size} steps of a batch "
            f"({num_envs} environments x {num_steps} steps)"
        )
    if total_timesteps < batch_size:
        raise BadInput(
            f"--total-timesteps {total_timesteps}: one update learns from {batch_size} steps"
        )


class Times(NamedTuple):
    """Times of an update, in seconds since the run started."""

    last: float  # end of the previous update
    begin: float  # start of the rollout
    collected: float  # end of the rollout
    done: float  # end of the update


def rows(
    number: int,
    batch_size: int,
    times: Times,
    activities: Mapping[str, float],
    metrics: Mapping[str, Any],
    *,
    fingerprint: str | None,
    checkpoint: str | UnsetType = UNSET,
) -> tuple[record.Rollout, record.Update]:
    """Return the rows of an update and of the rollout that it learned from.

    Args:
      number: of the update, from 1, which is also the version of the policy that acted.
      batch_size: steps of the rollout, over all environments.
      times: of the update.
      activities: seconds of the rollout by activity, `inference_time` and `env_time`.
      metrics: further fields of the update.
      fingerprint: of the parameters, if it is recorded.
      checkpoint: digest of the checkpoint, if one is saved.
    """
    rollout = record.Rollout(
        actor=0,
        group=None,
        rollout=number,
        steps=batch_size,
        wall_time=round(times.collected, 4),
        version_first=number,
        version_last=number,
        versions=[(number, batch_size)],
        learner_version=number,
    )
    update = record.Update(
        version=number + 1,
        step=number * batch_size,
        wall_time=round(times.done, 4),
        update_seconds=round(times.done - times.last, 6),
        **metrics,
        # There are no queues.
        rollout_queue_get_time=0.0,
        params_queue_get_time=0.0,
        rollout_queue_put_time=0.0,
        rollout_time=round(times.collected - times.begin, 6),
        **{name: round(seconds, 6) for name, seconds in activities.items()},
        training_time=round(times.done - times.collected, 6),
        fingerprint=fingerprint,
        checkpoint=checkpoint,
    )
    return rollout, update


def episode_rows(
    episodes: Sequence[Episode],
    num_envs: int,
    first_step: int,
    wall_time: float,
    further: Sequence[Mapping[str, int]] | None = None,
) -> list[record.Episode]:
    """Return the rows of the episodes that ended in a rollout.

    Args:
      episodes: that ended.
      num_envs: environments of the run.
      first_step: steps of the run before the rollout.
      wall_time: of the rows.
      further: further fields of each row.
    """
    return [
        record.Episode(
            step=first_step + (e.t + 1) * num_envs,
            wall_time=wall_time,
            env_index=e.index,
            episode_return=e.episode_return,
            length=e.length,
            **more,
        )
        for e, more in zip(episodes, further or [{}] * len(episodes), strict=True)
    ]


class Repetition:
    """The training of a recorded run, from its beginning; see `cleanba.audit.segments.Repetition`."""

    def __init__(self, actor: Any, learner: Any):
        """Begin with a program's own parts.

        Args:
          actor: the environments and the policy. `collect` takes parameters and returns a rollout, its
            `Replayed`, and more; `replay` takes recorded actions.
          learner: the state. `learn` takes a rollout and returns metrics; `updates` counts them.
        """
        self._actor, self._learner = actor, learner

    def replay(self, actions: np.ndarray) -> Replayed:
        """Step the environments through recorded actions [T, B]."""
        self._learner.updates += 1
        return self._actor.replay(actions)

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the learner's state from a checkpoint after the updates so far."""
        self._learner.restore(arrays)

    def update(self) -> Repeated:
        """Collect a rollout, and learn from it."""
        rollout, replayed, *_ = self._actor.collect(self._learner.state.params)
        return Repeated(replayed, self._learner.learn(rollout))

    def fingerprint(self) -> str:
        """Return the fingerprint of the parameters."""
        return record.fingerprint(self._learner.state.params)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint after the last update holds."""
        return self._learner.arrays()

    def close(self) -> None:
        """Free the environments."""
        self._actor.close()
