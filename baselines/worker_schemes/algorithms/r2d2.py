"""R2D2, recurrent DQN with distributed replay (https://openreview.net/forum?id=r1lyTjAqYX)."""

import torch

from baselines.worker_schemes.q_networks import DQNNetwork
from baselines.worker_schemes.sequences import Sequences, mix_errors, rescale, unscale


def r2d2_loss(
    network: DQNNetwork, batch: Sequences, progress: float, *, burn_in: int
) -> dict[str, torch.Tensor]:
    """Return the squared errors of rescaled action values, with double Q-learning.

    Online and target network first run through the burn-in from the actor's stored states, without gradients,
    and then through the steps that are learned from.

    Args:
      network: online and target network, recurrent.
      batch: N sequences.
      progress: not used.
      burn_in: first steps of a sequence, which are not learned from.

    Returns:
      `loss`, also as `value_loss`; and `errors` [N], for priorities.
    """
    online, target = network.online, network.target
    obs, actions, rewards, discounts, ends, resets = (
        field.swapaxes(0, 1)
        for field in batch[:6]  # [L, N]
    )
    at = torch.arange(obs.shape[1])
    resets = torch.cat([resets, torch.zeros_like(resets[:1])])  # none after the last observation
    with torch.no_grad():
        states, target_states = (
            one.unroll(obs[:burn_in], batch.states, resets[:burn_in])[1]
            if burn_in
            else batch.states
            for one in (online, target)
        )
        next_values, _ = target.unroll(obs[burn_in:], target_states, resets[burn_in:])
    values, _ = online.unroll(obs[burn_in:], states, resets[burn_in:])
    next_values = next_values.gather(-1, values.detach().argmax(dim=-1, keepdim=True))[..., 0]
    actions, rewards, discounts, ends = (
        field[burn_in:] for field in (actions, rewards, discounts, ends)
    )
    targets = rescale(rewards + discounts * unscale(next_values[ends - burn_in, at]))
    real = ~resets[burn_in:-1]
    errors = (values[:-1].gather(-1, actions[..., None])[..., 0] - targets) * real
    each = 0.5 * errors.square().sum(dim=0) / real.sum(dim=0).clamp(min=1)
    loss = (batch.weights * each).mean()
    return {"loss": loss, "value_loss": loss, "errors": mix_errors(errors.detach().abs(), real)}
