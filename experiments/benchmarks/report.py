"""How long a report of many records takes to build.

The records are synthetic, in the trainers' format (docs/run-record.md), and deleted afterwards. Writing
them is not timed. Building is `python -m reports.build` in a separate process, from its start to its end.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

from cleanba.record import Episode, Rollout, RunInfo, RunWriter, Update, run_name
from cleanba.run.arguments import Count
from experiments.benchmarks import speed
from experiments.benchmarks.case import Case, Column, Values
from experiments.games import ATARI_57

ROOT = Path(__file__).parents[2]
SYSTEMS = ("cleanba_ppo", "cleanba_ppo-sync", "cleanba_impala", "cleanba_impala-sync")
BATCH = 2_400  # agent steps of an update: 120 environments x 20 steps, as in the paper's IMPALA
SECONDS_PER_UPDATE = 0.5


def _updates(count: int) -> list[Update]:
    seconds = {
        "rollout_queue_get_time": 0.15, "params_queue_get_time": 0.02, "rollout_queue_put_time": 0.01,
        "rollout_time": 0.28, "inference_time": 0.15, "env_time": 0.1, "training_time": 0.35,
    }  # fmt: skip
    losses = {"loss": 0.512, "policy_loss": 0.103, "value_loss": 0.411, "entropy": 0.617}
    return [
        Update(
            version=i + 1, step=i * BATCH, wall_time=i * SECONDS_PER_UPDATE,
            update_seconds=SECONDS_PER_UPDATE, learning_rate=1e-3, **losses, grad_norm=0.31, **seconds,
            fingerprint=f"{i:064x}" if i % 100 == 0 or i == count else None,
        )
        for i in range(1, count + 1)
    ]  # fmt: skip


def _rollouts(count: int, updates: int) -> list[Rollout]:
    rows = []
    for i in range(1, count + 1):
        update = -(-i * updates // count)  # the one that learns from it
        version = max(1, update - 1)
        steps = BATCH * updates // count
        rows.append(
            Rollout(
                actor=0, group=i % 2, rollout=update, steps=steps,
                wall_time=update * SECONDS_PER_UPDATE, version_first=version, version_last=version,
                versions=[(version, steps)], learner_version=update,
            )
        )  # fmt: skip
    return rows


def _episodes(returns: np.ndarray, updates: int) -> list[Episode]:
    count = len(returns)
    return [
        Episode(
            step=i * updates * BATCH // count,
            wall_time=i * updates * SECONDS_PER_UPDATE / count,
            env_index=i % 120, episode_return=float(value), length=900,
        )
        for i, value in enumerate(returns, start=1)
    ]  # fmt: skip


def write_records(folder: Path, sizes: "Report") -> None:
    """Write the records of a study whose runs learn at rates of their own, with noise."""
    rng = np.random.default_rng(0)
    rise = 1 - np.exp(-np.linspace(0, 4, sizes.episodes))
    same = [*_updates(sizes.updates), *_rollouts(sizes.rollouts, sizes.updates)]
    for env_id in ATARI_57[: sizes.games]:
        for system in SYSTEMS[: sizes.systems]:
            for seed in range(1, sizes.seeds + 1):
                info = RunInfo(system=system, setting="a0-l0-d1-t1", env_id=env_id, seed=seed)
                path = folder / run_name(system, info.setting, env_id, seed)
                level = 1_000 * rng.lognormal(0, 0.5)
                returns = (level * rise * rng.lognormal(0, 0.3, sizes.episodes)).round()
                with RunWriter(path, info) as record:
                    record.write(*same, *_episodes(returns, sizes.updates))


def measure(sizes: "Report") -> Values:
    """Write records, and time the building of their report; in a fresh process, for its memory."""
    with tempfile.TemporaryDirectory(prefix="report-") as folder:
        runs = Path(folder) / "runs" / "large"
        runs.mkdir(parents=True)
        write_records(runs, sizes)
        size = sum(file.stat().st_size for file in runs.rglob("*.jsonl"))
        command = [sys.executable, "-m", "reports.build", "large"]
        command += ["--runs", str(runs), "--out", str(Path(folder) / "page")]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": paths}
        start = time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
        seconds = time.perf_counter() - start
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        page = (Path(folder) / "page/index.html").stat().st_size
    return {
        "records": sizes.games * sizes.systems * sizes.seeds,
        "megabytes": size / 1e6,
        "seconds": seconds,
        "memory_gib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20,
        "page_megabytes": page / 1e6,
    }


Games = Annotated[int, Meta(ge=1, le=len(ATARI_57), description=f"from 1 to {len(ATARI_57)}")]
Systems = Annotated[int, Meta(ge=1, le=len(SYSTEMS), description=f"from 1 to {len(SYSTEMS)}")]


@dataclass(frozen=True)
class Report:
    """Building the report of a large study."""

    games: Games = 20
    """Games, at most 57."""
    systems: Systems = 4
    """Systems, at most 4."""
    seeds: Count = 3
    """Runs of each system on each game."""
    updates: Count = 1_000
    """Updates of a run."""
    rollouts: Count = 2_000
    """Rollouts of a run."""
    episodes: Count = 4_000
    """Episodes of a run."""

    columns = (
        Column("records", "records"),
        Column("megabytes", "MB"),
        Column("seconds", "seconds", ".1f"),
        Column("memory_gib", "peak memory, GiB", ".1f"),
        Column("page_megabytes", "page, MB", ".1f"),
    )

    def title(self) -> str:
        """Return the line above the table."""
        return (
            f"Report of {self.games} games x {self.systems} systems x {self.seeds} seeds, each run with "
            f"{self.updates:,} updates, {self.rollouts:,} rollouts and {self.episodes:,} episodes"
        )

    def cases(self) -> list[Case]:
        """Return the one case."""
        return [Case("report", partial(speed.in_fresh_process, measure, self))]
