"""Soft actor-critic (https://arxiv.org/abs/1812.05905)."""

import torch

from baselines.worker_schemes.control import SACNetwork, values_of
from baselines.worker_schemes.replay import Transitions


def sac_loss(network: SACNetwork, batch: Transitions, progress: float) -> dict[str, torch.Tensor]:
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
        next_values = values_of(network.targets, batch.next_obs, next_actions).amin(dim=0)
        soft_value = next_values - alpha * next_logprob
        targets = batch.rewards + batch.discounts * soft_value
    errors = values_of(network.critics, batch.obs, actions) - targets
    value_loss = (batch.weights * errors.square()).mean(dim=-1).sum()
    drawn, logprob = network.sample(batch.obs, batch.noise[0])
    network.critics.requires_grad_(False)  # the graph of their own loss is already built
    policy_loss = (
        alpha * logprob - values_of(network.critics, batch.obs, drawn).amin(dim=0)
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
