"""Speed and memory of the analysis: bootstrap intervals against rliable, curves, reading of records.

`bootstrap` needs rliable (`pip install '.[test]'`). Every case runs in a fresh process, so that its peak
memory is its own.
"""

import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from cleanba.record import Episode, RunInfo, RunWriter, run_name
from cleanba.run.arguments import Count
from experiments.benchmarks import speed
from experiments.benchmarks.case import Case, Column, Values

SYSTEMS = 4


def peak_memory() -> float:
    """Return the largest memory of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def simulated_scores(games: int, seeds: int) -> dict[str, np.ndarray]:
    """Return scores `[runs, games]` of some systems: skewed, as human-normalized scores are."""
    rng = np.random.default_rng(0)
    levels = rng.lognormal(0, 1, (SYSTEMS, 1, games))
    noise = rng.lognormal(0, 0.2, (SYSTEMS, seeds, games))
    return {f"system {i}": (levels * noise)[i] for i in range(SYSTEMS)}


def rank_error(replicates: np.ndarray, ends: np.ndarray, level: float) -> float:
    """Return the distance of another interval's ends from the corresponding quantiles of our replicates.

    They are compared as probabilities, because the median of means of three runs takes few values.

    Args:
      replicates: ours, `[4, R]`.
      ends: the other interval, `[2, 4]`.
      level: of the interval, such as 0.95.

    Returns:
      The largest difference of probabilities.
    """
    worst = 0.0
    for end, q in zip(ends, ((1 - level) / 2, (1 + level) / 2), strict=True):
        tiny = 1e-9 * np.abs(end)[:, None]
        below = np.mean(replicates < end[:, None] - tiny, axis=1)
        upto = np.mean(replicates <= end[:, None] + tiny, axis=1)
        worst = max(worst, float(np.max(np.maximum(below - q, q - upto))))
    return worst


def measure_bootstrap(games: int, seeds: int, repetitions: int) -> Values:
    """Time the same intervals by `analysis.aggregate` and by rliable, and compare them."""
    from rliable import library, metrics

    import analysis
    from analysis import aggregates, bootstrap

    scores = simulated_scores(games, seeds)
    start = time.perf_counter()
    analysis.aggregate(scores, repetitions=repetitions)
    our_time = time.perf_counter() - start
    ours = {
        name: bootstrap.replicates(
            partial(aggregates.all_aggregates, list(s.T)), [seeds] * games, repetitions
        )
        for name, s in scores.items()
    }
    np.random.seed(0)  # rliable draws from NumPy's global generator
    start = time.perf_counter()
    _, theirs = library.get_interval_estimates(
        scores,
        lambda x: np.array(
            [
                metrics.aggregate_median(x),
                metrics.aggregate_iqm(x),
                metrics.aggregate_mean(x),
                metrics.aggregate_optimality_gap(x),
            ]
        ),
        reps=repetitions,
    )
    their_time = time.perf_counter() - start
    errors = [rank_error(ours[name], theirs[name], bootstrap.LEVEL) for name in scores]
    return {
        "seconds": our_time,
        "rliable_seconds": their_time,
        "ratio": their_time / our_time,
        "rank_error": max(errors),
    }


def measure_curves(games: int, seeds: int, repetitions: int) -> Values:
    """Time bands of learning curves: median and IQM of all systems at 100 points."""
    from analysis import aggregates, learning_curves

    rng = np.random.default_rng(0)
    start = time.perf_counter()
    for scores in simulated_scores(games, seeds).values():
        rise = np.linspace(0.01, 1, 100)
        strata = [s[:, None] * rise + rng.normal(0, 0.01, (seeds, 100)) for s in scores.T]
        for metric in ("median", "iqm"):
            learning_curves.band(strata, aggregates.AGGREGATES[metric], repetitions)
    return {"seconds": time.perf_counter() - start, "memory_gib": peak_memory()}


def measure_reading(runs: int, episodes: int) -> Values:
    """Write records, and time how long reading and summarizing them takes."""
    from analysis import summary
    from analysis.importers.records import read_records
    from analysis.scores import final_scores

    with tempfile.TemporaryDirectory(prefix="records-") as folder:
        _write_runs(Path(folder), runs, episodes)
        start = time.perf_counter()
        tables = read_records([folder])
        read = time.perf_counter() - start
        summary.aggregate(final_scores(tables))
        return {
            "rows": len(tables.curves),
            "reading_seconds": read,
            "seconds": time.perf_counter() - start,
            "memory_gib": peak_memory(),
        }


def _write_runs(folder: Path, runs: int, episodes: int) -> None:
    from analysis import references

    rng = np.random.default_rng(0)
    games = list(references.ATARI)
    returns, lengths = rng.integers(0, 500, episodes), rng.integers(50, 9000, episodes)
    rows = [
        Episode(
            step=40 * i, wall_time=i / 7, env_index=i % 120, episode_return=float(r), length=int(n)
        )
        for i, (r, n) in enumerate(zip(returns, lengths, strict=True))
    ]
    for run in range(runs):
        env_id, system, seed = f"{games[run // 4 % 50]}-v5", f"system{run % 2}", run // 2 % 2
        info = RunInfo(system=system, setting="a0-l0-d1-t1", env_id=env_id, seed=seed)
        with RunWriter(folder / run_name(system, info.setting, env_id, seed), info) as record:
            record.write(*rows)


@dataclass(frozen=True)
class Bootstrap:
    """Bootstrap intervals against rliable's."""

    games: Count = 57
    """Environments."""
    seeds: Count = 3
    """Runs of each of 4 systems on each environment."""
    repetitions: Count = 50_000
    """Repetitions of the bootstrap."""

    columns = (
        Column("seconds", "seconds", ".2f"),
        Column("rliable_seconds", "rliable", ".2f"),
        Column("ratio", "ratio", ratio="rliable's time / ours"),
        Column("rank_error", "largest error of an end", ".2%"),
    )

    def title(self) -> str:
        """Return the line above the table."""
        return (
            f"Intervals of 4 aggregates: {SYSTEMS} systems x {self.games} games x {self.seeds} seeds, "
            f"{self.repetitions} repetitions"
        )

    def cases(self) -> list[Case]:
        """Return the one case."""
        return [_case("bootstrap", measure_bootstrap, self.games, self.seeds, self.repetitions)]


@dataclass(frozen=True)
class Curves:
    """Bands of learning curves."""

    games: Count = 57
    """Environments."""
    seeds: Count = 3
    """Runs of each of 4 systems on each environment."""
    repetitions: Count = 50_000
    """Repetitions of the bootstrap."""

    columns = (
        Column("seconds", "seconds", ".1f"),
        Column("memory_gib", "peak memory, GiB", ".2f"),
    )

    def title(self) -> str:
        """Return the line above the table."""
        return (
            f"Bands of curves: {SYSTEMS} systems x 100 points x median and IQM, {self.games} games x "
            f"{self.seeds} seeds, {self.repetitions} repetitions"
        )

    def cases(self) -> list[Case]:
        """Return the one case."""
        return [_case("curves", measure_curves, self.games, self.seeds, self.repetitions)]


@dataclass(frozen=True)
class Reading:
    """Reading and summarizing run records."""

    runs: Count = 50
    """Runs."""
    episodes: Count = 100_000
    """Episodes of each run."""

    columns = (
        Column("rows", "rows"),
        Column("reading_seconds", "read, s", ".1f"),
        Column("seconds", "read and summarized, s", ".1f"),
        Column("memory_gib", "peak memory, GiB", ".2f"),
    )

    def title(self) -> str:
        """Return the line above the table."""
        return f"Records of {self.runs} runs x {self.episodes} episodes"

    def cases(self) -> list[Case]:
        """Return the one case."""
        return [_case("reading", measure_reading, self.runs, self.episodes)]


def _case(name: str, function: Callable[..., Values], *sizes: int) -> Case:
    return Case(name, partial(speed.in_fresh_process, function, *sizes))
