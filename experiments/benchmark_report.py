"""How long a report takes to build: 57 games x 4 systems x 3 seeds by default.

    python -m experiments.benchmark_report --json runs/benchmark_report.json

The records are made up, in the form of the trainers' own (docs/run-record.md), and deleted afterwards.
Writing them is not measured; building is `python -m reports.build` in a process of its own, from its
start to its end.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cleanba.command_line import BadInput, run_command_line
from cleanba.record import RunWriter, run_name
from experiments.benchmark_results import write_results
from experiments.games import ATARI_57

ROOT = Path(__file__).parents[1]
SYSTEMS = ("cleanba_ppo", "cleanba_ppo-sync", "cleanba_impala", "cleanba_impala-sync")
BATCH = 2_400  # agent steps of an update: 120 environments x 20 steps, as in the paper's IMPALA
SECONDS_PER_UPDATE = 0.5


@dataclass(frozen=True)
class Args:
    """How large the study is."""

    games: int = len(ATARI_57)
    """Games, of the 57 of the papers."""
    systems: int = len(SYSTEMS)
    """Systems, of four."""
    seeds: int = 3
    """Runs of each system on each game."""
    updates: int = 1_000
    """Updates of a run."""
    rollouts: int = 2_000
    """Rollouts of a run."""
    episodes: int = 4_000
    """Episodes of a run."""
    json: str | None = None
    """Write the results to this file too."""


def _json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _updates(count: int) -> str:
    seconds = {
        "rollout_queue_get_time": 0.15, "params_queue_get_time": 0.02, "rollout_queue_put_time": 0.01,
        "rollout_time": 0.28, "inference_time": 0.15, "env_time": 0.1, "training_time": 0.35,
    }  # fmt: skip
    losses = {"loss": 0.512, "policy_loss": 0.103, "value_loss": 0.411, "entropy": 0.617}
    return _json_lines(
        {
            "version": i + 1, "step": i * BATCH, "wall_time": i * SECONDS_PER_UPDATE,
            "learning_rate": 1e-3, **losses, "grad_norm": 0.31, **seconds,
            "fingerprint": f"{i:064x}" if i % 100 == 0 or i == count else None,
        }
        for i in range(1, count + 1)
    )  # fmt: skip


def _rollouts(count: int, updates: int) -> str:
    rows = []
    for i in range(1, count + 1):
        update = -(-i * updates // count)  # the one that learns from it
        version = max(1, update - 1)
        rows.append(
            {
                "actor": 0, "group": i % 2, "rollout": update, "steps": BATCH * updates // count,
                "wall_time": update * SECONDS_PER_UPDATE, "version_first": version,
                "version_last": version, "versions": [[version, BATCH * updates // count]],
                "learner_version": update,
            }
        )  # fmt: skip
    return _json_lines(rows)


def _episodes(returns: np.ndarray, updates: int) -> str:
    count = len(returns)
    return _json_lines(
        {
            "step": i * updates * BATCH // count,
            "wall_time": i * updates * SECONDS_PER_UPDATE / count,
            "env_index": i % 120, "return": float(value), "length": 900,
        }
        for i, value in enumerate(returns, start=1)
    )  # fmt: skip


def write_records(folder: Path, args: Args) -> None:
    """Write the records of a study whose runs learn at rates of their own, with noise."""
    rng = np.random.default_rng(0)
    rise = 1 - np.exp(-np.linspace(0, 4, args.episodes))
    same = {
        "updates": _updates(args.updates),
        "rollouts": _rollouts(args.rollouts, args.updates),
    }
    for env_id in ATARI_57[: args.games]:
        for system in SYSTEMS[: args.systems]:
            for seed in range(1, args.seeds + 1):
                path = folder / run_name(system, "a0-l0-t1", env_id, seed)
                header = {"system": system, "setting": "a0-l0-t1", "env_id": env_id, "seed": seed}
                RunWriter(path, header).close("completed")
                level = 1_000 * rng.lognormal(0, 0.5)
                returns = (level * rise * rng.lognormal(0, 0.3, args.episodes)).round()
                texts = same | {"episodes": _episodes(returns, args.updates)}
                for kind, text in texts.items():
                    (path / f"{kind}.jsonl").write_text(text)


def main(args: Args) -> None:
    """Write records, build their report, and print how long that took."""
    for name, most in (("games", len(ATARI_57)), ("systems", len(SYSTEMS))):
        if not 1 <= getattr(args, name) <= most:
            raise BadInput(f"--{name} must be from 1 to {most}")
    for name in ("seeds", "updates", "rollouts", "episodes"):
        if getattr(args, name) < 1:
            raise BadInput(f"--{name} must be at least 1")
    with tempfile.TemporaryDirectory(prefix="report-") as folder:
        runs = Path(folder) / "runs" / "large"
        runs.mkdir(parents=True)
        write_records(runs, args)
        size = sum(file.stat().st_size for file in runs.rglob("*.jsonl"))
        command = [sys.executable, "-m", "reports.build", "large"]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        started = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )
        seconds = time.perf_counter() - started
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        page = (Path(folder) / "reports/large/index.html").stat().st_size
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    runs_count = args.games * args.systems * args.seeds
    print(f"{args.games} games x {args.systems} systems x {args.seeds} seeds: {runs_count} records")
    print(
        f"of {args.updates:,} updates, {args.rollouts:,} rollouts and {args.episodes:,} episodes: "
        f"{size / 1e6:,.0f} MB"
    )
    print(f"built in {seconds:.1f} s, peak memory {memory:.1f} GiB, page of {page / 1e6:.1f} MB")
    write_results(
        args.json,
        {"records": runs_count, "megabytes": size / 1e6, "seconds": seconds, "memory_gib": memory},
    )


if __name__ == "__main__":
    run_command_line(Args, main, "How long a report takes to build.")
