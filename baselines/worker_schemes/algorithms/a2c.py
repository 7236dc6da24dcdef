"""Advantage actor-critic, the synchronous variant of A3C (https://arxiv.org/abs/1602.01783)."""

import torch
from torch import nn

from baselines.torch_losses import logprobs_and_entropies
from baselines.worker_schemes.on_policy import Steps


def a2c_loss(
    network: nn.Module, batch: Steps, progress: float, *, ent_coef: float, vf_coef: float
) -> dict[str, torch.Tensor]:
    """Return the policy gradient loss of a batch, with its value loss and entropy bonus."""
    logits, values = network(batch.obs)
    logprobs, entropies = logprobs_and_entropies(logits, batch.actions)
    policy_loss = -(logprobs * batch.advantages).mean()
    value_loss = 0.5 * (values - batch.returns).square().mean()
    entropy = entropies.mean()
    return {
        "loss": policy_loss + vf_coef * value_loss - ent_coef * entropy,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
    }
