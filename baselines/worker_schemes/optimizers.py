"""Optimizers of the agents, as factories that take a network."""

import torch
from torch import nn


def make_adam(network: nn.Module, *, learning_rate: float, eps: float) -> torch.optim.Optimizer:
    """Return Adam over all parameters that are learned."""
    learned = [p for p in network.parameters() if p.requires_grad]
    return torch.optim.Adam(learned, lr=learning_rate, eps=eps)


def make_rmsprop(network: nn.Module, *, learning_rate: float, eps: float) -> torch.optim.Optimizer:
    """Return RMSProp with a decay of 0.99, as A3C and IMPALA have it, over all parameters."""
    return torch.optim.RMSprop(network.parameters(), lr=learning_rate, eps=eps, alpha=0.99)


def make_actor_critic_adam(
    network: nn.Module,
    *,
    critic_lr: float,
    policy_lr: float,
    alpha_lr: float | None = None,
    eps: float,
) -> torch.optim.Optimizer:
    """Return Adam with separate learning rates for critics, policy and, of SAC and MPO, multipliers.

    The critics are first, so that their learning rate is the one that is recorded.
    """
    groups = [
        {"params": network.critics.parameters(), "lr": critic_lr},
        {"params": network.policy.parameters(), "lr": policy_lr},
    ]
    if alpha_lr is not None:
        groups.append({"params": network.duals(), "lr": alpha_lr})
    return torch.optim.Adam(groups, eps=eps)
