"""What exactness costs: adding gradients by group, and recording the actions.

`reductions` trains with `--reduction groups` (the default, bit-identical on every layout) and with
`--reduction psum` (one fused update for each device), on one learner device and on two. `actions` times what
it takes to record the actions of an update, relative to the update, and the replay of a record
(`cleanba.audit.replay`) relative to EnvPool alone on the same threads. What portable arithmetic costs is in
`trainers`.
"""

import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from cleanba.record import find_runs, read_run
from cleanba.record.actions import Frame, GroupDigest, Shape, combine_digests, pack
from cleanba.run.arguments import Count
from experiments.benchmarks import speed
from experiments.benchmarks.case import Case, Column, Values
from experiments.benchmarks.trainers import Workload, trainer_speed

# In 4 environment groups, which the default reduction adds and psum fuses.
WORKLOADS = (
    Workload("impala-breakout-nature", "impala", "Breakout-v5", "nature", 20, num_groups=4),
    Workload("ppo-cartpole", "ppo", "CartPole-v1", "mlp", 150, num_groups=4),
)


def measure_reductions(workload: Workload) -> Values:
    """Return the steps per second of both reductions, on one learner device and on two."""
    values: Values = {}
    for devices in (1, 2):
        for reduction in ("groups", "psum"):
            options = {"learner_device_ids": tuple(range(devices)), "reduction": reduction}
            with tempfile.TemporaryDirectory() as folder:
                values[f"{reduction}_{devices}"] = trainer_speed(
                    workload, {"concurrency": False, **options}, Path(folder)
                )
        ratio = values[f"groups_{devices}"] / values[f"psum_{devices}"]
        values[f"groups_over_psum_{devices}"] = ratio
    return values


@dataclass(frozen=True)
class Reductions:
    """Gradients added by environment group against one fused update per device."""

    columns = tuple(
        column
        for devices, where in ((1, "1 device"), (2, "2 devices"))
        for column in (
            Column(f"groups_{devices}", f"{where}: groups"),
            Column(f"psum_{devices}", "psum"),
            Column(f"groups_over_psum_{devices}", "ratio", ".2f", ratio=f"groups / psum, {where}"),
        )
    )

    def title(self) -> str:
        """Return the line above the table."""
        return "Steps per second by reduction (synchronous, 4 groups, 16 environments x 20 steps)"

    def cases(self) -> list[Case]:
        """Return a case for each workload."""
        return [Case(x.name, partial(measure_reductions, x)) for x in WORKLOADS]


def seconds_to_record(shape: Shape, num_groups: int, file: Path) -> float:
    """Return the seconds to record the actions of one update: digests, packing, writing."""
    rng = np.random.default_rng(0)
    size = shape.num_envs // num_groups
    actions = rng.integers(0, shape.num_actions, (shape.num_steps, size)).astype(np.int32)
    rewards = rng.normal(size=actions.shape).astype(np.float32)
    dones = np.zeros(actions.shape, bool)
    digests = [GroupDigest() for _ in range(num_groups)]
    updates = 300
    with open(file, "ab") as out:
        start = time.perf_counter()
        for _ in range(updates):
            parts = [digest.update(actions, rewards, dones) for digest in digests]
            whole = np.concatenate([actions] * num_groups, axis=1)
            out.write(pack(Frame(whole, combine_digests(parts)), shape))
            out.flush()
        return (time.perf_counter() - start) / updates


def seconds_of_envpool(env_id: str, num_envs: int, threads: int, steps: int) -> float:
    """Return the seconds of EnvPool alone for a number of steps with random actions, its start included."""
    from cleanba.environments import describe_env, env_seeds, make_envs

    rng = np.random.default_rng(0)
    num_actions = describe_env(env_id).num_actions
    actions = rng.integers(0, num_actions, (1000, num_envs)).astype(np.int32)
    ids = np.arange(num_envs, dtype=np.int32)
    start = time.perf_counter()
    envs = make_envs(env_id, env_seeds(1, 0, num_envs), threads)
    envs.async_reset()
    envs.recv()
    for step in range(steps // num_envs):
        envs.send(actions[step % 1000], ids)
        envs.recv()
    return time.perf_counter() - start


def measure_actions(workload: Workload, repetitions: int) -> Values:
    """Train once, and measure the cost of recording its actions and the speed of their replay."""
    from cleanba.audit.simulation import Simulation
    from cleanba.audit.verification import verify

    threads = min(speed.cores(), workload.num_envs)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trained = trainer_speed(workload, {"concurrency": False}, folder)
        (path,) = find_runs(folder)
        run = read_run(path)
        shape = Shape(workload.num_steps, workload.num_envs, run.info.num_actions)
        recording = seconds_to_record(shape, workload.num_groups, folder / "actions")
        batch = workload.num_steps * workload.num_envs
        steps = batch * len(run.updates())
        envpool_time = replay_time = 0.0
        for _ in range(repetitions):
            envpool_time += seconds_of_envpool(workload.env_id, workload.num_envs, threads, steps)
            start = time.perf_counter()
            verify(run, Simulation(run, threads))
            replay_time += time.perf_counter() - start
    return {
        "bytes_per_step": shape.frame_size / batch,
        "actions_share": recording * trained / batch,
        "envpool": repetitions * steps / envpool_time,
        "replay": repetitions * steps / replay_time,
        "replay_over_envpool": envpool_time / replay_time,
    }


@dataclass(frozen=True)
class Actions:
    """The cost of recording actions, and the speed of replaying them."""

    repetitions: Count = 3
    """Runs of EnvPool alone and of a replay, in turns."""

    columns = (
        Column("bytes_per_step", "bytes a step", ".2f"),
        Column("actions_share", "share of an update", ".3%"),
        Column("envpool", "EnvPool SPS"),
        Column("replay", "replay SPS"),
        Column("replay_over_envpool", "ratio", ".2f", ratio="replay / EnvPool alone"),
    )

    def title(self) -> str:
        """Return the line above the table."""
        return "Recorded actions, and their replay"

    def cases(self) -> list[Case]:
        """Return a case for each workload."""
        return [Case(x.name, partial(measure_actions, x, self.repetitions)) for x in WORKLOADS]
