"""An ensemble of learned models of an environment, and the planner that uses it (MPC with CEM, PETS)."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from baselines.worker_schemes.control import ActionBounds, register_bounds

FIRST_STD = 0.5  # of the planner's actions, in units of half their range
SMOOTHING = (
    0.1  # share of its old distribution that the planner keeps (alpha of PETS' implementation)
)


class DynamicsEnsemble(nn.Module):
    """Models that predict the change of an observation and the reward, with their own noise."""

    def __init__(self, obs_size: int, bounds: ActionBounds, hiddens: Sequence[int], members: int):
        """Initialize E members, each as a dense network by itself would be."""
        super().__init__()
        register_bounds(self, bounds)
        sizes = (obs_size + len(bounds.low), *hiddens, obs_size + 1)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for inputs, outputs in itertools.pairwise(sizes):
            bound = inputs**-0.5
            self.weights.append(torch.empty(members, inputs, outputs).uniform_(-bound, bound))
            self.biases.append(torch.empty(members, 1, outputs).uniform_(-bound, bound))
        # of the predictions' standard deviations, the same everywhere
        self.log_stds = nn.Parameter(torch.zeros(members, 1, obs_size + 1))

    @property
    def members(self) -> int:
        """Return the number of members (E)."""
        return len(self.log_stds)

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Predict changes and rewards.

        Args:
          obs: [N, D] for all members, or [E, N, D].
          actions: [N, size] or [E, N, size], in [-1, 1].

        Returns:
          [E, N, D + 1]; the last component is the reward.
        """
        x = torch.cat([obs, actions], dim=-1)
        x = x if x.ndim == 3 else x.expand(self.members, -1, -1)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, F.silu(x) if i else x, weight)
        return x


def imagined_returns(
    network: DynamicsEnsemble, obs: torch.Tensor, plans: torch.Tensor
) -> torch.Tensor:
    """Return the sums of rewards [N] that the members predict for plans, averaged over members.

    Args:
      network: each member runs through a whole plan by itself.
      obs: [N, D].
      plans: [N, H, size], in [-1, 1].
    """
    states = obs.expand(network.members, -1, -1)
    total = torch.zeros(states.shape[:2])
    for actions in plans.unbind(dim=1):
        predicted = network(states, actions.expand(network.members, -1, -1))
        states = states + predicted[..., :-1]
        total = total + predicted[..., -1]
    return total.mean(dim=0)


def plan_by_cem(
    network: DynamicsEnsemble,
    obs: torch.Tensor,
    mean: torch.Tensor,
    rng: np.random.Generator,
    *,
    plans: int,
    elites: int,
    iterations: int,
) -> torch.Tensor:
    """Return plans [B, H, size] by the cross-entropy method.

    Args:
      network: of the environment.
      obs: [B, D].
      mean: [B, H, size], of the first plans.
      rng: for the plans.
      plans: number of plans that are sampled in each iteration.
      elites: number of plans with the highest returns. The next iteration samples with their mean and
        standard deviation, smoothed by `SMOOTHING`.
      iterations: of sampling and selection.
    """
    std = torch.full_like(mean, FIRST_STD)
    batch, horizon, size = mean.shape
    for _ in range(iterations):
        noise = torch.from_numpy(rng.standard_normal((batch, plans, horizon, size), np.float32))
        drawn = (mean[:, None] + std[:, None] * noise).clamp(-1, 1)
        returns = imagined_returns(
            network, obs.repeat_interleave(plans, dim=0), drawn.flatten(0, 1)
        ).view(batch, plans)
        best = returns.topk(elites, dim=1).indices
        chosen = drawn[torch.arange(batch)[:, None], best]
        mean = SMOOTHING * mean + (1 - SMOOTHING) * chosen.mean(dim=1)
        std = SMOOTHING * std + (1 - SMOOTHING) * chosen.std(dim=1, correction=0)
    return mean
