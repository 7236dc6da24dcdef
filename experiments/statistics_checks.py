"""Simulations behind docs/statistics.md: coverage of intervals, rates of verdicts, returns of random play.

    python -m experiments.statistics_checks coverage
    python -m experiments.statistics_checks verdicts
    python -m experiments.statistics_checks random

Each prints the table that is quoted there; `--help` after the name lists its sizes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from analysis import aggregates, bootstrap, references
from cleanba.run.arguments import Count
from cleanba.run.command_line import BadInput, run_command_line
from experiments import verdict_rates


def measure_coverage(simulations: int, repetitions: int, true_runs: int) -> None:
    """Print how often 95% intervals contain the true value, by number of seeds.

    Scores on 20 games are log-normal about a level of each game. The true value is the aggregate of
    `true_runs` runs per game.
    """
    games = 20
    rng = np.random.default_rng(0)
    levels = rng.lognormal(0, 1, games)

    def draw(runs: int) -> list[np.ndarray]:
        return list((levels * rng.lognormal(0, 0.5, (runs, games))).T)

    many = draw(true_runs)
    truth = {name: float(f(many)) for name, f in aggregates.AGGREGATES.items()}
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


def measure_verdicts(simulations: int) -> None:
    """Print how often verdicts are wrong, and how often they are reached."""
    print(f"{simulations} simulations each; environments x runs of each side")
    print("different, though the levels are equal")
    print_lines(
        verdict_rates.table(verdict_rates.EQUAL, "different", verdict_rates.SIZES, simulations)
    )
    print("equivalent, though a level differs by the margin or more")
    sizes = [*verdict_rates.SIZES, *verdict_rates.LARGE]
    print_lines(verdict_rates.table(verdict_rates.UNEQUAL, "equivalent", sizes, simulations))
    print("the same, where the rule does not protect")
    print_lines(
        verdict_rates.table(
            verdict_rates.UNPROTECTED, "equivalent", verdict_rates.UNPROTECTED_SIZES, simulations
        )
    )
    print("power by runs of each side, normal scores with a spread of 10%")
    print_lines(verdict_rates.power(simulations))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they come."""
    for line in lines:
        print(line, flush=True)


def measure_random(episodes: int) -> None:
    """Print the mean return of uniformly random actions on the environments of `references`.

    Each of 100 environments contributes the same number of episodes: the first episodes to end would be the
    short ones.
    """
    import envpool

    size = 100
    if episodes % size:
        raise BadInput(f"--episodes {episodes}: must be a multiple of {size}")
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


@dataclass(frozen=True)
class Coverage:
    """How often 95% intervals contain the true value."""

    simulations: Count = 1000
    """Simulated studies."""
    repetitions: Count = 1000
    """Repetitions of the bootstrap."""
    true_runs: Count = 200_000
    """Runs of each game that give the true value."""


@dataclass(frozen=True)
class Verdicts:
    """How often verdicts are wrong."""

    simulations: Count = 1000
    """Simulated comparisons."""


@dataclass(frozen=True)
class Random:
    """Mean returns of uniformly random actions."""

    episodes: Count = 10_000
    """Episodes of each environment, a multiple of 100."""


def main(args: Coverage | Verdicts | Random) -> None:
    """Run one simulation, and print its table."""
    match args:
        case Coverage():
            measure_coverage(args.simulations, args.repetitions, args.true_runs)
        case Verdicts():
            measure_verdicts(args.simulations)
        case Random():
            measure_random(args.episodes)


if __name__ == "__main__":
    run_command_line(
        Coverage | Verdicts | Random, main, "Simulations that check the statistics of the analysis."
    )
