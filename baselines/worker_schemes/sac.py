"""The parts of soft actor-critic, for continuous actions (https://arxiv.org/abs/1812.05905)."""

import copy
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from baselines.worker_schemes.agents import Decision, Rollout

SMALLEST_ERROR = 1e-6  # added to every error, so that each transition can be sampled again
LOG_STD = (-5.0, 2.0)  # smallest and largest logarithm of a standard deviation, as in CleanRL's


class ActionBounds(NamedTuple):
    """Smallest and largest value of each component of an action."""

    low: tuple[float, ...]
    high: tuple[float, ...]


def _mlp(sizes: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class SACNetwork(nn.Module):
    """Policy, two critics, their targets, and the temperature."""

    def __init__(
        self, obs_size: int, bounds: ActionBounds, hiddens: Sequence[int], initial_alpha: float
    ):
        """Initialize the networks; the targets start equal to the critics."""
        super().__init__()
        size = len(bounds.low)
        low, high = torch.tensor(bounds.low), torch.tensor(bounds.high)
        self.register_buffer("scale", (high - low) / 2)
        self.register_buffer("middle", (high + low) / 2)
        self.policy = _mlp((obs_size, *hiddens, 2 * size))
        self.critics = nn.ModuleList(_mlp((obs_size + size, *hiddens, 1)) for _ in range(2))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(float(np.log(initial_alpha))))

    def sample(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample actions from the policy by the reparameterization trick.

        Args:
          obs: [N, ...].
          noise: [N, size], standard normal.

        Returns:
          Actions [N, size] in [-1, 1], as the critics expect them, and their log-probabilities [N] in the
          environment's units.
        """
        mean, log_std = self.policy(obs.flatten(1)).chunk(2, dim=-1)
        smallest, largest = LOG_STD
        log_std = smallest + 0.5 * (largest - smallest) * (torch.tanh(log_std) + 1)
        before = mean + log_std.exp() * noise
        logprob = (-0.5 * noise.square() - log_std - 0.5 * np.log(2 * np.pi)).sum(dim=-1)
        # Jacobian of tanh and of the scale; this form of log(1 - tanh(x)^2) does not round to log(0)
        logprob = logprob - (2 * (np.log(2) - before - F.softplus(-2 * before))).sum(dim=-1)
        logprob = logprob - self.scale.log().sum()
        return torch.tanh(before), logprob

    def values(
        self, critics: nn.ModuleList, obs: torch.Tensor, actions: torch.Tensor
    ) -> torch.Tensor:
        """Return the two critics' Q values [2, N] of observations and actions in [-1, 1]."""
        inputs = torch.cat([obs.flatten(1), actions], dim=-1)
        return torch.stack([critic(inputs)[:, 0] for critic in critics])


def act(network: SACNetwork, obs: np.ndarray, rng: np.random.Generator, version: int) -> Decision:
    """Sample actions from the policy; uniformly before its first update (version 1)."""
    shape = (len(obs), len(network.scale))
    scale, middle = network.scale.numpy(), network.middle.numpy()
    if version == 1:
        actions = rng.uniform(-1, 1, shape)
    else:
        noise = torch.from_numpy(rng.standard_normal(shape, np.float32))
        actions = network.sample(torch.from_numpy(obs), noise)[0].numpy()
    actions = (middle + scale * actions).astype(np.float32)
    return Decision(actions, np.empty((len(obs), 0), np.float32), np.zeros(len(obs), np.float32))


class Transitions(NamedTuple):
    """A batch of N transitions."""

    obs: torch.Tensor
    actions: torch.Tensor  # in the environment's units
    rewards: torch.Tensor
    next_obs: torch.Tensor
    terminated: torch.Tensor  # bool; a truncated episode is bootstrapped
    noise: torch.Tensor  # [2, N, size], for the actions in observations and in next ones
    weights: torch.Tensor  # importance weights of the critics' losses; 1 for uniform sampling


class SumTree:
    """Nonnegative numbers, sampled in proportion to their values in logarithmic time.

    A complete binary tree in one array: the numbers are the leaves, and each inner node is the sum of its
    two children.
    """

    def __init__(self, size: int):
        """Start with zeros."""
        self._first = 1 << max(size - 1, 1).bit_length()  # index of the first leaf
        self._nodes = np.zeros(2 * self._first)

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at some indices."""
        return self._nodes[self._first + places]

    @property
    def total(self) -> float:
        """Return the sum of all."""
        return float(self._nodes[1])

    def set(self, places: np.ndarray, values: np.ndarray) -> None:
        """Set the numbers at some indices; the last value counts where an index is repeated."""
        nodes = self._first + places
        self._nodes[nodes] = values
        while nodes[0] > 1:
            nodes = np.unique(nodes // 2)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, sums: np.ndarray) -> np.ndarray:
        """Return, for each sum in [0, total), the first index whose cumulative sum exceeds it."""
        nodes = np.ones(len(sums), np.int64)
        sums = sums.copy()
        while nodes[0] < self._first:
            left = self._nodes[2 * nodes]
            right = sums >= left
            sums -= np.where(right, left, 0.0)
            nodes = 2 * nodes + right
        return nodes - self._first


class ReplayStorage:
    """A replay buffer; a fixed number of batches is sampled after each insertion.

    Sampling is uniform or prioritized (https://arxiv.org/abs/1511.05952, section 3.3): in proportion to a
    power of a transition's last error; new transitions get the largest priority so far.
    """

    def __init__(
        self,
        seed: int,
        *,
        capacity: int,
        first: int,
        batch_size: int,
        num_updates: int,
        priority_exponent: float = 0.0,
        importance_exponent: float = 0.4,
    ):
        """Create an empty buffer.

        Args:
          seed: of the sampling.
          capacity: largest number of transitions; the oldest are replaced.
          first: transitions that must be in the buffer before the first batch.
          batch_size: transitions in a batch.
          num_updates: batches after each insertion.
          priority_exponent: power of the errors (alpha in the paper); 0 samples uniformly.
          importance_exponent: power of the importance weights (beta); 1 corrects the bias fully.
        """
        self._rng = np.random.default_rng(seed)
        self._capacity, self._first = capacity, first
        self._batch_size, self._num_updates = batch_size, num_updates
        self._fields: list[np.ndarray] = []
        self._count = 0  # transitions ever inserted
        self._left = 0
        self._exponent, self._importance = priority_exponent, importance_exponent
        self._priorities = SumTree(capacity) if priority_exponent else None
        self._largest = 1.0  # largest priority so far
        self._drawn = np.empty(0, np.int64)  # indices of the last batch

    def put(self, rollouts: list[Rollout]) -> None:
        """Insert transitions, which replace the oldest ones."""
        for rollout in rollouts:
            # The observation after an episode's last step is its true final one: EnvPool resets on the
            # following step, which is left out.
            real = ~rollout.resets
            fields = (
                rollout.obs[:-1], rollout.actions, rollout.rewards, rollout.obs[1:], rollout.terminated
            )  # fmt: skip
            parts = [field[real] for field in fields]
            if not self._fields:
                self._fields = [np.empty((self._capacity, *p.shape[1:]), p.dtype) for p in parts]
            places = (self._count + np.arange(len(parts[0]))) % self._capacity
            for field, part in zip(self._fields, parts, strict=True):
                field[places] = part
            if self._priorities is not None and len(places):
                self._priorities.set(places, np.full(len(places), self._largest))
            self._count += len(parts[0])
        if self._count >= self._first:
            self._left = self._num_updates

    def next(self) -> Transitions | None:
        """Sample a batch, or return None after the last one."""
        if not self._left:
            return None
        self._left -= 1
        self._drawn, weights = self._draw()
        fields = [torch.from_numpy(field[self._drawn]) for field in self._fields]
        shape = (2, self._batch_size, self._fields[1].shape[-1])
        noise = torch.from_numpy(self._rng.standard_normal(shape, np.float32))
        return Transitions(*fields, noise, torch.from_numpy(weights))

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        """Return indices of transitions and their importance weights."""
        size = min(self._count, self._capacity)
        if self._priorities is None:
            places = self._rng.integers(size, size=self._batch_size)
            return places, np.ones(self._batch_size, np.float32)
        total = self._priorities.total
        places = self._priorities.find(self._rng.random(self._batch_size) * total)
        places = np.minimum(places, size - 1)  # rounding may lead past the last transition
        weights = (size * self._priorities[places] / total) ** -self._importance
        return places, (weights / weights.max()).astype(np.float32)

    def reprioritize(self, errors: torch.Tensor) -> None:
        """Set the priorities of the last batch from its errors [N]."""
        if self._priorities is None:
            return
        priorities = (errors.numpy().astype(np.float64) + SMALLEST_ERROR) ** self._exponent
        self._priorities.set(self._drawn, priorities)
        self._largest = max(self._largest, float(priorities.max()))


def sac_loss(
    network: SACNetwork, batch: Transitions, progress: float, *, gamma: float
) -> dict[str, torch.Tensor]:
    """Return the sum of SAC's losses; each has gradients in its own parameters only.

    The critics regress to the smaller target value plus entropy; the policy maximizes the smaller critic,
    whose parameters are held; the temperature steers the entropy to minus the number of action components.

    Returns:
      `loss`; further losses to record; and `errors` [N], the critics' mean absolute errors, for priorities.
    """
    alpha = network.log_alpha.exp().detach()
    actions = (batch.actions - network.middle) / network.scale
    with torch.no_grad():
        next_actions, next_logprob = network.sample(batch.next_obs, batch.noise[1])
        next_values = network.values(network.targets, batch.next_obs, next_actions).amin(dim=0)
        soft_value = next_values - alpha * next_logprob
        targets = batch.rewards + gamma * (~batch.terminated).float() * soft_value
    errors = network.values(network.critics, batch.obs, actions) - targets
    value_loss = (batch.weights * errors.square()).mean(dim=-1).sum()
    drawn, logprob = network.sample(batch.obs, batch.noise[0])
    network.critics.requires_grad_(False)  # the graph of their own loss is already built
    policy_loss = (
        alpha * logprob - network.values(network.critics, batch.obs, drawn).amin(dim=0)
    ).mean()
    network.critics.requires_grad_(True)
    short_of_target = logprob.detach() - actions.shape[-1]
    alpha_loss = -(network.log_alpha.exp() * short_of_target).mean()
    return {
        "loss": value_loss + policy_loss + alpha_loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "alpha_loss": alpha_loss,
        "alpha": alpha,
        "entropy": -logprob.mean(),
        "errors": errors.detach().abs().mean(dim=0),
    }


def make_optimizer(
    network: SACNetwork, *, policy_lr: float, critic_lr: float, alpha_lr: float
) -> torch.optim.Optimizer:
    """Return Adam with separate learning rates for policy, critics and temperature."""
    groups = [
        {"params": network.policy.parameters(), "lr": policy_lr},
        {"params": network.critics.parameters(), "lr": critic_lr},
        {"params": [network.log_alpha], "lr": alpha_lr},
    ]
    return torch.optim.Adam(groups)


def move_targets(network: SACNetwork, *, polyak: float) -> None:
    """Move the target critics towards the critics: targets = polyak * targets + (1 - polyak) * critics."""
    with torch.no_grad():
        for target, critic in zip(
            network.targets.parameters(), network.critics.parameters(), strict=True
        ):
            target.lerp_(critic, 1 - polyak)
