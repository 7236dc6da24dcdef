"""Speed of most systems side by side: the same game, network, environments and cores.

Pong-v5 with the Nature CNN, 16 environments, rollouts of 20 steps; PPO with 4 epochs of 4 minibatches in all
systems. Systems differ in what they learn, so the table compares costs, not quality. `ratio`
is relative to the first measured system of the same algorithm. The first updates of a system, in which it
compiles and starts its processes, are not counted.
"""

import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cleanba.run.arguments import Count
from cleanba.run.flags import flags
from experiments.benchmarks import speed
from experiments.benchmarks.case import Case, Column, Values

ROOT = Path(__file__).parents[2]
WARM_UP_SHARE = 0.3  # of the steps of a run
NUM_ENVS = 16


class Workload(NamedTuple):
    """One system."""

    name: str
    algorithm: str
    command: tuple[str, ...]


def _script(name: str, algorithm: str, path: str, /, **options: object) -> Workload:
    return Workload(name, algorithm, (str(ROOT / path), *_shape(NUM_ENVS), *flags(options)))


def _schemes(scheme: str, algorithm: str, num_workers: int, /, **options: object) -> Workload:
    shape = _shape(NUM_ENVS // num_workers)  # environments of each worker
    words = flags({"scheme": scheme, "agent": algorithm, **options})
    command = ("-m", "baselines.worker_schemes", *shape, *words)
    return Workload(f"schemes_{algorithm}-{scheme}", algorithm, command)


def _shape(num_envs: int) -> list[str]:
    return flags({"env_id": "Pong-v5", "network": "nature", "num_envs": num_envs, "num_steps": 20})


EPOCHS = {"update_epochs": 4, "num_minibatches": 4}
GROUPS = {"num_env_groups": 1, "num_actor_threads": 1}
PPO, IMPALA = "cleanba/cleanba_ppo.py", "cleanba/cleanba_impala.py"
CLEANRL, HTS = "baselines/cleanrl_ppo.py", "baselines/hts_rl.py"
WORKLOADS = (
    _script("cleanba_ppo-sync", "ppo", PPO, **GROUPS, **EPOCHS, concurrency=False),
    _script("cleanba_ppo", "ppo", PPO, **GROUPS, **EPOCHS, concurrency=True),
    _script("cleanrl_ppo", "ppo", CLEANRL, **EPOCHS),
    _script("hts_rl_ppo", "ppo", HTS, algorithm="ppo", **EPOCHS),
    _script("hts_rl_ppo-sync", "ppo", HTS, algorithm="ppo", **EPOCHS, schedule="synchronous"),
    _schemes("single-threaded", "ppo", 1, **EPOCHS),
    _schemes("dppo", "ppo", 2, **EPOCHS),
    _schemes("rapid", "ppo", 4, **EPOCHS),
    _script("cleanba_impala-sync", "impala", IMPALA, **GROUPS, concurrency=False),
    _script("cleanba_impala", "impala", IMPALA, **GROUPS, concurrency=True),
    _schemes("single-threaded", "impala", 1),
    _schemes("impala", "impala", 2),
    _script("hts_rl_a2c", "a2c", HTS, algorithm="a2c"),
    _script("hts_rl_a2c-sync", "a2c", HTS, algorithm="a2c", schedule="synchronous"),
)


def system_speed(workload: Workload, steps: int) -> float:
    """Return the steps per second of a system, after its first updates."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"total_timesteps": steps, "runs_dir": folder, "progress": False}
        command = [sys.executable, *workload.command, *flags(options)]
        updates = speed.run_and_read(command, Path(folder)).updates()
    warm_up = WARM_UP_SHARE * updates[-1].step
    return speed.steps_per_second([row for row in updates if row.step >= warm_up])


def measure(workload: Workload, steps: int, first: dict[str, float]) -> Values:
    """Measure one system.

    Args:
      workload: the system.
      steps: agent steps of its run.
      first: speed of the first system of each algorithm; this system is added if it is the first.
    """
    found = system_speed(workload, steps)
    reference = first.setdefault(workload.algorithm, found)
    return {"algorithm": workload.algorithm, "speed": found, "ratio": found / reference}


@dataclass(frozen=True)
class Systems:
    """Most systems side by side, on Pong."""

    steps: Count = 10_000
    """Agent steps of each run."""

    columns = (
        Column("algorithm", "algorithm", "s"),
        Column("speed", "speed"),
        Column("ratio", "ratio", ".2f"),
    )

    def title(self) -> str:
        """Return the line above the table."""
        return f"Steps per second: Pong-v5, Nature CNN, {NUM_ENVS} environments x 20 steps"

    def cases(self) -> list[Case]:
        """Return a case for each system."""
        first: dict[str, float] = {}
        return [Case(x.name, partial(measure, x, self.steps, first)) for x in WORKLOADS]
