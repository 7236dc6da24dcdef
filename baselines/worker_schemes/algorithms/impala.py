"""IMPALA: an actor-critic with V-trace (https://arxiv.org/abs/1802.01561)."""

import torch
from torch import nn

from baselines.torch_losses import impala_loss
from baselines.worker_schemes.parts import Rollout


def vtrace_loss(
    network: nn.Module,
    batch: list[Rollout],
    progress: float,
    *,
    gamma: float,
    ent_coef: float,
    vf_coef: float,
    clip_rewards: bool,
) -> dict[str, torch.Tensor]:
    """Return IMPALA's loss of rollouts, as a mean over steps."""
    parts = []
    for rollout in batch:
        length, size = rollout.dones.shape
        logits, values = network(torch.from_numpy(rollout.obs).flatten(0, 1))
        rewards = torch.from_numpy(rollout.rewards)
        parts.append(
            impala_loss(
                logits.view(length + 1, size, -1)[:-1],
                values.view(length + 1, size),
                torch.from_numpy(rollout.logits),
                torch.from_numpy(rollout.actions),
                rewards.clamp(-1, 1) if clip_rewards else rewards,
                torch.from_numpy(rollout.dones),
                1.0 - torch.from_numpy(rollout.resets).float(),
                discounting=gamma,
                baseline_cost=vf_coef,
                entropy_cost=ent_coef,
            )
        )
    count = sum(part.count for part in parts).clamp(min=1)
    names = ("loss", "policy_loss", "value_loss", "entropy")
    return {name: sum(getattr(part, name) for part in parts) / count for name in names}
