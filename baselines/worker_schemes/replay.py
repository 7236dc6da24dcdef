"""Replay buffers: items drawn evenly, by priority, or with an emphasis on recent ones; n-step transitions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from baselines.worker_schemes.parts import Rollout

SMALLEST_ERROR = 1e-6  # added to every error, so that each item can be sampled again
ERE_UNITS = 1000  # exponent of ERE's eta over all batches of an insertion (its section 3.1)


class Transitions(NamedTuple):
    """A batch of N transitions over up to n steps."""

    obs: torch.Tensor
    actions: torch.Tensor  # in the environment's units
    rewards: torch.Tensor  # discounted sums
    next_obs: torch.Tensor  # after the last step
    discounts: (
        torch.Tensor
    )  # of the value of next_obs; 0 if the episode terminated, not if it was truncated
    noise: torch.Tensor  # [D, N, size], standard normal; of as many draws as the loss needs
    weights: torch.Tensor  # importance weights of the value loss; 1 for uniform sampling


class StoredTransitions(NamedTuple):
    """M transitions as the buffer has them."""

    obs: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    next_obs: np.ndarray
    discounts: np.ndarray


class Returns(NamedTuple):
    """Returns of up to n steps from each step of a rollout."""

    rewards: np.ndarray  # float32 [T, B], discounted sums
    # float32 [T, B], of the value of the observation after the last step; 0 if the episode terminated there,
    # not if it was truncated
    discounts: np.ndarray
    ends: np.ndarray  # int64 [T, B], index of that observation


def n_step_returns(rollout: Rollout, n: int, gamma: float) -> Returns:
    """Return the returns of n steps, or of fewer where the episode or the rollout ends before.

    The observation after an episode's last step is its true final one: EnvPool resets on the following step,
    whose own returns mean nothing.

    Args:
      rollout: [T, B].
      n: most steps of a return.
      gamma: discount of one step.
    """
    length, size = rollout.dones.shape
    t, b = np.indices((length, size))
    rewards = np.zeros((length, size), np.float32)
    discounts = np.ones((length, size), np.float32)
    last = t.copy()
    goes_on = np.ones((length, size), bool)
    for k in range(n):
        goes_on = goes_on & (t + k < length)
        now = np.minimum(t + k, length - 1)
        rewards += np.where(goes_on, discounts * rollout.rewards[now, b], 0)
        last = np.where(goes_on, now, last)
        discounts = np.where(goes_on, discounts * np.float32(gamma), discounts)
        goes_on = goes_on & ~rollout.dones[now, b]
    discounts = np.where(rollout.terminated[last, b], np.float32(0), discounts)
    return Returns(rewards, discounts, last + 1)


def n_step_transitions(
    rollout: Rollout, rng: np.random.Generator, *, n: int, gamma: float
) -> tuple[StoredTransitions, np.ndarray | None]:
    """Cut a rollout into one transition for each of its steps, but those that only reset.

    Args:
      rollout: [T, B].
      rng: not used.
      n: most steps of a transition.
      gamma: discount of one step.

    Returns:
      The transitions [M], and the absolute errors [M] of the acting network's values, or None if it has no
      action values.
    """
    rewards, discounts, ends = n_step_returns(rollout, n, gamma)
    columns = np.arange(rollout.dones.shape[1])
    real = ~rollout.resets
    fields = (rollout.obs[:-1], rollout.actions, rewards, rollout.obs[ends, columns], discounts)
    transitions = StoredTransitions(*(field[real] for field in fields))
    if not rollout.logits.shape[-1]:
        return transitions, None
    chosen = np.take_along_axis(rollout.logits, rollout.actions[..., None], -1)[..., 0]
    errors = np.abs(rewards + discounts * rollout.values[ends, columns] - chosen)
    return transitions, errors[real]


class SumTree:
    """Nonnegative numbers, sampled in proportion to their values in logarithmic time.

    A complete binary tree in one array: the numbers are the leaves, and each inner node is the sum of its
    two children.
    """

    def __init__(self, size: int):
        """Start with zeros."""
        self._first = 1 << max(size - 1, 1).bit_length()  # index of the first leaf
        self._nodes = np.zeros(2 * self._first)

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at some indices."""
        return self._nodes[self._first + places]

    @property
    def total(self) -> float:
        """Return the sum of all."""
        return float(self._nodes[1])

    def set(self, places: np.ndarray, values: np.ndarray) -> None:
        """Set the numbers at some indices; the last value counts where an index is repeated."""
        nodes = self._first + places
        self._nodes[nodes] = values
        while nodes[0] > 1:
            nodes = np.unique(nodes // 2)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, sums: np.ndarray) -> np.ndarray:
        """Return, for each sum in [0, total), the first index whose cumulative sum exceeds it."""
        nodes = np.ones(len(sums), np.int64)
        sums = sums.copy()
        while nodes[0] < self._first:
            left = self._nodes[2 * nodes]
            right = sums >= left
            sums -= np.where(right, left, 0.0)
            nodes = 2 * nodes + right
        return nodes - self._first


class ReplayStorage:
    """A replay buffer of items cut from rollouts; it gives a fixed number of batches per inserted rollout.

    Sampling is uniform; prioritized (https://arxiv.org/abs/1511.05952, section 3.3): in proportion to a power
    of an item's last error; or emphasizes recent experience (https://arxiv.org/abs/1906.04009): evenly
    from the newest items, whose number shrinks from batch to batch.
    """

    def __init__(
        self,
        seed: int,
        *,
        cut: Callable[
            [Rollout, np.random.Generator], tuple[tuple[np.ndarray, ...], np.ndarray | None]
        ],
        capacity: int,
        first: int,
        batch_size: int,
        num_updates: int,
        make_batch: Callable[..., Any] = Transitions,
        num_draws: int = 0,
        clip_rewards: bool = False,
        priority_exponent: float = 0.0,
        importance_exponent: float = 0.4,
        actor_priorities: bool = False,
        ere_eta: float = 1.0,
        ere_smallest: int = 5000,
    ):
        """Create an empty buffer.

        Args:
          seed: of the sampling.
          cut: takes a rollout and a generator, and returns the items as arrays [M, ...], the second of
            which are the actions; and their errors [M] under the acting network, or None if they are unknown.
          capacity: largest number of items; the oldest are replaced.
          first: items that must be in the buffer before the first batch.
          batch_size: items in a batch.
          num_updates: batches for each inserted rollout.
          make_batch: takes the items' fields, normal noise, and their importance weights.
          num_draws: of noise of the size of an action, for each item of a batch (D).
          clip_rewards: clip the rewards of steps to [-1, 1].
          priority_exponent: power of the errors (alpha in the paper); 0 samples uniformly.
          importance_exponent: power of the importance weights (beta); 1 corrects the bias fully.
          actor_priorities: new items get their priorities from the acting network's action values, as in
            Ape-X; otherwise the largest priority so far.
          ere_eta: emphasis on recent experience; 1 for none. Batch k of K is drawn from the newest
            eta^(1000 k / K) of the items.
          ere_smallest: least number of items that are emphasized.
        """
        self._rng = np.random.default_rng(seed)
        self._capacity, self._first = capacity, first
        self._batch_size, self._num_updates = batch_size, num_updates
        self._cut, self._make_batch, self._num_draws = cut, make_batch, num_draws
        self._clip_rewards = clip_rewards
        self._fields: list[np.ndarray] = []
        self._count = 0  # items ever inserted
        self._granted = self._left = 0  # batches of the last rollouts
        self._exponent, self._importance = priority_exponent, importance_exponent
        self._actor_priorities = actor_priorities
        self._priorities = SumTree(capacity) if priority_exponent else None
        self._largest = 1.0  # largest priority so far
        self._drawn = np.empty(0, np.int64)  # indices of the last batch
        self._eta, self._smallest = ere_eta, ere_smallest

    def put(self, rollouts: list[Rollout]) -> None:
        """Insert items, which replace the oldest ones."""
        for rollout in rollouts:
            if self._clip_rewards:
                rollout = rollout._replace(rewards=rollout.rewards.clip(-1, 1))
            parts, errors = self._cut(rollout, self._rng)
            if not self._fields:
                self._fields = [np.empty((self._capacity, *p.shape[1:]), p.dtype) for p in parts]
            places = (self._count + np.arange(len(parts[0]))) % self._capacity
            for field, part in zip(self._fields, parts, strict=True):
                field[places] = part
            if self._priorities is not None and len(places):
                if self._actor_priorities and errors is not None:
                    self._set_priorities(places, errors)
                else:
                    self._priorities.set(places, np.full(len(places), self._largest))
            self._count += len(places)
        if self._count >= self._first:
            self._granted = self._left = self._num_updates * len(rollouts)

    def next(self) -> Any | None:
        """Sample a batch, or return None after the last one."""
        if not self._left:
            return None
        self._left -= 1
        self._drawn, weights = self._draw()
        fields = [torch.from_numpy(field[self._drawn]) for field in self._fields]
        shape = (self._num_draws, self._batch_size, self._fields[1].shape[-1])
        noise = torch.from_numpy(self._rng.standard_normal(shape, np.float32))
        return self._make_batch(*fields, noise, torch.from_numpy(weights))

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        """Return indices of items and their importance weights."""
        size = min(self._count, self._capacity)
        if self._priorities is None:
            share = self._eta ** (ERE_UNITS * (1 - self._left / self._granted))
            newest = min(size, max(int(size * share), self._smallest))
            places = self._count - newest + self._rng.integers(newest, size=self._batch_size)
            return places % self._capacity, np.ones(self._batch_size, np.float32)
        total = self._priorities.total
        places = self._priorities.find(self._rng.random(self._batch_size) * total)
        places = np.minimum(places, size - 1)  # rounding may lead past the last item
        weights = (size * self._priorities[places] / total) ** -self._importance
        return places, (weights / weights.max()).astype(np.float32)

    def reprioritize(self, errors: torch.Tensor) -> None:
        """Set the priorities of the last batch from its errors [N]."""
        if self._priorities is not None:
            self._set_priorities(self._drawn, errors.numpy())

    def _set_priorities(self, places: np.ndarray, errors: np.ndarray) -> None:
        priorities = (errors.astype(np.float64) + SMALLEST_ERROR) ** self._exponent
        self._priorities.set(places, priorities)
        self._largest = max(self._largest, float(priorities.max()))
