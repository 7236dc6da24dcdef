"""How much faster HTS-RL is than the synchronous baseline of the same code, and how much it should be.

    python -m experiments.benchmark_hts --json runs/benchmark_hts.json

Environments are CartPole's with exponentially distributed step times, as in the paper's figure 4. Claim 1 of
the paper says how long it takes to collect data (`analysis.queueing.expected_run_time`); the synchronous
system waits for the slowest environment at every step and learns afterwards, HTS-RL waits at every
synchronisation and learns meanwhile. What is predicted is this waiting. What a step costs beside its delay
is measured: for the synchronous system in a run without delays, for HTS-RL in the run itself, because
without delays its processes would wait for the cores.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from analysis.queueing import expected_run_time
from cleanba.command_line import BadInput, run_command_line
from cleanba.record import read_run
from experiments.benchmark_results import write_results

SKIPPED_UPDATES = 3
NUM_ENVS = 16
NUM_STEPS = 128  # of PPO, and by default of a synchronisation


@dataclass(frozen=True)
class Args:
    """What to measure."""

    delays: tuple[float, ...] = (0.005, 0.01, 0.02)
    """Mean step times, in seconds: the standard deviations of the exponential distribution, too."""
    updates: int = 8
    """Updates that each run is timed for, after the first 3."""
    num_actors: int = 2
    """Actor processes of HTS-RL."""
    json: str | None = None
    """Write the results to this file too."""


class Speed(NamedTuple):
    """What a run did, after its first updates."""

    sps: float
    rollout_time: float  # seconds to fill a storage
    training_time: float  # seconds of an update
    step_time: float  # mean seconds between two steps of an environment, delay included


def measure(schedule: str, delay: float, args: Args) -> Speed:
    """Time a run."""
    # Nothing is collected beside the last update of HTS-RL, so that one is not timed.
    steps = NUM_ENVS * NUM_STEPS * (SKIPPED_UPDATES + args.updates + 1)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, str(Path(__file__).parents[1] / "baselines" / "hts_rl.py"),
            "--env-id", "CartPole-v1", "--algorithm", "ppo", "--schedule", schedule,
            "--num-envs", str(NUM_ENVS), "--num-steps", str(NUM_STEPS), "--num-actors",
            str(args.num_actors), "--total-timesteps", str(steps), "--step-delay-seconds",
            str(delay), "--runs-dir", folder, "--no-progress",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
        (path,) = Path(folder).glob("*/*")
        updates = read_run(path).lines("updates")
    first, timed = updates[SKIPPED_UPDATES - 1], updates[SKIPPED_UPDATES:-1]

    def mean(*names: str) -> float:
        return float(np.mean([sum(update[name] for name in names) for update in timed]))

    return Speed(
        sps=(timed[-1]["step"] - first["step"]) / (timed[-1]["wall_time"] - first["wall_time"]),
        rollout_time=mean("rollout_time"),
        training_time=mean("training_time"),
        step_time=mean("inference_time", "env_time") / NUM_STEPS,
    )


def predicted_sps(
    interval: int, delay: float, overhead: float, update: float, overlap: bool
) -> float:
    """Return the speed that claim 1 leads to.

    Args:
      interval: steps between two synchronisations.
      delay: mean of the exponential step time, seconds.
      overhead: seconds that a step takes beside it.
      update: seconds that an update takes.
      overlap: whether updates and rollouts take place at once, or in turn.
    """
    states = NUM_ENVS * NUM_STEPS
    collecting = expected_run_time(states, NUM_ENVS, interval, 1.0, 1 / delay, overhead)
    return states / (max(collecting, update) if overlap else collecting + update)


def main(args: Args) -> None:
    """Measure, print a table, and write JSON."""
    if args.updates < 1 or not args.delays or min(args.delays) <= 0:
        raise BadInput("--updates must be 1 or more, and --delays more than 0")
    plain = measure("synchronous", 0.0, args)
    print(
        f"steps per second on {len(os.sched_getaffinity(0))} cores: PPO on CartPole-v1, {NUM_ENVS} "
        f"environments x {NUM_STEPS} steps, {args.num_actors} actors; without delays, synchronous: "
        f"{plain.sps:,.0f}"
    )
    columns = ("synchronous", "predicted", "HTS-RL", "predicted", "ratio", "predicted", "error")
    print(f"{'step time':>10}" + "".join(f"{column:>13}" for column in columns))
    rows = []
    for delay in args.delays:
        together, apart = measure("synchronous", delay, args), measure("hts", delay, args)
        of_step = plain.rollout_time / NUM_STEPS
        slow = predicted_sps(1, delay, of_step, plain.training_time, overlap=False)
        rest = max(apart.step_time - delay, 0.0)
        fast = predicted_sps(NUM_STEPS, delay, rest, apart.training_time, overlap=True)
        ratio, predicted = apart.sps / together.sps, fast / slow
        rows.append(
            {
                "delay": delay, "synchronous": together._asdict(), "hts": apart._asdict(),
                "synchronous_predicted": slow, "hts_predicted": fast,
                "ratio": ratio, "ratio_predicted": predicted,
            }
        )  # fmt: skip
        cells = (f"{x:,.0f}" for x in (together.sps, slow, apart.sps, fast))
        shares = (f"{ratio:.2f}", f"{predicted:.2f}", f"{ratio / predicted - 1:+.0%}")
        print(f"{delay:>9g}s" + "".join(f"{cell:>13}" for cell in (*cells, *shares)), flush=True)
    write_results(args.json, {"without_delay": plain._asdict(), "rows": rows})


if __name__ == "__main__":
    run_command_line(
        Args, main, "Speed of HTS-RL against its synchronous baseline, and as predicted."
    )
