"""Whether two sides, such as two hardware settings of a system, have the same scores: tests on arrays.

A side has runs in environments, and every run has outcomes, such as its final score and its mean score. The
level of an outcome is its mean over the runs of an environment. Two p-values answer two questions, each over
all environments and outcomes at once:

- *equivalent*: is the difference in level within the margin everywhere? (two one-sided tests in every
  environment, and a bound on the share of failing runs)
- *different*: is there a difference in level anywhere? (the largest of studentised differences, and of their
  sums over environments; both by permutations of the sides and by Student's t)

Definitions, and simulations of the error rates: docs/statistics.md.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy import special, stats

ALPHA = 0.05
MARGIN = 0.1  # of the level
PERMUTATIONS = 2000
POWER = 0.8  # of the estimate of the runs that are needed
FEWEST_RUNS = 5  # per environment and side, of a claim of equivalence
FAILING = 0.5  # of the better side's median: a run below it has failed


class Environment(NamedTuple):
    """The outcomes of two sides in one environment.

    Attributes:
      name: of the environment.
      first: outcomes of the first side's runs, `[outcomes, runs]`, finite.
      second: the same of the second side.
      pairs: positions of the runs that share a seed, in the first and in the second side, `[pairs, 2]`.
      floor: the margin is a share of the level, or of this number if the level is closer to 0.
    """

    name: str
    first: np.ndarray
    second: np.ndarray
    pairs: np.ndarray = np.empty((0, 2), int)
    floor: float = 0.0


class Row(NamedTuple):
    """One outcome in one environment.

    Attributes:
      env_id: the environment.
      outcome: position of the outcome.
      first: level of the first side.
      second: level of the second side.
      difference: second minus first.
      error: standard error of the difference; NaN if a side has one run.
      low: lower end of the interval that two one-sided tests at `alpha` use (90% by default); NaN if a side
        has one run.
      high: its upper end.
      margin: largest difference that counts as equivalent.
      p_equivalent: of the two one-sided tests.
      p_different: p-value of a difference in this row, corrected for the number of rows.
    """

    env_id: str
    outcome: int
    first: float
    second: float
    difference: float
    error: float
    low: float
    high: float
    margin: float
    p_equivalent: float
    p_different: float


class Comparison(NamedTuple):
    """Two sides over all environments.

    Attributes:
      p_equivalent: the largest p-value of what equivalence claims; 1 if a side has too few runs.
      p_different: of a difference in level in some environment.
      p_distribution: of a difference of any kind, such as in spread.
      failing: number of failing runs of each side.
      runs: number of runs of each side.
      rows: environments x outcomes.
    """

    p_equivalent: float
    p_different: float
    p_distribution: float
    failing: tuple[int, int]
    runs: tuple[int, int]
    rows: list[Row]


def compare(
    environments: Sequence[Environment],
    sides: Sequence[np.ndarray],
    margin: float = MARGIN,
    alpha: float = ALPHA,
) -> Comparison:
    """Compare two sides in all environments that both have.

    Args:
      environments: at least one; the same outcomes in each.
      sides: permutations of the sides, as `permuted_sides` returns them.
      margin: as a share of the level.
      alpha: level of the tests that the intervals of the rows invert.
    """
    z = np.array([_z(one, side) for one, side in zip(environments, sides, strict=True)])
    alone = np.abs(z).reshape(-1, z.shape[-1])  # environments x outcomes, permutations
    together = np.abs(z.sum(axis=0)) / math.sqrt(len(z))
    every = np.vstack([alone, together])
    largest = every.max(axis=0)
    permuted = (largest >= every[:, :1] - 1e-9).mean(axis=1)
    normal = np.minimum(1.0, len(every) * 2 * special.ndtr(-every[:, 0]))
    p_different = np.maximum(permuted, normal)
    of_rows = p_different[: len(alone)].reshape(z.shape[:2])
    energy = sum(_energy(one, side) for one, side in zip(environments, sides, strict=True))
    rows = [
        _row(one, index, margin, alpha, float(of_rows[number, index]))
        for number, one in enumerate(environments)
        for index in range(len(one.first))
    ]
    failing, p_failing = failing_runs(environments, margin)
    enough = (
        min(min(one.first.shape[1], one.second.shape[1]) for one in environments) >= FEWEST_RUNS
    )
    return Comparison(
        p_equivalent=max([p_failing, *(row.p_equivalent for row in rows)]) if enough else 1.0,
        p_different=float(p_different.min()),
        p_distribution=float(np.mean(energy >= energy[0] - 1e-9)),
        failing=failing,
        runs=(
            sum(e.first.shape[1] for e in environments),
            sum(e.second.shape[1] for e in environments),
        ),
        rows=rows,
    )


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Return p-values adjusted for their number, so that the chance of any error stays at the level.

    Source: Holm 1979, https://www.jstor.org/stable/4615733.
    """
    p = np.asarray(p_values, np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    result = np.empty_like(p)
    result[order] = np.minimum(adjusted, 1.0)
    return result


def permuted_sides(
    environments: Sequence[Environment], permutations: int = PERMUTATIONS, seed: int = 0
) -> list[np.ndarray]:
    """Return which runs are on the first side, `[runs of both sides, permutations]` per environment.

    Runs that share a seed are exchanged with each other, the others among themselves. The first column is the
    observed assignment. If there are no more assignments than asked for, all are returned: p could otherwise
    be smaller than the smallest possible value.
    """
    if math.prod(map(_ways, environments)) <= permutations:
        every = [_all_sides(one) for one in environments]
        which = np.indices([sides.shape[1] for sides in every]).reshape(len(every), -1)
        return [sides[:, columns] for sides, columns in zip(every, which, strict=True)]
    rng = np.random.default_rng(seed)
    return [_random_sides(one, permutations, rng) for one in environments]


def _unpaired(one: Environment) -> tuple[np.ndarray, int]:
    """Return the positions, in both sides together, of runs without a partner; and how many are first."""
    runs = one.first.shape[1]
    first = np.setdiff1d(np.arange(runs), one.pairs[:, 0])
    second = np.setdiff1d(np.arange(one.second.shape[1]), one.pairs[:, 1])
    return np.concatenate([first, runs + second]), len(first)


def _ways(one: Environment) -> int:
    positions, size = _unpaired(one)
    return 2 ** len(one.pairs) * math.comb(len(positions), size)


def _all_sides(one: Environment) -> np.ndarray:
    positions, size = _unpaired(one)
    chosen = list(combinations(range(len(positions)), size))
    pairs = len(one.pairs)
    swaps = np.indices((2,) * pairs).reshape(pairs, 2**pairs).astype(bool)
    sides = np.zeros((one.first.shape[1] + one.second.shape[1], swaps.shape[1] * len(chosen)), bool)
    for number, which in enumerate(chosen):
        columns = slice(number * swaps.shape[1], (number + 1) * swaps.shape[1])
        sides[positions[list(which)], columns] = True
        sides[one.pairs[:, 0], columns] = ~swaps
        sides[one.first.shape[1] + one.pairs[:, 1], columns] = swaps
    return sides


def _random_sides(one: Environment, permutations: int, rng: np.random.Generator) -> np.ndarray:
    positions, size = _unpaired(one)
    sides = np.zeros((one.first.shape[1] + one.second.shape[1], permutations), bool)
    ranks = rng.random((len(positions), permutations)).argsort(axis=0).argsort(axis=0)
    sides[positions] = ranks < size
    swaps = rng.integers(0, 2, (len(one.pairs), permutations)).astype(bool)
    sides[one.pairs[:, 0]] = ~swaps
    sides[one.first.shape[1] + one.pairs[:, 1]] = swaps
    sides[:, 0] = np.arange(len(sides)) < one.first.shape[1]
    return sides


def _squared_error(
    one: Environment, values: np.ndarray, sides: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the difference in level (second minus first) and its squared standard error.

    That of Welch's test; runs that share a seed add their covariance, as in a paired test.

    Args:
      one: the environment.
      values: outcomes of both sides' runs, `[outcomes, runs]`.
      sides: which runs are on the first side, `[runs, permutations]`.

    Returns:
      Difference and squared error, each `[outcomes, permutations]`.
    """
    first, second = sides.astype(np.float64), (~sides).astype(np.float64)
    n, m, k = one.first.shape[1], one.second.shape[1], len(one.pairs)
    values = values - values.mean(axis=1, keepdims=True)
    squares = values**2
    mean_1, mean_2 = values @ first / n, values @ second / m
    variance_1 = (squares @ first - n * mean_1**2) / (n - 1)
    variance_2 = (squares @ second - m * mean_2**2) / (m - 1)
    error = variance_1 / n + variance_2 / m
    if k > 1:
        a, b = one.pairs[:, 0], n + one.pairs[:, 1]
        both = np.concatenate([a, b])
        products = (values[:, a] * values[:, b]).sum(axis=1, keepdims=True)
        sum_1, sum_2 = values[:, both] @ first[both], values[:, both] @ second[both]
        error = error - 2 * k * (products - sum_1 * sum_2 / k) / (k - 1) / (n * m)
    return mean_2 - mean_1, np.maximum(error, 0.0)


def _z(one: Environment, sides: np.ndarray) -> np.ndarray:
    """Return studentised differences in level as normal quantiles, `[outcomes, permutations]`.

    So those of environments with few and with many runs can be compared. They are 0 if a side has one run.
    """
    values = np.concatenate([one.first, one.second], axis=1)
    if min(one.first.shape[1], one.second.shape[1]) < 2:
        return np.zeros((len(values), sides.shape[1]))
    difference, error = _squared_error(one, values, sides)
    tiny = 1e-9 * np.abs(values).max(axis=1, keepdims=True) + np.finfo(float).tiny
    difference[np.abs(difference) < tiny] = 0.0
    t = difference / np.maximum(np.sqrt(error), tiny)
    freedom = min(one.first.shape[1], one.second.shape[1]) - 1
    beyond = special.stdtr(freedom, -np.abs(t)).clip(min=1e-300)
    return np.sign(t) * -special.ndtri(beyond)


def _energy(one: Environment, sides: np.ndarray) -> np.ndarray:
    """Return the energy distance between the sides, summed over outcomes, `[permutations]`.

    Source: Székely and Rizzo 2013, https://doi.org/10.1016/j.jspi.2013.03.018.
    """
    values = np.concatenate([one.first, one.second], axis=1)
    distances = np.abs(values[:, :, None] - values[:, None, :])
    scale = distances.mean(axis=(1, 2), keepdims=True)
    distances = (distances / np.where(scale > 0, scale, 1.0)).sum(axis=0)
    first = sides.astype(np.float64)
    n, m = one.first.shape[1], one.second.shape[1]
    to_first = distances @ first
    in_first = (first * to_first).sum(axis=0)
    across = to_first.sum(axis=0) - in_first
    in_second = distances.sum() - in_first - 2 * across
    return 2 * across / (n * m) - in_first / n**2 - in_second / m**2


def _row(one: Environment, index: int, margin: float, alpha: float, p_different: float) -> Row:
    a, b = one.first[index], one.second[index]
    first, second = float(a.mean()), float(b.mean())
    wide = margin * max((abs(first) + abs(second)) / 2, one.floor)
    difference = second - first
    if min(len(a), len(b)) < 2:
        return Row(
            one.name, index, first, second, difference, np.nan, np.nan, np.nan, wide, 1.0, 1.0
        )
    sides = (np.arange(len(a) + len(b)) < len(a))[:, None]
    _, squared = _squared_error(one, np.concatenate([a, b])[None], sides)
    error = math.sqrt(squared.item())
    if error < 1e-9 * max(np.abs(a).max(), np.abs(b).max()):  # rounding of equal differences
        error = 0.0
    if error == 0.0:
        low = high = difference
        p = float(abs(difference) > wide)
    else:
        freedom = _freedom(one, a, b)
        reach = error * stats.t.ppf(1 - alpha, freedom)
        low, high = difference - reach, difference + reach
        p = float(stats.t.sf((wide - abs(difference)) / error, freedom))
    return Row(one.name, index, first, second, difference, error, low, high, wide, p, p_different)


def _freedom(one: Environment, a: np.ndarray, b: np.ndarray) -> float:
    """Return the degrees of freedom of an interval: of a paired test, or Welch's."""
    if len(one.pairs):
        return min(len(a), len(b)) - 1
    u, v = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    return (u + v) ** 2 / (u**2 / (len(a) - 1) + v**2 / (len(b) - 1))


def failing_runs(
    environments: Sequence[Environment], margin: float
) -> tuple[tuple[int, int], float]:
    """Count the runs of each side that failed, and test whether fewer than a share `margin` of runs fail.

    A run has failed if its first outcome is lower than the better side's median by more than half of that
    (or of the environment's floor). A share f of runs that score nothing lowers the level by f. If none of n
    runs failed, f could still be `1 - 0.05 ** (1 / n)`: 10% takes 29 runs.

    Returns:
      The number of failing runs of each side, and the larger p-value (binomial test, one-sided).
    """
    failed, runs = np.zeros(2, int), np.zeros(2, int)
    for one in environments:
        sides = one.first[0], one.second[0]
        level = max(float(np.median(side)) for side in sides)
        least = level - FAILING * max(abs(level), one.floor)
        failed += [int((side < least).sum()) for side in sides]
        runs += [len(side) for side in sides]
    p = stats.binom.cdf(failed, runs, min(margin, 1.0))
    return (int(failed[0]), int(failed[1])), float(p.max())


def first_difference(
    grids: Sequence[np.ndarray],
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
    sides: Sequence[np.ndarray],
    alpha: float = ALPHA,
) -> float:
    """Return where the mean curves of an environment first differ by more than chance allows anywhere.

    Args:
      grids: points of the axis per environment, `[P]`.
      first: curves of the first side per environment, `[runs, P]`.
      second: the same of the second side.
      sides: as `permuted_sides` returns them.
      alpha: chance that permuted sides differ as much at some point of some environment.

    Returns:
      The smallest such point of all environments; NaN if there is none.
    """
    standard = []
    for a, b, side in zip(first, second, sides, strict=True):
        means = np.concatenate([a, b]).T @ ((~side) / len(b) - side / len(a))
        spread = means.std(axis=1, keepdims=True)
        standard.append(np.abs(means) / np.where(spread > 0, spread, np.inf))
    limit = np.quantile(np.max([one.max(axis=0) for one in standard], axis=0), 1 - alpha)
    beyond = [grid[one[:, 0] > limit] for grid, one in zip(grids, standard, strict=True)]
    return min((float(points[0]) for points in beyond if len(points)), default=math.nan)


def runs_needed(found: Comparison, alpha: float, margin: float, same_seeds: bool = False) -> float:
    """Estimate how many runs per environment and side decide, if the observed differences are the true ones.

    A standard error shrinks with the root of the number of runs. For *equivalent*, (z_alpha + z_power) errors
    have to fit between difference and margin in every row, and the failing runs have to be few enough; for
    *different*, (z_alpha/2 + z_power) errors into the difference of some row, z_alpha being corrected for the
    number of rows, and the permutations have to be many enough for a p-value of alpha.

    Args:
      found: the comparison of the runs so far.
      alpha: level of the tests.
      margin: as a share of the level.
      same_seeds: whether runs are permuted within pairs.

    Returns:
      The smaller of the two numbers; infinity if neither is finite, or if a side's single run leaves the
      spread unknown.
    """
    if any(math.isnan(row.error) for row in found.rows):
        return math.inf
    environments = len({row.env_id for row in found.rows})
    runs = min(found.runs) / environments
    power = special.ndtri(POWER)
    equivalent, different = [float(FEWEST_RUNS)], []
    fewest = 1
    while (
        2 * (0.5**fewest if same_seeds else 1 / math.comb(2 * fewest, fewest)) ** environments
        > alpha
    ):
        fewest += 1
    for row in found.rows:
        room = row.margin - abs(row.difference)
        one_sided = (special.ndtri(1 - alpha) + power) * row.error
        two_sided = (special.ndtri(1 - alpha / 2 / len(found.rows)) + power) * row.error
        equivalent.append(runs * (one_sided / room) ** 2 if room > 0 else math.inf)
        different.append(runs * (two_sided / row.difference) ** 2 if row.difference else math.inf)
    if margin < 1:
        share = max(failed / total for failed, total in zip(found.failing, found.runs, strict=True))
        least = math.log(alpha) / math.log(1 - margin) / environments
        equivalent.append(least if share == 0 else math.inf)
    return float(np.ceil(min(max(equivalent), max(fewest, min(different)))))
