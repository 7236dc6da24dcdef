"""Speed of most systems side by side: the same game, network, environments and cores.

Pong-v5, 16 environments, rollouts of 20 steps; PPO with 4 epochs of 4 minibatches in all systems. Systems
differ in what they learn, so the table compares costs, not quality. The ratio is the speed of the first
system of the same algorithm and network, which is Cleanba's (A2C: HTS-RL's), relative to this system's. The
first updates of a system, in which it compiles and starts its processes, are not counted.
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
SPEED_OF_RESNET = 0.5  # roughly, relative to the Nature CNN: its runs are shorter


class Workload(NamedTuple):
    """One system."""

    name: str
    algorithm: str
    network: str
    command: tuple[str, ...]  # without the number of steps
    steps_flag: str = "total_timesteps"


def _script(name: str, algorithm: str, path: str, /, network: str, **options: object) -> Workload:
    words = flags({"network": network, **options})
    return Workload(name, algorithm, network, (str(ROOT / path), *_shape(NUM_ENVS), *words))


def _schemes(scheme: str, algorithm: str, num_workers: int, /, **options: object) -> Workload:
    shape = _shape(NUM_ENVS // num_workers)  # environments of each worker
    words = flags({"network": "nature", "scheme": scheme, "agent": algorithm, **options})
    command = ("-m", "baselines.worker_schemes", *shape, *words)
    return Workload(f"schemes_{algorithm}-{scheme}", algorithm, "nature", command)


def _shape(num_envs: int) -> list[str]:
    return flags({"env_id": "Pong-v5", "num_envs": num_envs, "num_steps": 20})


def _monobeast(network: str) -> Workload:
    options = {"num_actors": NUM_ENVS, "num_learner_threads": 2}
    return _torch_impala("monobeast", network, str(ROOT / "baselines/monobeast_study.py"), options)


def _moolib(network: str) -> Workload:
    # two batches of environments, one acting while the other steps
    options = {"actor_batch_size": NUM_ENVS // 2, "virtual_batch_size": 8}
    return _torch_impala("moolib", network, "-m baselines.moolib_atari", options)


def _torch_impala(name: str, network: str, program: str, options: dict[str, object]) -> Workload:
    shape = {"env": "Pong-v5", "network": network, "unroll_length": 20, "batch_size": 8}
    command = (*program.split(" "), *flags(shape | options))
    return Workload(f"{name}_{network}", "impala", network, command, "total_steps")


EPOCHS = {"update_epochs": 4, "num_minibatches": 4}
GROUPS = {"num_env_groups": 1, "num_actor_threads": 1}
PPO, IMPALA = "cleanba/cleanba_ppo.py", "cleanba/cleanba_impala.py"
CLEANRL, HTS = "baselines/cleanrl_ppo.py", "baselines/hts_rl.py"
NATURE, RESNET = {"network": "nature"}, {"network": "resnet"}
SYNCHRONOUS = {"schedule": "synchronous"}
WORKLOADS = (
    _script("cleanba_ppo-sync", "ppo", PPO, **NATURE, **GROUPS, **EPOCHS, concurrency=False),
    _script("cleanba_ppo", "ppo", PPO, **NATURE, **GROUPS, **EPOCHS, concurrency=True),
    _script("cleanrl_ppo", "ppo", CLEANRL, **NATURE, **EPOCHS),
    _script("hts_rl_ppo", "ppo", HTS, **NATURE, algorithm="ppo", **EPOCHS),
    _schemes("single-threaded", "ppo", 1, **EPOCHS),
    _schemes("rapid", "ppo", 4, **EPOCHS),
    _script("cleanba_impala", "impala", IMPALA, **NATURE, **GROUPS, concurrency=True),
    _monobeast("nature"),
    _moolib("nature"),
    _schemes("single-threaded", "impala", 1),
    _schemes("impala", "impala", 2),
    _script("cleanba_impala_resnet", "impala", IMPALA, **RESNET, **GROUPS, concurrency=True),
    _monobeast("resnet"),
    _moolib("resnet"),
    _script("hts_rl_a2c", "a2c", HTS, **NATURE, algorithm="a2c"),
    _script("hts_rl_a2c-sync", "a2c", HTS, **NATURE, algorithm="a2c", **SYNCHRONOUS),
)


def system_speed(workload: Workload, steps: int) -> float:
    """Return the steps per second of a system, after its first updates."""
    with tempfile.TemporaryDirectory() as folder:
        options = {workload.steps_flag: steps, "runs_dir": folder, "progress": False}
        command = [sys.executable, *workload.command, *flags(options)]
        updates = speed.run_and_read(command, Path(folder)).updates()
    warm_up = WARM_UP_SHARE * updates[-1].step
    return speed.steps_per_second([row for row in updates if row.step >= warm_up])


def measure(workload: Workload, steps: int, first: dict[tuple[str, str], float]) -> Values:
    """Measure one system.

    Args:
      workload: the system.
      steps: agent steps of its run with the Nature CNN.
      first: speed of the first system of each algorithm and network; this system is added if it is the first.
    """
    steps = int(steps * (SPEED_OF_RESNET if workload.network == "resnet" else 1))
    found = system_speed(workload, steps)
    reference = first.setdefault((workload.algorithm, workload.network), found)
    return {
        "algorithm": workload.algorithm,
        "network": workload.network,
        "speed": found,
        "ratio": reference / found,
    }


@dataclass(frozen=True)
class Systems:
    """Most systems side by side, on Pong."""

    steps: Count = 5_000
    """Agent steps of each run; half with the ResNet."""

    columns = (
        Column("algorithm", "algorithm", "s"),
        Column("network", "network", "s"),
        Column("speed", "speed"),
        Column("ratio", "ratio", ".2f", ratio="the first's speed / this system's"),
    )

    def title(self) -> str:
        """Return the line above the table."""
        return (
            f"Steps per second: Pong-v5, {NUM_ENVS} environments x 20 steps, {self.steps:,} steps a run; "
            "ratio: the speed of the first system of the algorithm and network, relative to this one's"
        )

    def cases(self) -> list[Case]:
        """Return a case for each system."""
        first: dict[tuple[str, str], float] = {}
        return [Case(x.name, partial(measure, x, self.steps, first)) for x in WORKLOADS]
