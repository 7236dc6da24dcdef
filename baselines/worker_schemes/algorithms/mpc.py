"""The loss of a learned model for planning: an ensemble with bootstrapped data (https://arxiv.org/abs/1805.12114)."""

import torch

from baselines.worker_schemes.dynamics import DynamicsEnsemble
from baselines.worker_schemes.replay import Transitions


def model_loss(
    network: DynamicsEnsemble, batch: Transitions, progress: float
) -> dict[str, torch.Tensor]:
    """Return the negative log-likelihood of changes of observations and of rewards, without a constant.

    Each member learns from a random half of the batch, so that members differ where data is scarce.

    Args:
      network: E members.
      batch: N transitions of one step, with noise [E, N, size]; its sign chooses the halves.
      progress: not used.

    Returns:
      `loss`, and the mean squared error of the predictions as `value_loss`.
    """
    obs = batch.obs.flatten(1)
    actions = (batch.actions - network.middle) / network.scale
    changes = batch.next_obs.flatten(1) - obs
    errors = network(obs, actions) - torch.cat([changes, batch.rewards[:, None]], dim=-1)
    each = 0.5 * (errors * (-network.log_stds).exp()).square() + network.log_stds
    used = (batch.noise[..., :1] > 0).float()
    loss = ((used * each).sum(dim=(1, 2)) / used.sum(dim=(1, 2)).clamp(min=1)).mean()
    return {"loss": loss, "value_loss": errors.detach().square().mean()}
