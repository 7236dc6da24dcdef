"""The interfaces between workers and agents: what actors, storages and algorithms are.

An agent is a network, an actor, a storage and an algorithm. Each worker makes its own copies of the parts it
needs, with the factories of an `Agent`; agents.py puts them together.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn


class Rollout(NamedTuple):
    """T steps of B environments. Observation t leads to action t, and that to reward t."""

    obs: np.ndarray  # [T + 1, B, ...]
    actions: np.ndarray  # int64 [T, B], or float32 [T, B, size]
    rewards: np.ndarray  # float32 [T, B], unclipped
    terminated: np.ndarray  # bool [T, B], the episode terminated with that step
    dones: np.ndarray  # bool [T, B], it terminated or was truncated
    resets: np.ndarray  # bool [T, B], the step only reset the environment and is not learned from
    # float32 [T, B, num_actions], of the acting network: logits, or action values; [T, B, 0] if continuous
    logits: np.ndarray
    values: np.ndarray  # float32 [T + 1, B], of the acting network; zeros if it has no value
    states: np.ndarray  # float32 [T, B, S], of the actor before each step; S is 0 if it has none


class Moment(NamedTuple):
    """When and where an actor acts."""

    version: int  # of the network
    worker: int  # number of the collection worker in the run
    num_workers: int  # collection workers of the run
    steps: int  # of all environments of this worker so far


class Decision(NamedTuple):
    """A network's actions for a batch of observations."""

    actions: np.ndarray  # int64 [B], or float32 [B, size]
    logits: np.ndarray  # float32 [B, num_actions], or [B, 0]
    values: np.ndarray  # float32 [B]
    state: np.ndarray | None = (
        None  # float32 [B, S], of the actor after the step; None if it has none
    )


class Storage(Protocol):
    """Stores rollouts and yields batches for the loss."""

    def put(self, rollouts: list[Rollout]) -> None:
        """Insert collected rollouts."""

    def next(self) -> Any | None:
        """Return the next batch, or None if more rollouts must be collected first."""

    def reprioritize(self, errors: torch.Tensor) -> None:
        """Set the priorities of the last batch; called only if the loss returns `errors`."""


class Algorithm(NamedTuple):
    """A loss and its optimizer."""

    # (network, batch, progress) -> `loss`, which is minimized, further losses to record, and optionally
    # `errors` of the batch; progress, from 0 to 1, is how far the learning rate is annealed. Parameters that
    # the loss does not depend on are not updated
    loss: Callable[[nn.Module, Any, float], dict[str, torch.Tensor]]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    after_step: Callable[[nn.Module], None]  # updates target networks


class Agent(NamedTuple):
    """An agent's parts and factories; can be sent to any worker."""

    make_network: Callable[[], nn.Module]
    # (network, observations [B, ...], states [B, S], generator, moment); a state is zero as an episode starts
    act: Callable[[nn.Module, np.ndarray, np.ndarray, np.random.Generator, Moment], Decision]
    make_storage: Callable[[int], Storage]  # takes the seed of its sampling
    algorithm: Algorithm
    state_size: int = 0  # of an actor's state (S)
    # last steps of a worker's rollout that its next one begins with, so that sequences span rollouts
    overlap: int = 0
