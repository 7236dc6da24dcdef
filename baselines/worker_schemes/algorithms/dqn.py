"""DQN (https://doi.org/10.1038/nature14236), double (1509.06461) and distributional (C51, 1707.06887).

With dueling streams and noisy layers (q_networks.py), n-step returns and priorities (replay.py) this is
Rainbow (1710.02298).
"""

import torch
import torch.nn.functional as F

from baselines.worker_schemes.q_networks import DQNNetwork
from baselines.worker_schemes.replay import Transitions


def project(support: torch.Tensor, returns: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Project distributions of returns onto a support (Bellemare et al., 2017, equation 7).

    Args:
      support: evenly spaced atoms [K].
      returns: the distributions' atoms [N, K], clipped to the support.
      probs: their probabilities [N, K].

    Returns:
      Probabilities of the atoms of the support [N, K].
    """
    spacing = support[1] - support[0]
    returns = returns.clamp(support[0], support[-1])
    distances = (returns[:, None, :] - support[None, :, None]).abs() / spacing
    return ((1 - distances).clamp(min=0) * probs[:, None, :]).sum(dim=-1)


def dqn_loss(
    network: DQNNetwork, batch: Transitions, progress: float, *, double: bool
) -> dict[str, torch.Tensor]:
    """Return the Huber loss of action values, or the cross-entropy of distributions of returns.

    Args:
      network: online and target network.
      batch: N transitions.
      progress: not used.
      double: choose the next action by the online network; otherwise by the target network.

    Returns:
      `loss`, also as `value_loss`; and `errors` [N], for priorities: absolute temporal differences, or the
      Kullback-Leibler divergence of distributions.
    """
    online, target = network.online, network.target
    at = torch.arange(len(batch.actions))
    with torch.no_grad():
        online.resample()
        target.resample()
        next_outputs = target(batch.next_obs)
        chooser = online(batch.next_obs) if double else next_outputs
        next_actions = online.expected(chooser).argmax(dim=-1)
        next_outputs = next_outputs[at, next_actions]
    online.resample()
    outputs = online(batch.obs)[at, batch.actions]
    if len(online.support) == 1:
        targets = batch.rewards + batch.discounts * next_outputs[:, 0]
        errors = outputs[:, 0] - targets
        each = F.huber_loss(outputs[:, 0], targets, reduction="none")
        priorities = errors.detach().abs()
    else:
        returns = batch.rewards[:, None] + batch.discounts[:, None] * online.support
        targets = project(online.support, returns, next_outputs.softmax(dim=-1))
        each = -(targets * outputs.log_softmax(dim=-1)).sum(dim=-1)
        priorities = (each + torch.xlogy(targets, targets).sum(dim=-1)).detach().clamp(min=0)
    loss = (batch.weights * each).mean()
    return {"loss": loss, "value_loss": loss, "errors": priorities}
