"""Advantage actor-critic, the synchronous variant of A3C (https://arxiv.org/abs/1602.01783)."""

import torch
from torch import nn

from baselines.worker_schemes.on_policy import Steps


def a2c_loss(
    network: nn.Module, batch: Steps, progress: float, *, ent_coef: float, vf_coef: float
) -> dict[str, torch.Tensor]:
    """Return the policy gradient loss of a batch, with its value loss and entropy bonus."""
    logits, values = network(batch.obs)
    log_policy = torch.log_softmax(logits, dim=-1)
    logprobs = log_policy.gather(-1, batch.actions[:, None])[:, 0]
    policy_loss = -(logprobs * batch.advantages).mean()
    value_loss = 0.5 * (values - batch.returns).square().mean()
    entropy = -(log_policy.exp() * log_policy).sum(dim=-1).mean()
    return {
        "loss": policy_loss + vf_coef * value_loss - ent_coef * entropy,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
    }
