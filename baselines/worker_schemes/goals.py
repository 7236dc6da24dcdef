"""Tasks with goals, and hindsight experience replay (HER, https://arxiv.org/abs/1707.01495).

EnvPool has the tasks of Gymnasium-Robotics, whose observations are dictionaries. Here they are vectors that
end with the achieved and the desired goal: networks see both, and a storage can exchange the latter.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from baselines.worker_schemes.parts import Rollout
from baselines.worker_schemes.replay import StoredTransitions, n_step_transitions

GOALS = ("achieved_goal", "desired_goal")


class GoalTask(NamedTuple):
    """How a goal is rewarded, by Gymnasium-Robotics."""

    distance: float  # meters; the goal is reached within it
    reached: float  # reward if it is reached
    missed: float  # reward if it is not

    def reward(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        """Return the rewards of achieved goals [..., G] for desired ones."""
        distance = np.linalg.norm(achieved - desired, axis=-1)
        return np.where(distance <= self.distance, self.reached, self.missed).astype(np.float32)


# By the beginning of the environment's name.
GOAL_TASKS: Mapping[str, GoalTask] = {
    "Fetch": GoalTask(0.05, 0.0, -1.0),
    "PointMaze": GoalTask(0.45, 1.0, 0.0),
}


def goal_task(env_id: str) -> GoalTask | None:
    """Return how goals are rewarded in an environment, or None if it is not known or not sparse."""
    if "Dense" in env_id:
        return None
    return next((task for name, task in GOAL_TASKS.items() if env_id.startswith(name)), None)


def join_goals(obs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return observations [..., D] that end with the achieved and the desired goal, G numbers each."""
    others = sorted(set(obs) - set(GOALS))
    return np.concatenate([obs[name] for name in (*others, *GOALS)], axis=-1)


def hindsight_transitions(
    rollout: Rollout,
    rng: np.random.Generator,
    *,
    task: GoalTask,
    size: int,
    copies: int,
    gamma: float,
) -> tuple[StoredTransitions, None]:
    """Cut a rollout into its transitions and copies of them with goals that were achieved later.

    The goal of each copy is drawn from those achieved at or after its step, in the same episode and rollout
    (the strategy *future* of the paper, section 4.5).

    Args:
      rollout: [T, B] of a task with goals.
      rng: draws the goals.
      task: its rewards.
      size: numbers in a goal (G).
      copies: of each transition (k of the paper).
      gamma: discount of one step.

    Returns:
      The transitions, and None: their errors are not known.
    """
    real = ~rollout.resets
    length = len(rollout.dones)
    original, _ = n_step_transitions(rollout, rng, n=1, gamma=gamma)
    t, b = np.indices(rollout.dones.shape)
    # The last step of each step's episode: the first end at or after it.
    ends = np.where(rollout.dones, t, length - 1)
    last = np.minimum.accumulate(ends[::-1])[::-1]
    t, b, last = t[real], b[real], last[real]
    parts = [original]
    for _ in range(copies):
        future = rng.integers(t, last + 1)
        goals = rollout.obs[future + 1, b][:, -2 * size : -size]
        obs, next_obs = original.obs.copy(), original.next_obs.copy()
        obs[:, -size:] = next_obs[:, -size:] = goals
        rewards = task.reward(next_obs[:, -2 * size : -size], goals)
        parts.append(original._replace(obs=obs, next_obs=next_obs, rewards=rewards))
    return StoredTransitions(*map(np.concatenate, zip(*parts, strict=True))), None
