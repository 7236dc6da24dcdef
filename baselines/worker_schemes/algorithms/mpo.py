"""Maximum a posteriori policy optimization (https://arxiv.org/abs/1806.06920; M-step of 1812.02256)."""

import math

import torch

from baselines.worker_schemes.control import GaussianNetwork, values_of
from baselines.worker_schemes.replay import Transitions


def gaussian_log_prob(x: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Return the log-density [...] of independent normal components [..., size]."""
    each = -0.5 * ((x - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)
    return each.sum(dim=-1)


def mpo_loss(
    network: GaussianNetwork,
    batch: Transitions,
    progress: float,
    *,
    epsilon: float,
    epsilon_mean: float,
    epsilon_std: float,
) -> dict[str, torch.Tensor]:
    """Return the sum of MPO's losses; each has gradients in its own parameters only.

    E-step: actions of the target policy are weighted by the softmax of their values, divided by a temperature
    that keeps the weighted policy within `epsilon` of the target policy. M-step: the policy's mean and
    standard deviation, each with the other of the target policy, follow the weighted actions; multipliers
    keep their Kullback-Leibler divergences, component by component, within `epsilon_mean` and `epsilon_std`.
    The critic regresses to the mean value of the target policy's actions. All expectations are over the
    observations after the transitions, with one set of actions.

    Args:
      network: policy, critic, targets and multipliers.
      batch: N transitions, with noise [K, N, size] for K actions each.
      progress: not used.
      epsilon: largest divergence of the weighted policy.
      epsilon_mean: largest divergence of each component's mean.
      epsilon_std: largest divergence of each component's standard deviation.

    Returns:
      `loss`; further losses to record; and `errors` [N], the critic's absolute errors, for priorities.
    """
    count = len(batch.noise)
    actions = (batch.actions - network.middle) / network.scale
    with torch.no_grad():
        old_mean, old_std = network.distribution(network.target_policy, batch.next_obs)
        drawn = old_mean + old_std * batch.noise
        next_obs = batch.next_obs.flatten(1).expand(count, -1, -1)
        values = values_of(
            network.targets, next_obs.flatten(0, 1), drawn.clamp(-1, 1).flatten(0, 1)
        )
        values = values[0].view(count, -1)
        targets = batch.rewards + batch.discounts * values.mean(dim=0)
    errors = values_of(network.critics, batch.obs, actions)[0] - targets
    value_loss = (batch.weights * errors.square()).mean()

    temperature, alpha_mean, alpha_std = network.multipliers()
    scaled = values / temperature
    weights = scaled.softmax(dim=0).detach()
    bound = epsilon - math.log(count) + scaled.logsumexp(dim=0).mean()
    temperature_loss = temperature * bound

    mean, std = network.distribution(network.policy, batch.next_obs)
    log_probs = gaussian_log_prob(drawn, mean, old_std) + gaussian_log_prob(drawn, old_mean, std)
    fit = -(weights * log_probs).sum(dim=0).mean()
    kl_mean = (0.5 * ((mean - old_mean) / old_std).square()).mean(dim=0)
    kl_std = ((std / old_std).log() + 0.5 * (old_std / std).square() - 0.5).mean(dim=0)
    policy_loss = fit + (alpha_mean.detach() * kl_mean + alpha_std.detach() * kl_std).sum()
    alpha_loss = (alpha_mean * (epsilon_mean - kl_mean.detach())).sum()
    alpha_loss = alpha_loss + (alpha_std * (epsilon_std - kl_std.detach())).sum()
    return {
        "loss": value_loss + policy_loss + temperature_loss + alpha_loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "alpha_loss": temperature_loss + alpha_loss,
        "alpha": temperature.detach(),
        "entropy": (std.detach().log() + 0.5 * math.log(2 * math.pi * math.e)).sum(dim=-1).mean(),
        "errors": errors.detach().abs(),
    }
