"""Proximal policy optimization (https://arxiv.org/abs/1707.06347)."""

import torch
from torch import nn

from baselines.torch_losses import clipped_surrogate, logprobs_and_entropies
from baselines.worker_schemes.on_policy import Steps


def ppo_loss(
    network: nn.Module,
    batch: Steps,
    progress: float,
    *,
    clip_coef: float,
    ent_coef: float,
    vf_coef: float,
) -> dict[str, torch.Tensor]:
    """Return PPO's loss of a minibatch.

    The clipping coefficient is annealed to 0. Advantages are normalized over the minibatch.
    """
    logits, values = network(batch.obs)
    logprobs, entropies = logprobs_and_entropies(logits, batch.actions)
    advantages = batch.advantages - batch.advantages.mean()
    advantages = advantages / (advantages.std() + 1e-8)
    clip = clip_coef * (1 - progress)
    log_ratio = logprobs - batch.logprobs
    ratio = torch.exp(log_ratio)
    policy_loss = -clipped_surrogate(ratio, advantages, clip).mean()
    value_loss = 0.5 * (values - batch.returns).square().mean()
    entropy = entropies.mean()
    return {
        "loss": policy_loss + vf_coef * value_loss - ent_coef * entropy,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": (ratio - 1 - log_ratio).mean(),
    }
