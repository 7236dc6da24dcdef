"""Deterministic policy gradients: DDPG (https://arxiv.org/abs/1509.02971) and TD3 (1802.09477).

TD3 is DDPG with two critics, noise in the target actions, and a policy that is updated less often; with one
critic, no noise and a policy that is updated every time it is DDPG.
"""

import torch

from baselines.worker_schemes.control import DeterministicNetwork, values_of
from baselines.worker_schemes.replay import Transitions


def td3_loss(
    network: DeterministicNetwork,
    batch: Transitions,
    progress: float,
    *,
    target_noise: float,
    noise_clip: float,
    policy_every: int,
) -> dict[str, torch.Tensor]:
    """Return the sum of the critics' and the policy's losses; each has gradients in its own parameters only.

    Args:
      network: policy, critics and targets.
      batch: N transitions.
      progress: not used.
      target_noise: standard deviation of the noise in target actions, in units of half their range.
      noise_clip: largest noise in target actions, in the same unit.
      policy_every: updates of the critics for each of the policy and of the targets. In the others the loss
        does not depend on the policy.

    Returns:
      `loss`; further losses to record; and `errors` [N], the critics' mean absolute errors, for priorities.
    """
    actions = (batch.actions - network.middle) / network.scale
    with torch.no_grad():
        noise = (target_noise * batch.noise[1]).clamp(-noise_clip, noise_clip)
        next_actions = network.act(network.target_policy, batch.next_obs) + noise
        next_values = values_of(network.targets, batch.next_obs, next_actions.clamp(-1, 1))
        targets = batch.rewards + batch.discounts * next_values.amin(dim=0)
    errors = values_of(network.critics, batch.obs, actions) - targets
    value_loss = (batch.weights * errors.square()).mean(dim=-1).sum()
    losses = {
        "loss": value_loss,
        "value_loss": value_loss,
        "errors": errors.detach().abs().mean(dim=0),
    }
    if (network.num_updates + 1) % policy_every == 0:
        first = network.critics[:1].requires_grad_(False)  # its own loss's graph is already built
        policy_loss = -values_of(first, batch.obs, network.act(network.policy, batch.obs)).mean()
        first.requires_grad_(True)
        losses |= {"loss": value_loss + policy_loss, "policy_loss": policy_loss}
    return losses
