"""Rollouts of µRTS, and what is recorded of them."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from baselines import microrts
from baselines.microrts import MicroRTS, Task
from cleanba.audit.segments import Replayed
from cleanba.environments import Episode, EpisodeStatistics
from cleanba.record.actions import GroupDigest, combine_digests

# (parameters, observations uint8 [B, 5, height, width], step of every environment) to actions int32 [B, 8],
# log-probabilities of their components [B, 8], and values [B, ...]
Act = Callable[[Any, np.ndarray, np.int32], tuple[Any, Any, Any]]


class Rollout(NamedTuple):
    """T steps of B environments; `dones[t]` is true where `actions[t]` ended an episode."""

    obs: Any  # uint8 [T + 1, B, 5, height, width]
    actions: Any  # int32 [T, B, 8]
    logprobs: Any  # of each component [T, B, 8]
    values: Any  # [T, B, ...]
    rewards: Any  # float32 [T, B, R], of each reward function
    dones: Any  # bool [T, B]
    invalid: Any  # int32 [T, B, 3], see `microrts.invalid_counts`


class Collected(NamedTuple):
    """A rollout, and what is recorded of it."""

    rollout: Rollout
    replayed: Replayed  # its actions as one number each
    invalid: list[dict[str, int]]  # of each episode that ended, by field of the record
    times: dict[str, float]  # seconds by activity


class Actor:
    """The environments, and the policy that acts in them."""

    def __init__(self, task: Task, num_envs: int, num_steps: int, act: Act, scored: np.ndarray):
        """Reset the environments.

        Args:
          task: that is played.
          num_envs: environments.
          num_steps: steps of each in a rollout.
          act: the policy.
          scored: weights [R] of the reward functions in an episode's return.
        """
        self._task, self._num_envs, self._num_steps = task, num_envs, num_steps
        self._act, self._scored = act, np.asarray(scored, np.float32)
        self._games = MicroRTS(task, num_envs)
        self._statistics = EpisodeStatistics(num_envs, same_step=True)
        self._invalid = np.zeros((num_envs, 3), np.int64)  # of the episodes that go on
        self._digest = GroupDigest()
        self._obs = self._games.reset()
        self._step = 0  # of every environment

    def collect(self, params: Any) -> Collected:
        """Collect a rollout with one policy."""
        shape = (self._num_steps, self._num_envs)
        obs = np.empty((shape[0] + 1, *self._obs.shape), np.uint8)
        steps = []
        inference_time = env_time = 0.0
        for t in range(shape[0]):
            obs[t] = self._obs
            before = time.perf_counter()
            actions, logprobs, values = map(
                np.asarray, self._act(params, self._obs, np.int32(self._step + t))
            )
            between = time.perf_counter()
            self._obs, rewards, dones, invalid = self._games.step(actions)
            steps.append((actions, logprobs, values, rewards, dones, invalid))
            inference_time += between - before
            env_time += time.perf_counter() - between
        obs[-1] = self._obs
        rollout = Rollout(obs, *(np.stack(field) for field in zip(*steps, strict=True)))
        replayed, counts = self._finish(rollout.actions, rollout)
        times = {"inference_time": inference_time, "env_time": env_time}
        return Collected(rollout, replayed, counts, times)

    def replay(self, indices: np.ndarray) -> Replayed:
        """Step the environments through the recorded actions [T, B] of a rollout."""
        components = np.unravel_index(indices, self._task.components)
        actions = np.stack(components, axis=-1).astype(np.int32)
        steps = []
        for action in actions:
            steps.append(self._games.step(action))
            self._obs = steps[-1].obs
        played = microrts.Step(*(np.stack(field) for field in zip(*steps, strict=True)))
        return self._finish(actions, played)[0]

    def close(self) -> None:
        """Free the environments."""
        self._games.close()

    def _finish(
        self, actions: np.ndarray, played: Rollout | microrts.Step
    ) -> tuple[Replayed, list[dict[str, int]]]:
        """Return what is recorded of a rollout, and the invalid actions of its episodes."""
        self._step += len(actions)
        components = tuple(np.moveaxis(actions, -1, 0))
        indices = np.ravel_multi_index(components, self._task.components).astype(np.int32)
        rewards = played.rewards @ self._scored
        digest = combine_digests([self._digest.update(indices, rewards, played.dones)])
        episodes = self._statistics.count(rewards, played.dones)
        return Replayed(indices, digest, episodes), self._count_invalid(played.invalid, episodes)

    def _count_invalid(
        self, invalid: np.ndarray, episodes: Sequence[Episode]
    ) -> list[dict[str, int]]:
        before = np.zeros(self._num_envs, np.int64)
        result = []
        for episode in episodes:
            i = episode.index
            self._invalid[i] += invalid[before[i] : episode.t + 1, i].sum(axis=0)
            counts = zip(microrts.INVALID, self._invalid[i].tolist(), strict=True)
            result.append({f"invalid_{kind}": count for kind, count in counts})
            self._invalid[i], before[i] = 0, episode.t + 1
        for i, first in enumerate(before):
            self._invalid[i] += invalid[first:, i].sum(axis=0)
        return result
