"""HTS-RL against the synchronous baseline of the same code, measured and predicted.

Environments are CartPole's with exponentially distributed step times, as in figure 4 of the paper
(arXiv 2012.09849). Claim 1 of the paper gives the time to collect data
(`analysis.queueing.expected_run_time`): the synchronous system waits for the slowest environment at every
step and learns afterwards; HTS-RL waits at every synchronization and learns at the same time. The model
predicts this waiting. The rest of a step's time is measured: for the synchronous system in a run without
delays, for HTS-RL in the run itself, because without delays its processes would wait for CPU cores.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from analysis.queueing import expected_run_time
from cleanba.run.arguments import Count, Positive
from cleanba.run.flags import flags
from experiments.benchmarks import speed
from experiments.benchmarks.case import Case, Column, Values

SCRIPT = Path(__file__).parents[2] / "baselines" / "hts_rl.py"
WARM_UP_UPDATES = 3
NUM_ENVS = 16
NUM_STEPS = 128  # of PPO, and by default between two synchronizations


class Speed(NamedTuple):
    """Speed and times of a run, after its first updates."""

    sps: float
    rollout_time: float  # seconds to fill a storage
    training_time: float  # seconds of an update
    step_time: float  # mean seconds between two steps of an environment, delay included


def measure_run(schedule: str, delay: float, updates: int, num_actors: int) -> Speed:
    """Train, and return the speed.

    Args:
      schedule: `synchronous` or `hts`.
      delay: mean step time of the environments, seconds.
      updates: to time, after the first ones.
      num_actors: actor processes of HTS-RL.
    """
    # HTS-RL collects nothing during its last update, so that one is not timed.
    steps = NUM_ENVS * NUM_STEPS * (WARM_UP_UPDATES + updates + 1)
    options = {
        "env_id": "CartPole-v1",
        "algorithm": "ppo",
        "schedule": schedule,
        "num_envs": NUM_ENVS,
        "num_steps": NUM_STEPS,
        "num_actors": num_actors,
        "total_timesteps": steps,
        "step_delay_seconds": delay,
        "progress": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPT), *flags(options | {"runs_dir": folder})]
        rows = speed.run_and_read(command, Path(folder)).updates()[:-1]
    timed = rows[WARM_UP_UPDATES:]

    def mean(*names: str) -> float:
        return float(np.mean([sum(getattr(row, name) for name in names) for row in timed]))

    return Speed(
        sps=speed.steps_per_second(rows[WARM_UP_UPDATES - 1 :]),
        rollout_time=mean("rollout_time"),
        training_time=mean("training_time"),
        step_time=mean("inference_time", "env_time") / NUM_STEPS,
    )


def predicted_sps(
    interval: int, delay: float, overhead: float, update: float, overlap: bool
) -> float:
    """Return the speed that claim 1 leads to.

    Args:
      interval: steps between two synchronizations.
      delay: mean of the exponential step time, seconds.
      overhead: seconds of a step beyond its delay.
      update: seconds of an update.
      overlap: whether updates and rollouts take place at the same time, or in turn.
    """
    states = NUM_ENVS * NUM_STEPS
    collecting = expected_run_time(states, NUM_ENVS, interval, 1.0, 1 / delay, overhead)
    return states / (max(collecting, update) if overlap else collecting + update)


def measure(
    delay: float, updates: int, num_actors: int, without_delay: Callable[[], Speed]
) -> Values:
    """Measure both schedules at one mean step time, and predict both."""
    plain = without_delay()
    synchronous = measure_run("synchronous", delay, updates, num_actors)
    hts = measure_run("hts", delay, updates, num_actors)
    synchronous_predicted = predicted_sps(
        1, delay, plain.rollout_time / NUM_STEPS, plain.training_time, overlap=False
    )
    overhead = max(hts.step_time - delay, 0.0)
    hts_predicted = predicted_sps(NUM_STEPS, delay, overhead, hts.training_time, overlap=True)
    ratio, predicted = hts.sps / synchronous.sps, hts_predicted / synchronous_predicted
    return {
        "delay": delay,
        "synchronous_without_delay": plain.sps,
        "synchronous": synchronous.sps,
        "synchronous_predicted": synchronous_predicted,
        "hts": hts.sps,
        "hts_predicted": hts_predicted,
        "ratio": ratio,
        "ratio_predicted": predicted,
        "error": ratio / predicted - 1,
    }


@dataclass(frozen=True)
class Hts:
    """HTS-RL against its synchronous baseline, measured and predicted."""

    delays: tuple[Positive, ...] = (0.01,)
    """Mean step times in seconds; the standard deviations of the exponential distribution, too."""
    updates: Count = 6
    """Updates that each run is timed for, after the first 3."""
    num_actors: Count = 2
    """Actor processes of HTS-RL."""

    columns = (
        Column("synchronous_without_delay", "no delay"),
        Column("synchronous", "synchronous"),
        Column("synchronous_predicted", "predicted"),
        Column("hts", "HTS-RL"),
        Column("hts_predicted", "predicted"),
        Column("ratio", "ratio", ".2f", ratio="HTS-RL / synchronous"),
        Column("ratio_predicted", "predicted", ".2f"),
        Column("error", "error", "+.0%"),
    )

    def title(self) -> str:
        """Return the line above the table."""
        return (
            f"Steps per second by mean step time: PPO on CartPole-v1, {NUM_ENVS} environments x "
            f"{NUM_STEPS} steps, {self.num_actors} actors (no delay: synchronous)"
        )

    def cases(self) -> list[Case]:
        """Return a case for each mean step time; all share one run without delays."""
        sizes = (self.updates, self.num_actors)
        without_delay = cache(partial(measure_run, "synchronous", 0.0, *sizes))
        return [Case(f"{d:g}s", partial(measure, d, *sizes, without_delay)) for d in self.delays]
