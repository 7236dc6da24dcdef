"""Mean, median, interquartile mean and optimality gap of the scores of runs over environments.

As in Agarwal et al., "Deep RL at the edge of the statistical precipice" (arXiv 2108.13264) and
its library rliable, which serves as the oracle in the tests; here with any number of runs per
environment.

A set of scores is a list with one array of runs per environment. Every function also takes
`counts`, the number of times that each run was drawn in each replicate, and then returns one value per
replicate. A replicate only changes the weights of the scores, which are sorted once, so tens of
thousands of replicates are cheap. Matrix products are not used, because the order of BLAS's sums
depends on its number of threads, and an interval must be bit-identical on every machine.
"""

from collections.abc import Callable, Sequence

import numpy as np

Scores = Sequence[np.ndarray]


def _flat(scores: Scores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return values `[N]`, the environment of each `[N]`, and the runs per environment `[M]`."""
    _check(scores)
    sizes = np.array([len(column) for column in scores])
    if not len(sizes) or not sizes.all():
        raise ValueError("every environment needs at least one run")
    values = np.concatenate([np.asarray(column, dtype=np.float64) for column in scores])
    if np.isnan(values).any():
        raise ValueError("a score is NaN: exclude the run, and report it")
    return values, np.repeat(np.arange(len(sizes)), sizes), sizes


def _check(scores: Scores) -> None:
    if isinstance(scores, np.ndarray) or any(np.ndim(column) != 1 for column in scores):
        raise ValueError(
            "scores are a list with an array of runs per environment: list(runs_x_tasks.T)"
        )


def _ones(counts: np.ndarray | None, size: int) -> np.ndarray:
    return np.ones((size, 1), dtype=np.uint8) if counts is None else counts


def _value(result: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
    """Return the replicates; without bootstrap counts there is only one, which is returned as a number."""
    return result[0] if counts is None else result


def environment_means(scores: Scores, counts: np.ndarray | None = None) -> np.ndarray:
    """Return the mean score of each environment, `[M, R]` (`[M]` without counts)."""
    values, _, sizes = _flat(scores)
    drawn = _ones(counts, len(values))
    means = np.zeros((len(sizes), drawn.shape[1]))
    run = 0
    for env, size in enumerate(sizes):
        for _ in range(size):
            means[env] += values[run] * drawn[run]
            run += 1
        means[env] /= size
    return means[:, 0] if counts is None else means


def mean(scores: Scores, counts: np.ndarray | None = None) -> np.ndarray:
    """Return the mean over environments of the mean over runs.

    Args:
      scores: one array of normalized scores per environment, any number of runs each, N in all.
      counts: how often each run was drawn, `[N, R]`, environments in order; None for the data.

    Returns:
      A number, or `[R]` with counts.
    """
    return _value(_mean_of(environment_means(scores, _ones(counts, sum(map(len, scores))))), counts)


def _mean_of(means: np.ndarray) -> np.ndarray:
    total = np.zeros(means.shape[1])
    for row in means:
        total += row
    return total / len(means)


def median(scores: Scores, counts: np.ndarray | None = None) -> np.ndarray:
    """Return the median over environments of the mean over runs; arguments as for `mean`."""
    return _value(
        _median_of(environment_means(scores, _ones(counts, sum(map(len, scores))))), counts
    )


def _median_of(means: np.ndarray) -> np.ndarray:
    ordered = np.array(means.T, order="C")  # a copy, which is reordered in place
    middle = len(means) // 2
    if len(means) % 2:
        ordered.partition(middle, axis=1)
        return ordered[:, middle].copy()
    ordered.partition((middle - 1, middle), axis=1)
    return (ordered[:, middle - 1] + ordered[:, middle]) / 2


def iqm(scores: Scores, counts: np.ndarray | None = None) -> np.ndarray:
    """Return the interquartile mean over all runs: their mean without the top and bottom quarter.

    With equally many runs per environment this is the 25% trimmed mean of all N runs, of which
    floor(N / 4) are cut at either end, as in rliable. With unequal numbers every environment keeps
    the same weight, divided among its runs, and the weight of floor(N / 4) average runs is cut at
    either end; a run at the edge counts with the part of its weight that is inside.

    Arguments as for `mean`.
    """
    values, envs, sizes = _flat(scores)
    drawn = _ones(counts, len(values))
    order = np.argsort(values, kind="stable")
    total = len(values)
    cut = total // 4
    weights = (total / len(sizes) / sizes[envs])[order]
    # With equal numbers every weight is 1, and sums of counts are small integers: exact, and fast.
    whole = (sizes == sizes[0]).all() and drawn.dtype.kind in "ui"
    below = np.zeros(drawn.shape[1], dtype=np.min_scalar_type(total) if whole else np.float64)
    # Summed by parts: sum of value x (weight inside) = last x all inside - sum of step x (weight
    # inside below the step), where the weight inside is the running one, clipped to the middle.
    steps = np.diff(values[order])
    result = np.full(drawn.shape[1], values[order[-1]] * (total - 2 * cut))
    for i, step in enumerate(steps):
        below += drawn[order[i]] if whole else drawn[order[i]] * weights[i]
        if step:
            result -= step * (np.clip(below, cut, total - cut) - np.float64(cut))
    return _value(result / (total - 2 * cut), counts)


def optimality_gap(scores: Scores, counts: np.ndarray | None = None) -> np.ndarray:
    """Return the mean amount by which runs fall short of 1; arguments as for `mean`."""
    _check(scores)
    return 1.0 - mean([np.minimum(column, 1.0) for column in scores], counts)


AGGREGATES: dict[str, Callable[..., np.ndarray]] = {
    "median": median,
    "iqm": iqm,
    "mean": mean,
    "optimality_gap": optimality_gap,
}


def all_aggregates(scores: Scores, counts: np.ndarray | None = None) -> np.ndarray:
    """Return all of `AGGREGATES` in their order, faster than one by one; arguments as for `mean`.

    Returns:
      `[4]`, or `[4, R]` with counts.
    """
    means = environment_means(scores, _ones(counts, sum(map(len, scores))))
    return np.stack(
        [
            _value(_median_of(means), counts),
            iqm(scores, counts),
            _value(_mean_of(means), counts),
            optimality_gap(scores, counts),
        ]
    )


def profile(scores: Scores, taus: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Return the performance profile: the share of runs with a score above each threshold.

    Every environment has the same weight, independent of its number of runs.

    Args:
      scores: as for `mean`.
      taus: thresholds, `[T]`.
      counts: as for `mean`.

    Returns:
      `[T]`, or `[T, R]` with counts.
    """
    values, envs, sizes = _flat(scores)
    drawn = _ones(counts, len(values))
    order = np.argsort(values, kind="stable")
    weights = 1 / len(sizes) / sizes[envs]
    first = np.searchsorted(values[order], taus, side="right")
    above = np.zeros((len(values) + 1, drawn.shape[1]))
    for i in reversed(range(len(values))):
        above[i] = above[i + 1] + weights[order[i]] * drawn[order[i]]
    return above[first, 0] if counts is None else above[first]


def probability_of_improvement(
    x: Scores,
    y: Scores,
    counts_x: np.ndarray | None = None,
    counts_y: np.ndarray | None = None,
) -> np.ndarray:
    """Return the probability that a run of X beats one of Y, ties counted half, mean over environments.

    Args:
      x: one array of scores per environment.
      y: the same for the other system, on the same environments in the same order.
      counts_x: as for `mean`; with `counts_y` or not at all.
      counts_y: as for `mean`.

    Returns:
      A number, or `[R]` with counts.
    """
    if len(x) != len(y):
        raise ValueError("both systems need the same environments")
    _check(x)
    _check(y)
    drawn_x = _ones(counts_x, sum(map(len, x)))
    drawn_y = _ones(counts_y, sum(map(len, y)))
    total = np.zeros(drawn_x.shape[1])
    row_x = row_y = 0
    for a, b in zip(x, y, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        wins = (a[:, None] > b) + 0.5 * (a[:, None] == b)
        for i, row in enumerate(wins):
            against = np.zeros(total.shape)
            for j in np.flatnonzero(row):
                against += row[j] * drawn_y[row_y + j]
            total += against * drawn_x[row_x + i] / (len(a) * len(b))
        row_x, row_y = row_x + len(a), row_y + len(b)
    return _value(total / len(x), counts_x)
