"""Networks for continuous actions: a policy, critics, and targets. Actions are in [-1, 1] inside them."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

LOG_STD = (-5.0, 2.0)  # smallest and largest logarithm of a standard deviation, as in CleanRL's SAC
# Of MPO, as in Acme: standard deviations; and multipliers, the first ones before softplus.
FIRST_STD, SMALLEST_STD = 0.7, 1e-6
FIRST_TEMPERATURE, FIRST_ALPHA_MEAN, FIRST_ALPHA_STD, SMALLEST_MULTIPLIER = 10.0, 10.0, 1000.0, 1e-8


class ActionBounds(NamedTuple):
    """Smallest and largest value of each component of an action."""

    low: tuple[float, ...]
    high: tuple[float, ...]


def register_bounds(network: nn.Module, bounds: ActionBounds) -> None:
    """Give a network the `scale` and `middle` [size] that map actions from [-1, 1] to their bounds."""
    low, high = torch.tensor(bounds.low), torch.tensor(bounds.high)
    network.register_buffer("scale", (high - low) / 2)
    network.register_buffer("middle", (high + low) / 2)


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Return dense layers of some sizes, with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def values_of(critics: nn.ModuleList, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Return the critics' Q values [C, N] of observations and actions in [-1, 1]."""
    inputs = torch.cat([obs.flatten(1), actions], dim=-1)
    return torch.stack([critic(inputs)[:, 0] for critic in critics])


class SACNetwork(nn.Module):
    """Policy, two critics, their targets, and the temperature."""

    def __init__(
        self, obs_size: int, bounds: ActionBounds, hiddens: Sequence[int], initial_alpha: float
    ):
        """Initialize the networks; the targets start equal to the critics."""
        super().__init__()
        size = len(bounds.low)
        register_bounds(self, bounds)
        self.policy = mlp((obs_size, *hiddens, 2 * size))
        self.critics = nn.ModuleList(mlp((obs_size + size, *hiddens, 1)) for _ in range(2))
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

    def duals(self) -> list[nn.Parameter]:
        """Return the parameters of constraints: the temperature's."""
        return [self.log_alpha]

    def moving(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield each target network and the network that it follows."""
        yield self.targets, self.critics


class DeterministicNetwork(nn.Module):
    """A deterministic policy and one critic (DDPG) or two (TD3), and the targets of all."""

    def __init__(
        self, obs_size: int, bounds: ActionBounds, hiddens: Sequence[int], num_critics: int
    ):
        """Initialize the networks; the targets start equal to what they follow."""
        super().__init__()
        size = len(bounds.low)
        register_bounds(self, bounds)
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))
        self.policy = mlp((obs_size, *hiddens, size))
        self.critics = nn.ModuleList(
            mlp((obs_size + size, *hiddens, 1)) for _ in range(num_critics)
        )
        self.target_policy = copy.deepcopy(self.policy).requires_grad_(False)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)

    def act(self, policy: nn.Module, obs: torch.Tensor) -> torch.Tensor:
        """Return the actions [N, size] of a policy in [-1, 1]."""
        return torch.tanh(policy(obs.flatten(1)))

    def moving(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield each target network and the network that it follows."""
        yield self.target_policy, self.policy
        yield self.targets, self.critics


class GaussianNetwork(nn.Module):
    """MPO's policy, critic, their targets, and the multipliers of its constraints.

    The policy is normal, with a mean in [-1, 1] and independent components; its actions are clipped.
    """

    def __init__(self, obs_size: int, bounds: ActionBounds, hiddens: Sequence[int]):
        """Initialize the networks; the targets start equal to what they follow."""
        super().__init__()
        size = len(bounds.low)
        register_bounds(self, bounds)
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))
        self.policy = mlp((obs_size, *hiddens, 2 * size))
        self.critics = nn.ModuleList([mlp((obs_size + size, *hiddens, 1))])
        self.target_policy = copy.deepcopy(self.policy).requires_grad_(False)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = nn.Parameter(torch.tensor(FIRST_TEMPERATURE))
        self.log_alpha_mean = nn.Parameter(torch.full((size,), FIRST_ALPHA_MEAN))
        self.log_alpha_std = nn.Parameter(torch.full((size,), FIRST_ALPHA_STD))

    def distribution(
        self, policy: nn.Module, obs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation [N, size] of a policy's actions."""
        mean, std = policy(obs.flatten(1)).chunk(2, dim=-1)
        return torch.tanh(mean), FIRST_STD / np.log(2) * F.softplus(std) + SMALLEST_STD

    def sample(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return actions [N, size] in [-1, 1], for noise [N, size]; clipping leaves them no density."""
        mean, std = self.distribution(self.policy, obs)
        return (mean + std * noise).clamp(-1, 1), None

    def multipliers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the temperature [], and the multipliers of mean and standard deviation [size]."""
        return tuple(F.softplus(dual) + SMALLEST_MULTIPLIER for dual in self.duals())

    def duals(self) -> list[nn.Parameter]:
        """Return the parameters of constraints."""
        return [self.log_temperature, self.log_alpha_mean, self.log_alpha_std]

    def moving(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield each target network and the network that it follows."""
        yield self.target_policy, self.policy
        yield self.targets, self.critics
