"""How often verdicts are wrong, on simulated scores whose truth is known (the tables of docs/statistics.md).

A case draws the final scores of two sides in one environment; the mean heights of the curves follow them with
some noise. The level of a side that does nothing special is 1.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from analysis import comparison
from analysis.comparison import ALPHA, MARGIN, Environment

AT_MARGIN = (1 + MARGIN / 2) / (1 - MARGIN / 2)  # the margin is a share of the mean of both levels
NOISE = 0.05  # of the mean height of a curve, beyond that of its end
PERMUTATIONS = 500
SIZES = [(environments, runs) for environments in (1, 5, 20) for runs in (3, 5, 10)]
LARGE = [(1, 30), (1, 50), (5, 30)]
UNPROTECTED_SIZES = [(5, 10), (5, 30), (20, 10), (20, 30)]

Scores = tuple[np.ndarray, np.ndarray]
Draw = Callable[[np.random.Generator, int, float], np.ndarray]  # generator, runs, level -> scores


class Case(NamedTuple):
    """One kind of data.

    Attributes:
      name: of the case.
      draw: draws both sides' scores, `(generator, runs, number of the environment)`.
      paired: whether the sides share their seeds.
    """

    name: str
    draw: Callable[[np.random.Generator, int, int], Scores]
    paired: bool = False


def normal(rng: np.random.Generator, runs: int, level: float, spread: float = 0.1) -> np.ndarray:
    """Draw scores with a standard deviation of a share `spread` of the level."""
    return level * (1 + spread * rng.normal(size=runs))


def lognormal(rng: np.random.Generator, runs: int, level: float) -> np.ndarray:
    """Draw skewed scores: the logarithm has a standard deviation of 0.3."""
    return level * np.exp(0.3 * rng.normal(size=runs) - 0.045)


def bimodal(rng: np.random.Generator, runs: int, level: float, solved: float = 0.5) -> np.ndarray:
    """Draw scores of runs of which a share `solved` reaches 1, and the others 0.1."""
    return level * np.where(rng.random(runs) < solved, 1.0, 0.1) + 0.02 * rng.normal(size=runs)


def crashing(rng: np.random.Generator, runs: int, level: float, crashed: float = 0.1) -> np.ndarray:
    """Draw scores with a standard deviation of 5%, of which a share `crashed` is 0."""
    return np.where(rng.random(runs) < crashed, 0.0, normal(rng, runs, level, 0.05))


def _same(draw: Draw) -> Callable[[np.random.Generator, int, int], Scores]:
    return lambda rng, runs, _: (draw(rng, runs, 1.0), draw(rng, runs, 1.0))


def _spreads(rng: np.random.Generator, runs: int, _: int) -> Scores:
    return normal(rng, runs, 1.0, 0.05), normal(rng, runs, 1.0, 0.3)


def _correlated(rng: np.random.Generator, runs: int, _: int) -> Scores:
    shared, own = rng.normal(size=(2, runs))
    return 1 + 0.1 * shared, 1 + 0.1 * (-0.9 * shared + np.sqrt(1 - 0.9**2) * own)


# No difference in level anywhere: "different" is false.
EQUAL = (
    Case("normal", _same(normal)),
    Case("normal, same seeds", _same(normal), paired=True),
    Case("lognormal", _same(lognormal)),
    Case("solve or fail", _same(bimodal)),
    Case("10% of runs crash", _same(crashing)),
    Case("spreads of 5% and 30%", _spreads),
    Case("spreads of 5% and 30%, same seeds", _spreads, paired=True),
    Case("same seeds, correlation -0.9", _correlated, paired=True),
)


def _first(draw: Draw, level: float) -> Callable[[np.random.Generator, int, int], Scores]:
    """Shift the second side in the first environment alone."""
    return lambda rng, runs, env: (draw(rng, runs, 1.0), draw(rng, runs, 1.0 if env else level))


def _few_spread(rng: np.random.Generator, runs: int, level: float) -> np.ndarray:
    return normal(rng, runs, level, 0.02)


def _tight(rng: np.random.Generator, runs: int, level: float) -> np.ndarray:
    return normal(rng, runs, level, 0.05)


def _opposite(rng: np.random.Generator, runs: int, env: int) -> Scores:
    levels = (1.0, 0.5) if env % 2 else (0.5, 1.0)
    return normal(rng, runs, levels[0]), normal(rng, runs, levels[1])


def _outer(rng: np.random.Generator, runs: int, env: int) -> Scores:
    """Every fourth game, beginning with the first, falls to 0."""
    level = 1.0 + env
    return normal(rng, runs, level), normal(rng, runs, level if env % 4 else 0.0)


def _solving(rng: np.random.Generator, runs: int, _: int) -> Scores:
    return bimodal(rng, runs, 1.0, 1.0), bimodal(rng, runs, 1.0, 0.88)


def _crashes(rng: np.random.Generator, runs: int, _: int) -> Scores:
    return normal(rng, runs, 1.0, 0.05), crashing(rng, runs, 1.0)


def _crashes_on_one(rng: np.random.Generator, runs: int, env: int) -> Scores:
    return _crashes(rng, runs, env) if env == 0 else _same(_tight)(rng, runs, env)


def _wider(rng: np.random.Generator, runs: int, env: int) -> Scores:
    return normal(rng, runs, 1.0, 0.02), normal(rng, runs, 1.0 if env else AT_MARGIN, 0.1)


# A difference of the margin or more in some environment: "equivalent" is false.
UNEQUAL = (
    Case("normal, at the margin on one", _first(normal, AT_MARGIN)),
    Case("spread of 2%, at the margin on one", _first(_few_spread, AT_MARGIN)),
    Case("lognormal, at the margin on one", _first(lognormal, AT_MARGIN)),
    Case("spreads of 2% and 10%, at the margin", _wider),
    Case("100% and 88% of runs solve", _solving),
    Case("0% and 10% of runs crash", _crashes),
    Case("opposite effects of 50%", _opposite),
    Case("a quarter of the games at 0", _outer),
)

# The same, but a failure that the rule misses more often: the bound on failing runs is over all environments.
UNPROTECTED = (Case("0% and 10% of runs crash on one", _crashes_on_one),)

CASES = {case.name: case for case in (*EQUAL, *UNEQUAL, *UNPROTECTED)}


class Rates(NamedTuple):
    """Shares of simulations, each of one comparison."""

    equivalent: float
    different: float


def rates(
    case: Case, environments: int, runs: int, simulations: int, permutations: int = PERMUTATIONS
) -> Rates:
    """Return how often two sides are judged *equivalent* and *different*.

    Args:
      case: draws the scores.
      environments: number of environments.
      runs: of each side on each environment.
      simulations: number of comparisons.
      permutations: of a comparison; 1 if only *equivalent* is of interest.
    """
    rng = np.random.default_rng([environments, runs])
    equivalent = different = 0
    for number in range(simulations):
        drawn = [environment(case, rng, runs, index) for index in range(environments)]
        sides = comparison.permuted_sides(drawn, permutations, number)
        found = comparison.compare(drawn, sides)
        equivalent += found.p_equivalent <= ALPHA
        different += found.p_different <= ALPHA
    return Rates(equivalent / simulations, different / simulations)


def environment(case: Case, rng: np.random.Generator, runs: int, index: int) -> Environment:
    """Draw the outcomes of both sides in one environment."""
    outcomes = [
        np.stack([final, 0.7 * final * (1 + NOISE * rng.normal(size=runs))])
        for final in case.draw(rng, runs, index)
    ]
    pairs = np.repeat(np.arange(runs)[:, None], 2, axis=1) if case.paired else np.empty((0, 2), int)
    return Environment(str(index), *outcomes, pairs)


def table(cases: tuple[Case, ...], field: str, sizes: list, simulations: int) -> Iterator[str]:
    """Yield the lines of a table: a row per case, a column per number of environments and runs."""
    yield " " * 36 + "".join(f"{f'{e} x {n}':>8}" for e, n in sizes)
    permutations = 1 if field == "equivalent" else PERMUTATIONS
    with _workers() as pool:
        jobs = [
            [pool.submit(_rate, case.name, size, simulations, permutations) for size in sizes]
            for case in cases
        ]
        for case, row in zip(cases, jobs, strict=True):
            yield f"{case.name:36}" + "".join(
                f"{100 * getattr(j.result(), field):7.1f}%" for j in row
            )


def _workers() -> ProcessPoolExecutor:
    """Return a process per core, each with one thread: products of such small matrices gain from no more."""
    return ProcessPoolExecutor(initializer=threadpool_limits, initargs=(1,))


def _rate(name: str, size: tuple[int, int], simulations: int, permutations: int) -> Rates:
    # by its name, because a process cannot be sent a case: its functions are lambdas
    return rates(CASES[name], *size, simulations, permutations)


def power(simulations: int) -> Iterator[str]:
    """Yield the lines of a table: how often a true verdict is reached, normal scores with a spread of 10%."""
    sizes = (5, 10, 20, 30, 50, 100)
    yield " " * 42 + "".join(f"{n:>8}" for n in sizes)
    with _workers() as pool:
        rows = [
            (
                environments,
                name,
                [pool.submit(_power, shift, environments, n, simulations) for n in sizes],
            )
            for environments in (1, 5)
            for name, shift in (("no difference", 0.0), ("20% on one", 0.2), ("50% on one", 0.5))
        ]
        for environments, name, jobs in rows:
            verdict = "equivalent" if name == "no difference" else "different"
            title = f"{name}, {environments} environment{'s' * (environments > 1)}: {verdict}"
            yield f"{title:42}" + "".join(f"{100 * job.result():7.1f}%" for job in jobs)


def _power(shift: float, environments: int, runs: int, simulations: int) -> float:
    case = Case("", _first(normal, 1 + shift))
    if not shift:
        return rates(case, environments, runs, simulations, permutations=1).equivalent
    return rates(case, environments, runs, simulations).different
