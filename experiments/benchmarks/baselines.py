"""The torch baselines monobeast and moolib against the ceilings of the machine.

For each case the parts are timed alone, in a fresh process and at the baseline's shapes: EnvPool with random
actions, inference, and gradients. Then the baseline is timed. Parts that take turns allow

    ceiling = 1 / (1 / environments + 1 / forward + (T + 1) / T / gradient)   steps per second

with rollouts of T steps, forward in observations and gradient in images per second; both baselines overlap
some of them. monobeast's inference is of one observation at a time: each actor has its own network.
"""

import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cleanba.run.arguments import Positive
from cleanba.run.flags import flags
from experiments.benchmarks import speed
from experiments.benchmarks.case import Case, Column, Values

ROOT = Path(__file__).parents[2]
WARM_UP_UPDATES = 4
NUM_ENVS = 16  # that EnvPool alone is timed with


class Workload(NamedTuple):
    """One baseline on one network."""

    name: str
    env_id: str
    network: str
    num_envs: int  # observations of one inference call
    unroll_length: int
    batch_size: int
    steps: int
    command: tuple[str, ...]


def _monobeast(network: str, steps: int) -> Workload:
    options = {"num_actors": 8, "num_learner_threads": 2}
    command = (str(ROOT / "baselines" / "monobeast_study.py"), *flags(options))
    return Workload(f"monobeast-{network}", "Pong-v5", network, 1, 80, 8, steps, command)


def _moolib(network: str, steps: int) -> Workload:
    options = {"actor_batch_size": 8, "virtual_batch_size": 8}
    command = ("-m", "baselines.moolib_atari", *flags(options))
    return Workload(f"moolib-{network}", "Pong-v5", network, 8, 20, 8, steps, command)


WORKLOADS = (
    _monobeast("nature", 20_000),
    _moolib("nature", 20_000),
)


def measure_parts(workload: Workload, seconds: float) -> dict[str, float]:
    """Time the parts of a baseline, each alone, in this process.

    Args:
      workload: environment and shapes.
      seconds: to time each part for.

    Returns:
      `env` in steps, `forward` in observations and `gradient` in images per second, and
      `gradients_per_step`, images per step.
    """
    import torch

    from baselines.torch_networks import make_network
    from cleanba.environments import describe_env

    spec = describe_env(workload.env_id)
    torch.set_num_threads(speed.cores())
    env = speed.environment_speed(workload.env_id, NUM_ENVS, 1, seconds)
    network = make_network(workload.network, spec.obs_shape, spec.num_actions)
    obs = torch.from_numpy(speed.random_observations(spec, workload.num_envs))
    with torch.inference_mode():
        forward = speed.calls_per_second(lambda: network(obs), seconds)
    shape = (workload.unroll_length + 1, workload.batch_size)
    return {
        "env": env,
        "forward": forward * workload.num_envs,
        "gradient": speed.torch_gradients(network, spec, shape, seconds),
        "gradients_per_step": shape[0] / workload.unroll_length,
    }


def measure(workload: Workload, seconds: float) -> Values:
    """Measure one case: the parts, and the baseline."""
    parts = speed.in_fresh_process(measure_parts, workload, seconds)
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "env": workload.env_id,
            "network": workload.network,
            "unroll_length": workload.unroll_length,
            "batch_size": workload.batch_size,
            "total_steps": workload.steps,
            "runs_dir": folder,
            "progress": False,
        }
        command = [sys.executable, *workload.command, *flags(options)]
        updates = speed.run_and_read(command, Path(folder)).updates()
    baseline = speed.steps_per_second(updates[WARM_UP_UPDATES - 1 :])
    ceiling = speed.ceiling(parts)
    return {**parts, "ceiling": ceiling, "baseline": baseline, "ratio": baseline / ceiling}


@dataclass(frozen=True)
class Baselines:
    """The torch baselines against the ceilings of the machine."""

    seconds: Positive = 1.5
    """Seconds that each part is timed for."""

    columns = (
        Column("env", "env"),
        Column("forward", "forward"),
        Column("gradient", "gradient"),
        Column("ceiling", "ceiling"),
        Column("baseline", "baseline"),
        Column("ratio", "ratio", ".2f", ratio="baseline / ceiling"),
    )

    def title(self) -> str:
        """Return the line above the table."""
        return "Steps per second, Pong-v5"

    def cases(self) -> list[Case]:
        """Return a case for each workload."""
        return [Case(x.name, partial(measure, x, self.seconds)) for x in WORKLOADS]
