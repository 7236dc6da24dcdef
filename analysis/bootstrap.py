"""Stratified bootstrap intervals: runs are resampled within each environment.

Agarwal et al. (arXiv 2108.13264) draw, in every replicate, as many runs as there are, with
replacement, separately for each environment. The same seed gives a bit-identical interval: the
generator is local (rliable draws from NumPy's global one), and no order of summation depends on the
machine.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

REPETITIONS = 10_000
LEVEL = 0.95
FEW_RUNS = 5  # with fewer, intervals under-cover: docs/statistics.md
# Replicates are made in blocks that stay in the processor's cache.
BLOCK = 16384
LARGEST_KEPT = 32 * 2**20  # bytes of draws that are kept for the next call


class Interval(NamedTuple):
    """An estimate with its confidence interval; `low` and `high` are NaN if there is none."""

    value: float
    low: float
    high: float


def draw_counts(sizes: Sequence[int], repetitions: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the number of times that each run occurs in each bootstrap replicate.

    Args:
      sizes: runs per environment, `[M]`, N in all.
      repetitions: number of replicates R.
      rng: the generator to draw from.

    Returns:
      `[N, R]` integers; within an environment of n runs every column sums to n.
    """
    small = np.min_scalar_type(max(sizes))  # uint8 for up to 255 runs per environment
    counts = np.zeros((sum(sizes), repetitions), dtype=small)
    row = 0
    for size in sizes:
        drawn = rng.integers(size, size=(size, repetitions), dtype=small)
        last = row + size - 1
        counts[last] = size
        for run in range(size - 1):
            for draw in drawn:
                counts[row] += draw == run
            counts[last] -= counts[row]
            row += 1
        row = last + 1
    return counts


def replicates(
    statistic: Callable[[np.ndarray], np.ndarray],
    sizes: Sequence[int],
    repetitions: int = REPETITIONS,
    seed: int = 0,
) -> np.ndarray:
    """Return a statistic of every bootstrap replicate.

    Args:
      statistic: takes counts `[N, B]` and returns `[..., B]`.
      sizes: runs per environment, `[M]`.
      repetitions: number of replicates R.
      seed: seed of the draws.

    Returns:
      `[..., R]`.
    """
    small = sum(sizes) * repetitions <= LARGEST_KEPT
    draws = (_kept_blocks if small else _blocks)(tuple(sizes), repetitions, seed)
    return np.concatenate([statistic(counts) for counts in draws], axis=-1)


def _blocks(sizes: tuple[int, ...], repetitions: int, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    for start in range(0, repetitions, BLOCK):
        yield draw_counts(sizes, min(BLOCK, repetitions - start), rng)


@functools.lru_cache(maxsize=1)
def _kept_blocks(sizes: tuple[int, ...], repetitions: int, seed: int) -> list[np.ndarray]:
    """Return the draws of all blocks: systems with equally many runs have the same."""
    blocks = list(_blocks(sizes, repetitions, seed))
    for counts in blocks:
        counts.flags.writeable = False
    return blocks


def percentile_interval(values: np.ndarray, level: float = LEVEL) -> np.ndarray:
    """Return the quantiles (1 - level) / 2 and (1 + level) / 2 along the last axis, `[2, ...]`."""
    tail = (1 - level) / 2
    return np.quantile(values, [tail, 1 - tail], axis=-1)


def bca_interval(
    values: np.ndarray, value: float, influence: np.ndarray, level: float = LEVEL
) -> np.ndarray:
    """Return the bias-corrected and accelerated interval (Efron 1987; Davison & Hinkley, ch. 5).

    Args:
      values: the statistic of each replicate, `[R]`.
      value: the statistic of the data.
      influence: influence of each run on the statistic, `[N]` (see `jackknife_influence`).
      level: confidence level.

    Returns:
      `[2]`; the percentile interval where all replicates, or all influences, are equal.
    """
    below = (np.mean(values < value) + np.mean(values <= value)) / 2
    spread = np.sum(influence**2)
    if not 0 < below < 1 or spread == 0:
        return percentile_interval(values, level)
    normal = NormalDist()
    bias = normal.inv_cdf(below)
    acceleration = np.sum(influence**3) / (6 * spread**1.5)
    ends = []
    for tail in ((1 - level) / 2, (1 + level) / 2):
        z = bias + normal.inv_cdf(tail)
        ends.append(normal.cdf(bias + z / (1 - acceleration * z)))
    return np.quantile(values, ends)


def jackknife_influence(
    statistics: Callable[[np.ndarray], np.ndarray], sizes: Sequence[int]
) -> np.ndarray:
    """Return the influence of each run on some statistics, by leaving it out.

    When run i of the n of its environment is left out, its weight goes to the other n - 1: the
    counts of that environment become n / (n - 1), and 0 for run i.

    Args:
      statistics: takes counts `[N, B]` and returns `[K, B]`, or `[B]`.
      sizes: runs per environment, `[M]`.

    Returns:
      `[K, N]`, or `[N]`: (n - 1) (mean of the environment's leave-one-out values - the run's own), over n.
    """
    total = sum(sizes)
    counts = np.ones((total, total))
    envs = np.repeat(np.arange(len(sizes)), sizes)
    for run in range(total):
        size = sizes[envs[run]]
        if size > 1:
            counts[envs == envs[run], run] = size / (size - 1)
            counts[run, run] = 0
    left_out = np.asarray(statistics(counts))
    influence = np.empty_like(left_out)
    for env, size in enumerate(sizes):
        own = left_out[..., envs == env]
        mean = own.mean(axis=-1, keepdims=True)
        influence[..., envs == env] = (size - 1) * (mean - own) / size
    return influence


def interval(
    statistic: Callable[[np.ndarray | None], np.ndarray],
    sizes: Sequence[int],
    repetitions: int = REPETITIONS,
    level: float = LEVEL,
    seed: int = 0,
    method: str = "percentile",
) -> Interval:
    """Return a statistic of the scores with its stratified bootstrap interval.

    Args:
      statistic: takes counts `[N, B]`, or None for the data, e.g.
        `lambda counts: aggregates.iqm(scores, counts)`.
      sizes: runs per environment. Where all are 1 there is nothing to draw: no interval.
      repetitions: number of replicates.
      level: confidence level.
      seed: seed of the draws.
      method: `percentile` or `bca`.
    """
    (found,) = intervals(
        lambda counts: np.asarray(statistic(counts))[None], sizes, repetitions, level, seed, method
    )
    return found


def intervals(
    statistics: Callable[[np.ndarray | None], np.ndarray],
    sizes: Sequence[int],
    repetitions: int = REPETITIONS,
    level: float = LEVEL,
    seed: int = 0,
    method: str = "percentile",
) -> list[Interval]:
    """Return several statistics of the scores with their intervals, from the same replicates.

    Args:
      statistics: takes counts `[N, B]` and returns `[K, B]`, or None for the data and returns `[K]`.
      sizes: as for `interval`, with the other arguments.
      repetitions: number of replicates.
      level: confidence level.
      seed: seed of the draws.
      method: `percentile` or `bca`.
    """
    if method not in ("percentile", "bca"):
        raise ValueError(f"no such method: {method!r}")
    values = [float(value) for value in statistics(None)]
    if max(sizes) < 2 or repetitions < 1:
        return [Interval(value, float("nan"), float("nan")) for value in values]
    drawn = replicates(statistics, sizes, repetitions, seed)
    if method == "percentile":
        ends = percentile_interval(drawn, level).T
    else:
        influences = jackknife_influence(statistics, sizes)
        ends = [
            bca_interval(row, value, influence, level)
            for row, value, influence in zip(drawn, values, influences, strict=True)
        ]
    return [
        Interval(value, float(low), float(high))
        for value, (low, high) in zip(values, ends, strict=True)
    ]
