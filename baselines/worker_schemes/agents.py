"""Agents made of parts: what acts, what stores rollouts, and what is minimised.

Any worker makes its own copies of the parts that it needs, by the factories of an `Agent`. Here are the
parts of PPO with GAE and of IMPALA with V-trace; those of SAC are in sac.py.
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
    terminated: np.ndarray  # bool [T, B], the episode came to its end with that step
    dones: np.ndarray  # bool [T, B], it did, or was cut there
    resets: (
        np.ndarray
    )  # bool [T, B], the step only reset the environment: there is nothing to learn
    logits: np.ndarray  # float32 [T, B, num_actions], of the policy that acted; [T, B, 0] without
    values: np.ndarray  # float32 [T + 1, B], by the network that acted; zeros without


class Decision(NamedTuple):
    """What a network makes of observations."""

    actions: np.ndarray  # int64 [B], or float32 [B, size]
    logits: np.ndarray  # float32 [B, num_actions], or [B, 0]
    values: np.ndarray  # float32 [B]


class Storage(Protocol):
    """Keeps rollouts, and cuts batches from them."""

    def put(self, rollouts: list[Rollout]) -> None:
        """Take in what was collected."""

    def next(self) -> Any | None:
        """Return the next batch, or None where something has to be collected first."""

    def reprioritize(self, errors: torch.Tensor) -> None:
        """Take in the errors of the last batch; asked for only where the loss returns `errors`."""


class Algorithm(NamedTuple):
    """What is minimised, and how."""

    # (network, batch, progress) to `loss`, which is minimised, others to record, and perhaps `errors` of the
    # batch; progress is the share of the run, from 0 to 1, by which the learning rate has fallen
    loss: Callable[[nn.Module, Any, float], dict[str, torch.Tensor]]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    after_step: Callable[[nn.Module], None]  # moves what follows the parameters without a gradient


class Agent(NamedTuple):
    """An agent's parts, or what makes them, which can be sent to any worker."""

    make_network: Callable[[], nn.Module]
    # (network, observations [B, ...], what to draw with, version of the network)
    act: Callable[[nn.Module, np.ndarray, np.random.Generator, int], Decision]
    make_storage: Callable[[int], Storage]  # from the seed of what is drawn in it
    algorithm: Algorithm


def nothing_follows(network: nn.Module) -> None:
    """Leave a network as it is."""


def act_by_logits(
    network: nn.Module, obs: np.ndarray, rng: np.random.Generator, version: int
) -> Decision:
    """Draw discrete actions from the policy of an actor-critic network (the Gumbel-max trick)."""
    logits, values = network(torch.from_numpy(obs))
    logits = logits.numpy()
    actions = (logits + rng.gumbel(size=logits.shape)).argmax(axis=-1)
    return Decision(actions, logits, values.numpy())


class Steps(NamedTuple):
    """Steps of rollouts, in any order [N]."""

    obs: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor  # under the policy that acted
    returns: torch.Tensor
    advantages: torch.Tensor


class GAEStorage:
    """Rollouts of PPO: epochs of minibatches in random order, with GAE's advantages."""

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
        """Begin empty."""
        self._rng = np.random.default_rng(seed)
        self._gamma, self._lambda = gamma, gae_lambda
        self._num_epochs, self._num_minibatches = num_epochs, num_minibatches
        self._clip_rewards = clip_rewards
        self._batches: Iterator[Steps] = iter(())

    def put(self, rollouts: list[Rollout]) -> None:
        """Take the place of the rollouts before; they may be of different lengths."""
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
    """Return PPO's loss of a minibatch (https://arxiv.org/abs/1707.06347); the clipping falls to 0.

    Advantages are normalised over the minibatch.
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
    """Rollouts of IMPALA: what came together is one batch, which is learned from once."""

    def __init__(self, seed: int):
        """Begin empty; nothing is drawn."""
        self._rollouts: list[Rollout] | None = None

    def put(self, rollouts: list[Rollout]) -> None:
        """Take in rollouts; they may be of different lengths."""
        self._rollouts = rollouts

    def next(self) -> list[Rollout] | None:
        """Return them, once."""
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
    """Return IMPALA's loss of some rollouts (https://arxiv.org/abs/1802.01561), as a mean over steps."""
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
