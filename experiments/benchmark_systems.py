"""Speed of most systems side by side: the same game, network, environments and cores, in one run.

    python -m experiments.benchmark_systems --json runs/benchmark_systems.json

Pong-v5 with the Nature CNN, 16 environments, rollouts of 20 steps; PPO with 4 epochs of 4 minibatches
everywhere. Systems differ in what they learn, so a row says what a system costs, not which is better:
`ratio` is to the system of the first row with the same algorithm. A system's first updates, in which it
compiles and starts its processes, are not counted.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cleanba.command_line import run_command_line
from cleanba.record import read_run
from experiments.benchmark_results import check_cases, write_results

ROOT = Path(__file__).parents[1]
SKIPPED_SHARE = 0.3  # of the steps of a run


class Case(NamedTuple):
    """One system."""

    name: str
    algorithm: str
    command: tuple[str, ...]


EPOCHS = ("--update-epochs", "4", "--num-minibatches", "4")


def _flags(num_envs: int) -> tuple[str, ...]:
    shape = ("--num-envs", str(num_envs), "--num-steps", "20")
    return ("--env-id", "Pong-v5", "--network", "nature", *shape)


def _script(name: str, algorithm: str, path: str, *flags: str) -> Case:
    return Case(name, algorithm, (str(ROOT / path), *_flags(16), *flags))


def _schemes(scheme: str, algorithm: str, num_workers: int, *flags: str) -> Case:
    words = ("-m", "baselines.worker_schemes", *_flags(16 // num_workers), "--scheme", scheme)
    return Case(f"schemes_{algorithm}-{scheme}", algorithm, (*words, "--agent", algorithm, *flags))


GROUPS = ("--num-env-groups", "1", "--num-actor-threads", "1")
CASES = (
    _script("cleanba_ppo-sync", "ppo", "cleanba/cleanba_ppo.py", *GROUPS, *EPOCHS, "--no-concurrency"),
    _script("cleanba_ppo", "ppo", "cleanba/cleanba_ppo.py", *GROUPS, *EPOCHS, "--concurrency"),
    _script("cleanrl_ppo", "ppo", "baselines/cleanrl_ppo.py", *EPOCHS),
    _script("hts_rl_ppo", "ppo", "baselines/hts_rl.py", "--algorithm", "ppo", *EPOCHS),
    _script("hts_rl_ppo-sync", "ppo", "baselines/hts_rl.py", "--algorithm", "ppo", *EPOCHS,
         "--schedule", "synchronous"),
    _schemes("single-threaded", "ppo", 1, *EPOCHS),
    _schemes("dppo", "ppo", 2, *EPOCHS),
    _schemes("rapid", "ppo", 4, *EPOCHS),
    _script("cleanba_impala-sync", "impala", "cleanba/cleanba_impala.py", *GROUPS, "--no-concurrency"),
    _script("cleanba_impala", "impala", "cleanba/cleanba_impala.py", *GROUPS, "--concurrency"),
    _schemes("single-threaded", "impala", 1),
    _schemes("impala", "impala", 2),
    _script("hts_rl_a2c", "a2c", "baselines/hts_rl.py", "--algorithm", "a2c"),
    _script("hts_rl_a2c-sync", "a2c", "baselines/hts_rl.py", "--algorithm", "a2c",
         "--schedule", "synchronous"),
)  # fmt: skip


def speed_of(case: Case, steps: int) -> float:
    """Return the steps per second of a system, after its first updates."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--total-timesteps", str(steps), "--runs-dir", folder, "--no-progress")
        command = [sys.executable, *case.command, *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise RuntimeError(f"{case.name}: {done.stderr.strip().splitlines()[-1]}")
        (path,) = Path(folder).glob("*/*__*")
        rows = read_run(path).lines("updates")
    first = next(row for row in rows if row["step"] >= SKIPPED_SHARE * rows[-1]["step"])
    return (rows[-1]["step"] - first["step"]) / (rows[-1]["wall_time"] - first["wall_time"])


@dataclass(frozen=True)
class Args:
    """What to measure."""

    cases: tuple[str, ...] = tuple(case.name for case in CASES)
    """Systems, by name."""
    steps: int = 10_000
    """Agent steps of each run."""
    json: str | None = None
    """Write the results to this file too."""


def main(args: Args) -> None:
    """Measure, print a table, and write JSON."""
    by_name = {case.name: case for case in CASES}
    check_cases(args.cases, by_name)
    print(f"steps per second on {len(os.sched_getaffinity(0))} cores, Pong-v5, Nature CNN")
    print(f"{'system':>28}{'algorithm':>12}{'speed':>10}{'ratio':>8}")
    first: dict[str, float] = {}
    results = []
    for name in args.cases:
        case = by_name[name]
        speed = speed_of(case, args.steps)
        ratio = speed / first.setdefault(case.algorithm, speed)
        results.append(
            {"system": name, "algorithm": case.algorithm, "speed": speed, "ratio": ratio}
        )
        print(f"{name:>28}{case.algorithm:>12}{speed:>10,.0f}{ratio:>8.2f}", flush=True)
    write_results(args.json, results)


if __name__ == "__main__":
    run_command_line(Args, main, "Speed of most systems side by side.")
