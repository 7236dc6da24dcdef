"""Agents as a policy, a storage of rollouts, and a loss.

Each worker makes its own copies of the parts it needs, with the factories of an `Agent`. This module has
PPO with GAE and IMPALA with V-trace; SAC is in sac.py.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from baselines.torch_losses import clipped_surrogate, generalized_returns, impala_loss


class Rollout(NamedTuple):
    """T steps of B environments. Observation t leads to action t, and that to reward t."""

    obs: np.ndarray  # [T + 1, B, ...]
    actions: np.ndarray  # int64 [T, B], or float32 [T, B, size]
    rewards: np.ndarray  # float32 [T, B], unclipped
    terminated: np.ndarray  # bool [T, B], the episode terminated with that step
    dones: np.ndarray  # bool [T, B], it terminated or was truncated
    resets: np.ndarray  # bool [T, B], the step only reset the environment and is not learned from
    logits: np.ndarray  # float32 [T, B, num_actions], of the acting policy; [T, B, 0] if continuous
    values: np.ndarray  # float32 [T + 1, B], of the acting network; zeros if it has no value


class Decision(NamedTuple):
    """A network's actions for a batch of observations."""

    actions: np.ndarray  # int64 [B], or float32 [B, size]
    logits: np.ndarray  # float32 [B, num_actions], or [B, 0]
    values: np.ndarray  # float32 [B]


class Storage(Protocol):
    """Stores rollouts and yields batches for the loss."""

    def put(self, rollouts: list[Rollout]) -> None:
        """Insert collected rollouts."""

    def next(self) -> Any | None:
        """Return the next batch, or None if more rollouts must be collected first."""

    def reprioritize(self, errors: torch.Tensor) -> None:
        """Set the priorities of the last batch; called only if the loss returns `errors`."""


class Algorithm(NamedTuple):
    """A loss and its optimizer."""

    # (network, batch, progress) -> `loss`, which is minimized, further losses to record, and optionally
    # `errors` of the batch; progress, from 0 to 1, is how far the learning rate is annealed
    loss: Callable[[nn.Module, Any, float], dict[str, torch.Tensor]]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    after_step: Callable[[nn.Module], None]  # updates target networks


class Agent(NamedTuple):
    """An agent's parts and factories; can be sent to any worker."""

    make_network: Callable[[], nn.Module]
    # (network, observations [B, ...], generator, version of the network)
    act: Callable[[nn.Module, np.ndarray, np.random.Generator, int], Decision]
    make_storage: Callable[[int], Storage]  # takes the seed of its sampling
    algorithm: Algorithm


def no_target_networks(network: nn.Module) -> None:
    """Do nothing: the agent has no target networks."""


def act_by_logits(
    network: nn.Module, obs: np.ndarray, rng: np.random.Generator, version: int
) -> Decision:
    """Sample discrete actions from an actor-critic network (the Gumbel-max trick)."""
    logits, values = network(torch.from_numpy(obs))
    logits = logits.numpy()
    actions = (logits + rng.gumbel(size=logits.shape)).argmax(axis=-1)
    return Decision(actions, logits, values.numpy())


class Steps(NamedTuple):
    """A batch of N steps."""

    obs: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor  # under the acting policy
    returns: torch.Tensor
    advantages: torch.Tensor


class GAEStorage:
    """PPO's storage: epochs of shuffled minibatches, with advantages from GAE."""

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


def ppo_loss(
    network: nn.Module,
    batch: Steps,
    progress: float,
    *,
    clip_coef: float,
    ent_coef: float,
    vf_coef: float,
) -> dict[str, torch.Tensor]:
    """Return PPO's loss of a minibatch (https://arxiv.org/abs/1707.06347).

    The clipping coefficient is annealed to 0. Advantages are normalized over the minibatch.
    """
    logits, values = network(batch.obs)
    log_policy = torch.log_softmax(logits, dim=-1)
    logprobs = log_policy.gather(-1, batch.actions[:, None])[:, 0]
    advantages = batch.advantages - batch.advantages.mean()
    advantages = advantages / (advantages.std() + 1e-8)
    clip = clip_coef * (1 - progress)
    log_ratio = logprobs - batch.logprobs
    ratio = torch.exp(log_ratio)
    policy_loss = -clipped_surrogate(ratio, advantages, clip).mean()
    value_loss = 0.5 * (values - batch.returns).square().mean()
    entropy = -(log_policy.exp() * log_policy).sum(dim=-1).mean()
    return {
        "loss": policy_loss + vf_coef * value_loss - ent_coef * entropy,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": (ratio - 1 - log_ratio).mean(),
    }


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


def vtrace_loss(
    network: nn.Module,
    batch: list[Rollout],
    progress: float,
    *,
    gamma: float,
    ent_coef: float,
    vf_coef: float,
    clip_rewards: bool,
) -> dict[str, torch.Tensor]:
    """Return IMPALA's loss of rollouts (https://arxiv.org/abs/1802.01561), as a mean over steps."""
    parts = []
    for rollout in batch:
        length, size = rollout.dones.shape
        logits, values = network(torch.from_numpy(rollout.obs).flatten(0, 1))
        rewards = torch.from_numpy(rollout.rewards)
        parts.append(
            impala_loss(
                logits.view(length + 1, size, -1)[:-1],
                values.view(length + 1, size),
                torch.from_numpy(rollout.logits),
                torch.from_numpy(rollout.actions),
                rewards.clamp(-1, 1) if clip_rewards else rewards,
                torch.from_numpy(rollout.dones),
                1.0 - torch.from_numpy(rollout.resets).float(),
                discounting=gamma,
                baseline_cost=vf_coef,
                entropy_cost=ent_coef,
            )
        )
    count = sum(part.count for part in parts).clamp(min=1)
    names = ("loss", "policy_loss", "value_loss", "entropy")
    return {name: sum(getattr(part, name) for part in parts) / count for name in names}


def make_adam(network: nn.Module, *, learning_rate: float, eps: float) -> torch.optim.Optimizer:
    """Return Adam over all parameters."""
    return torch.optim.Adam(network.parameters(), lr=learning_rate, eps=eps)


def make_rmsprop(network: nn.Module, *, learning_rate: float, eps: float) -> torch.optim.Optimizer:
    """Return RMSProp with a decay of 0.99, as IMPALA has it, over all parameters."""
    return torch.optim.RMSprop(network.parameters(), lr=learning_rate, eps=eps, alpha=0.99)
