"""What exactness costs: adding by group, recording actions; and how fast a record is replayed.

    python -m experiments.benchmark_exactness --json runs/benchmark_exactness.json

`reduction` trains the same configuration with `--reduction groups` (the default, the same bits on
every layout) and `--reduction psum` (one fused update for each device), on one device and on two, in
the order groups, psum, psum, groups. `actions` times what is done to record the actions of an update
and compares it with the time of an update. `replay` compares `cleanba.replay` with EnvPool alone, on the
same threads. Everything is a ratio within one run.
"""

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cleanba.actions import Frame, GroupDigest, Shape, combine_digests, pack
from cleanba.command_line import run_command_line
from cleanba.environments import describe_env, env_seeds, make_envs
from cleanba.record import find_runs, read_run
from cleanba.replay import verify
from experiments.benchmark import Case, trainer_speed
from experiments.benchmark_results import write_results

# In 4 environment groups, which the default reduction adds and psum fuses.
CASES = (
    Case("impala-breakout-nature", "impala", "Breakout-v5", "nature", 40, num_groups=4),
    Case("ppo-breakout-nature", "ppo", "Breakout-v5", "nature", 20, num_groups=4),
    Case("impala-cartpole", "impala", "CartPole-v1", "mlp", 300, num_groups=4),
    Case("ppo-cartpole", "ppo", "CartPole-v1", "mlp", 150, num_groups=4),
)
REPETITIONS = 3  # of EnvPool alone and of a replay, in turns


def measure_reductions(case: Case) -> dict[str, Any]:
    """Return steps per second by reduction on one learner device and on two."""
    row: dict[str, Any] = {"case": case.name}
    for devices, ids in ((1, ["0"]), (2, ["0", "1"])):
        speeds: dict[str, list[float]] = {"groups": [], "psum": []}
        for reduction in ("groups", "psum", "psum", "groups"):
            flags = ["--reduction", reduction, "--learner-device-ids", *ids]
            with tempfile.TemporaryDirectory() as folder:
                speed = trainer_speed(case, [*flags, "--no-concurrency"], Path(folder))
            speeds[reduction].append(speed)
        groups, psum = (sum(speeds[r]) / 2 for r in ("groups", "psum"))
        row |= {
            f"groups_{devices}": groups,
            f"psum_{devices}": psum,
            f"groups_over_psum_{devices}": groups / psum,
        }
    return row


def seconds_to_record(shape: Shape, num_groups: int, file: Path) -> float:
    """Return the seconds that the actions of one update take: digests, packing, writing."""
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


def envpool_seconds(env_id: str, num_envs: int, threads: int, steps: int) -> float:
    """Return the seconds that EnvPool takes from nothing to so many steps, with random actions."""
    num_actions = describe_env(env_id).num_actions
    rng = np.random.default_rng(0)
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


def measure_record(case: Case) -> dict[str, Any]:
    """Train once, and measure what its actions cost and how fast they are replayed."""
    threads = min(len(os.sched_getaffinity(0)), case.num_envs)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        speed = trainer_speed(case, ["--no-concurrency"], folder)
        (path,) = find_runs(folder)
        run = read_run(path)
        shape = Shape(case.num_steps, case.num_envs, run.info["num_actions"])
        recording = seconds_to_record(shape, case.num_groups, folder / "actions")
        batch = case.num_steps * case.num_envs
        steps = batch * len(run.lines("updates"))
        envpool_time = replay_time = 0.0
        for _ in range(REPETITIONS):
            envpool_time += envpool_seconds(case.env_id, case.num_envs, threads, steps)
            start = time.perf_counter()
            verify(run, threads)
            replay_time += time.perf_counter() - start
    envpool = REPETITIONS * steps / envpool_time
    replay = REPETITIONS * steps / replay_time
    return {
        "case": case.name,
        "bytes_per_step": shape.frame_size / batch,
        "actions_share": recording * speed / batch,
        "envpool": envpool,
        "replay": replay,
        "replay_over_envpool": replay / envpool,
    }


@dataclass(frozen=True)
class Args:
    """What to measure."""

    cases: tuple[Literal["impala-breakout-nature", "ppo-breakout-nature", "impala-cartpole",
                         "ppo-cartpole"], ...] = tuple(case.name for case in CASES)  # fmt: skip
    """Cases, by name."""
    json: str | None = None
    """Write the results to this file too."""


def main(args: Args) -> None:
    """Measure, print tables, and write JSON."""
    cases = [case for case in CASES if case.name in args.cases]
    print("steps per second by reduction (synchronous, 4 environment groups, 16 environments x 20)")
    print(f"{'case':>24}  {'1 device: groups':>17} {'psum':>8} {'ratio':>6}", end="")
    print(f"  {'2 devices: groups':>18} {'psum':>8} {'ratio':>6}")
    reductions = []
    for case in cases:
        row = measure_reductions(case)
        reductions.append(row)
        print(f"{case.name:>24}", end="")
        for devices, width in ((1, 17), (2, 18)):
            groups, psum = row[f"groups_{devices}"], row[f"psum_{devices}"]
            print(f"  {groups:>{width},.0f} {psum:>8,.0f} {groups / psum:>6.2f}", end="")
        print(flush=True)
    print("\nactions in the record, and its replay")
    print(f"{'case':>24}  bytes a step  share of an update  EnvPool SPS  replay SPS  ratio")
    records = []
    for case in cases:
        row = measure_record(case)
        records.append(row)
        print(
            f"{row['case']:>24}  {row['bytes_per_step']:>12.2f}  {row['actions_share']:>18.3%}  "
            f"{row['envpool']:>11,.0f}  {row['replay']:>10,.0f}  {row['replay_over_envpool']:>5.2f}",
            flush=True,
        )
    write_results(args.json, {"reductions": reductions, "records": records})


if __name__ == "__main__":
    run_command_line(Args, main, "What exactness costs.")
