"""Target networks: how they follow the networks that are learned. A network's `moving()` yields the pairs."""

import torch
from torch import nn


def no_target_networks(network: nn.Module) -> None:
    """Do nothing: the agent has no target networks."""


def move_targets(network: nn.Module, *, polyak: float) -> None:
    """Move the targets towards what they follow: target = polyak * target + (1 - polyak) * network."""
    with torch.no_grad():
        for targets, sources in network.moving():
            for target, source in zip(targets.parameters(), sources.parameters(), strict=True):
                target.lerp_(source, 1 - polyak)


def move_targets_every(network: nn.Module, *, every: int, polyak: float = 0.0) -> None:
    """Count updates, and move the targets after every so many; by default to the network itself."""
    network.num_updates += 1
    if network.num_updates % every == 0:
        move_targets(network, polyak=polyak)
