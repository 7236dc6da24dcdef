"""Measures the analysis: speed against rliable, reading, coverage of intervals, verdicts.

`python -m experiments.benchmark_analysis bootstrap|curves|reading|coverage|verdicts|random` prints
the numbers of docs/statistics.md. The first two need rliable (`pip install '.[test]'`).
"""

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from analysis import aggregates, bootstrap, curves, references, reproducibility, summary
from analysis.importers.records import read_records
from analysis.scores import final_scores

SYSTEMS, GAMES, SEEDS, REPETITIONS = 4, 57, 3, 50_000


def peak_memory() -> float:
    """Return the largest memory of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def simulated_scores(seed: int = 0) -> dict[str, np.ndarray]:
    """Return scores `[runs, games]` of some systems: skewed, as human-normalised scores are."""
    rng = np.random.default_rng(seed)
    levels = rng.lognormal(0, 1, (SYSTEMS, 1, GAMES))
    noise = rng.lognormal(0, 0.2, (SYSTEMS, SEEDS, GAMES))
    return {f"system {i}": (levels * noise)[i] for i in range(SYSTEMS)}


def all_aggregates(columns: list[np.ndarray], repetitions: int, seed: int = 0) -> np.ndarray:
    """Return the bootstrap replicates of the four aggregates, `[4, repetitions]`."""
    return bootstrap.replicates(
        lambda counts: np.stack([f(columns, counts) for f in aggregates.AGGREGATES.values()]),
        [len(column) for column in columns],
        repetitions,
        seed,
    )


def rank_error(drawn: np.ndarray, ends: np.ndarray, level: float = bootstrap.LEVEL) -> float:
    """Return how far another interval's ends are from the right quantiles of our replicates.

    Compared as probabilities, since the median of means of three runs takes few values.

    Args:
      drawn: our replicates, `[4, R]`.
      ends: the other's interval, `[2, 4]`.
      level: of both.
    """
    worst = 0.0
    for end, q in zip(ends, ((1 - level) / 2, (1 + level) / 2), strict=True):
        tiny = 1e-9 * np.abs(end)[:, None]
        below = np.mean(drawn < end[:, None] - tiny, axis=1)
        upto = np.mean(drawn <= end[:, None] + tiny, axis=1)
        worst = max(worst, float(np.max(np.maximum(below - q, q - upto))))
    return worst


def measure_bootstrap() -> None:
    """Print our time and rliable's for the same intervals, and how far these are apart."""
    from rliable import library, metrics

    scores = simulated_scores()
    started = time.perf_counter()
    ours = {name: all_aggregates(list(s.T), REPETITIONS) for name, s in scores.items()}
    for drawn in ours.values():
        bootstrap.percentile_interval(drawn)
    our_time = time.perf_counter() - started
    started = time.perf_counter()
    _, oracle = library.get_interval_estimates(
        scores,
        lambda x: np.array(
            [
                metrics.aggregate_median(x),
                metrics.aggregate_iqm(x),
                metrics.aggregate_mean(x),
                metrics.aggregate_optimality_gap(x),
            ]
        ),
        reps=REPETITIONS,
    )
    their_time = time.perf_counter() - started
    print(f"{SYSTEMS} systems x {GAMES} games x {SEEDS} seeds, {REPETITIONS} repetitions")
    print(f"ours {our_time:.2f} s, rliable {their_time:.2f} s: {their_time / our_time:.0f} times")
    worst = max(rank_error(ours[name], oracle[name]) for name in scores)
    print(f"rliable's 2.5% and 97.5% ends are at most {100 * worst:.2f} percentage points off ours")


def measure_curves() -> None:
    """Print time and memory of sample-efficiency curves: systems x 100 points."""
    rng = np.random.default_rng(0)
    started = time.perf_counter()
    for scores in simulated_scores().values():
        rise = np.linspace(0.01, 1, 100)
        strata = [s[:, None] * rise + rng.normal(0, 0.01, (SEEDS, 100)) for s in scores.T]
        for metric in ("median", "iqm"):
            curves.band(strata, aggregates.AGGREGATES[metric], REPETITIONS)
    took = time.perf_counter() - started
    print(f"{SYSTEMS} systems x 100 points x median and IQM, {REPETITIONS} repetitions")
    print(f"{took:.1f} s, peak memory {peak_memory():.2f} GiB")


def measure_reading(runs: int, episodes: int) -> None:
    """Write runs, then print time and memory of reading and summarising them."""
    folder = Path(tempfile.mkdtemp(prefix="records-"))
    try:
        _write_runs(folder, runs, episodes)
        started = time.perf_counter()
        tables = read_records([folder])
        read = time.perf_counter() - started
        entries = summary.aggregate(final_scores(tables))
        took = time.perf_counter() - started
        print(f"{runs} runs x {episodes} episodes: {len(tables.curves)} rows")
        print(f"read in {read:.1f} s, summarised in {took:.1f} s, peak {peak_memory():.2f} GiB")
        print(f"systems: {len(entries)}, IQM of the first: {entries[0]['iqm']}")
    finally:
        shutil.rmtree(folder)


def _write_runs(folder: Path, runs: int, episodes: int) -> None:
    rng = np.random.default_rng(0)
    games = list(references.ATARI)
    lines = [
        f'{{"step": {40 * i}, "wall_time": {i / 7:.6f}, "env_index": {i % 120}, '
        f'"return": {float(r)}, "length": {int(n)}}}\n'
        for i, (r, n) in enumerate(
            zip(rng.integers(0, 500, episodes), rng.integers(50, 9000, episodes), strict=True)
        )
    ]
    text = "".join(lines)
    for run in range(runs):
        env_id, system, seed = f"{games[run // 4 % 50]}-v5", f"system{run % 2}", run // 2 % 2
        path = folder / f"{system}__a0-l0-t1__{env_id}__s{seed}"
        path.mkdir()
        header = {"schema_version": 1, "system": system, "setting": "a0-l0-t1", "env_id": env_id}
        header |= {"seed": seed, "status": "completed"}
        (path / "run.json").write_text(json.dumps(header))
        (path / "episodes.jsonl").write_text(text)
        for kind in ("updates", "rollouts"):
            (path / f"{kind}.jsonl").write_text("")


def measure_coverage(simulations: int, repetitions: int) -> None:
    """Print how often 95% intervals hold the truth, by number of seeds, and their mean width.

    The truth is known: the scores of 20 games are log-normal about a level of each game; its value
    is the aggregate of 200,000 runs per game.
    """
    games = 20
    rng = np.random.default_rng(0)
    levels = rng.lognormal(0, 1, games)

    def draw(runs: int) -> list[np.ndarray]:
        return list((levels * rng.lognormal(0, 0.5, (runs, games))).T)

    many = draw(200_000)
    truth = {name: float(f(many)) for name, f in aggregates.AGGREGATES.items()}
    # The median of means of few runs estimates another number than that of many: see the docs.
    print(f"{games} games, {simulations} simulations, {repetitions} repetitions, nominal 95%")
    print("seeds method     " + " ".join(f"{name:>14}" for name in truth))
    for runs in (3, 5, 10):
        for method in ("percentile", "bca"):
            hits = dict.fromkeys(truth, 0)
            for number in range(simulations):
                columns = draw(runs)
                for name, f in aggregates.AGGREGATES.items():
                    found = bootstrap.interval(
                        lambda counts, f=f, c=columns: f(c, counts),
                        [runs] * games,
                        repetitions,
                        seed=number,
                        method=method,
                    )
                    hits[name] += found.low <= truth[name] <= found.high
            shares = " ".join(f"{100 * h / simulations:13.1f}%" for h in hits.values())
            print(f"{runs:5} {method:10} {shares}")


def simulated_curves(
    rng: np.random.Generator, runs: int, environments: int, shift: float, noise: float = 0.15
) -> list[np.ndarray]:
    """Return learning curves `[runs, 20]` per environment that rise to 1 + shift.

    A run keeps its own level (log-normal about 1, spread `noise`) and wobbles a little about it.
    """
    rise = 1 - np.exp(-np.linspace(0.1, 4, 20))
    result = []
    for _ in range(environments):
        level = np.exp(noise * rng.normal(size=(runs, 1)) - noise**2 / 2)
        result.append((1 + shift) * rise * level + 0.02 * rng.normal(size=(runs, 20)))
    return result


def verdict_rates(
    shift: float, runs: int, environments: int, simulations: int, permutations: int, seed: int = 0
) -> dict[str, float]:
    """Return how often each verdict falls on simulated settings that differ by a known share."""
    rng = np.random.default_rng(seed)
    grid = np.arange(1.0, 21.0)
    seen = {"equivalent": 0, "different": 0, "undecided": 0}
    for number in range(simulations):
        first = simulated_curves(rng, runs, environments, 0.0)
        second = simulated_curves(rng, runs, environments, shift)
        result = reproducibility.compare_curves(
            grid, first, second, permutations=permutations, seed=number
        )
        seen[result.verdict] += 1
    return {name: count / simulations for name, count in seen.items()}


def measure_verdicts(simulations: int) -> None:
    """Print how often each verdict falls, by true shift, runs and environments."""
    print(f"{simulations} simulations each; seed noise 15% of the score, margin 10%")
    print("shift runs envs  equivalent  different  undecided")
    for runs, environments in ((5, 1), (3, 10), (5, 10), (10, 10)):
        for shift in (0.0, 0.1, 0.2):
            rates = verdict_rates(shift, runs, environments, simulations, 500)
            shares = "  ".join(f"{100 * rate:8.1f}%" for rate in rates.values())
            print(f"{100 * shift:4.0f}% {runs:4} {environments:4}   {shares}")


def measure_random(episodes: int) -> None:
    """Print the mean return of uniformly random actions on the environments of `references`.

    Every one of 100 environments plays the same number of episodes, for the first to finish
    would be the short ones.
    """
    import envpool

    size = 100
    for env_id in references.SOLVED:
        envs = envpool.make(env_id, "gymnasium", num_envs=size, seed=0)
        rng = np.random.default_rng(0)
        envs.reset()
        running, played = np.zeros(size), np.zeros(size, dtype=int)
        resetting = np.zeros(size, dtype=bool)
        returns: list[float] = []
        while played.min() < episodes // size:
            actions = rng.integers(int(envs.action_space.n), size=size)
            _, reward, ended, cut, _ = envs.step(actions)
            running += np.where(resetting, 0.0, reward)
            done = (ended | cut) & ~resetting
            returns += running[done & (played < episodes // size)].tolist()
            played += done
            running[done] = 0
            resetting = done
        error = np.std(returns) / np.sqrt(len(returns))
        print(f"{env_id}: {np.mean(returns):.3f} +- {error:.3f} ({len(returns)} episodes)")


def main() -> int:
    """Run one measurement."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmark_analysis")
    parser.add_argument("what", choices=tuple(_MEASUREMENTS), nargs="+")
    parser.add_argument("--runs", type=int, default=200, help="reading: runs")
    parser.add_argument("--episodes", type=int, default=None, help="reading, random: episodes")
    parser.add_argument("--simulations", type=int, default=None, help="coverage, verdicts")
    parser.add_argument("--repetitions", type=int, default=1000, help="coverage: of the bootstrap")
    args = parser.parse_args()
    for what in args.what:
        _MEASUREMENTS[what](args)
    return 0


_MEASUREMENTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "bootstrap": lambda args: measure_bootstrap(),
    "curves": lambda args: measure_curves(),
    "reading": lambda args: measure_reading(args.runs, args.episodes or 100_000),
    "coverage": lambda args: measure_coverage(args.simulations or 1000, args.repetitions),
    "verdicts": lambda args: measure_verdicts(args.simulations or 200),
    "random": lambda args: measure_random(args.episodes or 10_000),
}


if __name__ == "__main__":
    sys.exit(main())
