"""Storages of rollouts that are learned from once, or for a few epochs."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from baselines.torch_losses import generalized_returns
from baselines.worker_schemes.parts import Rollout


class Steps(NamedTuple):
    """A batch of N steps."""

    obs: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor  # under the acting policy
    returns: torch.Tensor
    advantages: torch.Tensor


class GAEStorage:
    """Epochs of shuffled minibatches, with advantages from GAE; with a lambda of 1 from plain returns."""

    def __init__(
        self,
        seed: int,
        *,
        gamma: float,
        gae_lambda: float,
        num_epochs: int,
        num_minibatches: int,
        clip_rewards: bool,
    ):
        """Create an empty storage."""
        self._rng = np.random.default_rng(seed)
        self._gamma, self._lambda = gamma, gae_lambda
        self._num_epochs, self._num_minibatches = num_epochs, num_minibatches
        self._clip_rewards = clip_rewards
        self._batches: Iterator[Steps] = iter(())

    def put(self, rollouts: list[Rollout]) -> None:
        """Replace the stored rollouts; their lengths may differ."""
        parts = [self._flatten(rollout) for rollout in rollouts]
        self._batches = self._cut(Steps(*(torch.cat(field) for field in zip(*parts, strict=True))))

    def _flatten(self, rollout: Rollout) -> Steps:
        rewards, values = torch.from_numpy(rollout.rewards), torch.from_numpy(rollout.values)
        if self._clip_rewards:
            rewards = rewards.clamp(-1, 1)
        dones = torch.from_numpy(rollout.dones)
        returns = generalized_returns(rewards, dones, values, self._gamma, self._lambda)
        log_policy = torch.log_softmax(torch.from_numpy(rollout.logits), dim=-1)
        actions = torch.from_numpy(rollout.actions)
        logprobs = log_policy.gather(-1, actions[..., None])[..., 0]
        steps = Steps(
            torch.from_numpy(rollout.obs[:-1]), actions, logprobs, returns, returns - values[:-1]
        )
        real = ~torch.from_numpy(rollout.resets)
        return Steps(*(field[real] for field in steps))

    def _cut(self, steps: Steps) -> Iterator[Steps]:
        for _ in range(self._num_epochs):
            order = torch.from_numpy(self._rng.permutation(len(steps.actions)))
            for indices in order.tensor_split(self._num_minibatches):
                yield Steps(*(field[indices] for field in steps))

    def next(self) -> Steps | None:
        """Return the next minibatch of the rollouts, or None after the last epoch."""
        return next(self._batches, None)


class VTraceStorage:
    """IMPALA's storage: rollouts inserted together form one batch, which is used once."""

    def __init__(self, seed: int):
        """Create an empty storage; it samples nothing, so the seed is not used."""
        self._rollouts: list[Rollout] | None = None

    def put(self, rollouts: list[Rollout]) -> None:
        """Insert rollouts; their lengths may differ."""
        self._rollouts = rollouts

    def next(self) -> list[Rollout] | None:
        """Return the rollouts once, then None."""
        rollouts, self._rollouts = self._rollouts, None
        return rollouts
