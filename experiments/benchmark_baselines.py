"""Speed of the torch baselines against the ceilings of the machine, measured in one run.

    python -m experiments.benchmark_baselines --json runs/benchmark_baselines.json

For each case it times, in a fresh process, EnvPool with random actions, forward passes alone and gradients
alone, at the shapes that the baseline uses, and then the baseline. Done one after the other, those parts
would allow 1 / (1 / environments + 1 / forward + (T + 1) / T / gradients) steps per second; both baselines
let some of them overlap. monobeast's forward passes are of one observation each: its actors share nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro

from cleanba.command_line import run_command_line
from experiments.benchmark import calls_per_second, ceiling_of
from experiments.benchmark_results import check_cases, write_results

ROOT = Path(__file__).parents[1]
SKIPPED_UPDATES = 4


class Case(NamedTuple):
    """One baseline on one network."""

    name: str
    env_id: str
    network: str
    num_envs: int  # stepped by one EnvPool
    unroll_length: int
    batch_size: int
    steps: int
    command: tuple[str, ...]


def _monobeast(network: str, steps: int) -> Case:
    flags = ("--num_actors", "8", "--num_learner_threads", "2")
    command = (str(ROOT / "baselines" / "monobeast_study.py"), *flags)
    return Case(f"monobeast-{network}", "Pong-v5", network, 1, 80, 8, steps, command)


def _moolib(network: str, steps: int) -> Case:
    flags = ("--actor-batch-size", "8", "--virtual-batch-size", "8")
    command = ("-m", "baselines.moolib_atari", *flags)
    return Case(f"moolib-{network}", "Pong-v5", network, 8, 20, 8, steps, command)


CASES = (
    _monobeast("nature", 40_000),
    _monobeast("resnet", 10_000),
    _moolib("nature", 40_000),
    _moolib("resnet", 10_000),
)


def measure_ceilings(case: Case) -> dict[str, float]:
    """Time the parts of a baseline, each alone, in this process; see `experiments.benchmark`."""
    import torch

    from baselines import monobeast_study
    from baselines.torch_networks import make_network
    from cleanba.environments import describe_env, env_seeds, make_envs

    spec = describe_env(case.env_id)
    rng = np.random.default_rng(0)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    envs = make_envs(case.env_id, env_seeds(1, 0, 16), min(cores, 16))
    ids = np.arange(16, dtype=np.int32)
    actions = rng.integers(0, spec.num_actions, (1000, 16)).astype(np.int32)
    envs.async_reset()
    turn = iter(range(10**9))

    def step_environments() -> None:
        envs.recv()
        envs.send(actions[next(turn) % 1000], ids)

    env = calls_per_second(step_environments) * 16
    network = make_network(case.network, spec.obs_shape, spec.num_actions)
    shape = (case.unroll_length + 1, case.batch_size)
    obs = torch.from_numpy(rng.integers(0, 255, (*shape, *spec.obs_shape)).astype(np.uint8))
    with torch.inference_mode():
        few = obs[0, : case.num_envs]
        forward = calls_per_second(lambda: network(few)) * case.num_envs
    batch = monobeast_study.Batch(
        obs=obs,
        rewards=torch.zeros(shape),
        dones=torch.zeros(shape, dtype=torch.bool),
        last_actions=torch.zeros(shape, dtype=torch.int64),
        logits=torch.zeros(case.unroll_length, case.batch_size, spec.num_actions),
        core_state=None,
    )
    args = monobeast_study.Args()
    gradient = calls_per_second(lambda: monobeast_study.compute_gradient(network, batch, args))
    images = shape[0] * shape[1]
    per_step = shape[0] / case.unroll_length
    return {
        "env": env,
        "forward": forward,
        "gradient": gradient * images,
        "gradients_per_step": per_step,
    }


def baseline_speed(case: Case) -> float:
    """Return the steps per second of a baseline, after its first updates."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "--env": case.env_id, "--network": case.network, "--unroll-length": case.unroll_length,
            "--batch-size": case.batch_size, "--total-steps": case.steps, "--runs-dir": folder,
        }  # fmt: skip
        words = [str(word) for pair in flags.items() for word in pair]
        command = [sys.executable, *case.command, *words, "--no-progress"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
        (path,) = Path(folder).glob("*/*/updates.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    first, last = rows[SKIPPED_UPDATES - 1], rows[-1]
    return (last["step"] - first["step"]) / (last["wall_time"] - first["wall_time"])


@dataclass(frozen=True)
class Args:
    """What to measure."""

    cases: tuple[str, ...] = tuple(case.name for case in CASES)
    """Cases, by name."""
    json: str | None = None
    """Write the results to this file too."""
    ceilings_only: Annotated[bool, tyro.conf.arg(help="Print the ceilings of one case.")] = False


def main(args: Args) -> None:
    """Measure, print a table, and write JSON."""
    by_name = {case.name: case for case in CASES}
    check_cases(args.cases, by_name)
    if args.ceilings_only:
        print(json.dumps(measure_ceilings(by_name[args.cases[0]])))
        return
    columns = ("env", "forward", "gradient", "ceiling", "baseline", "ratio")
    print(f"steps per second on {len(os.sched_getaffinity(0))} cores, Pong-v5")
    print(f"{'case':>18}" + "".join(f"{column:>10}" for column in columns))
    results = []
    for name in args.cases:
        words = [sys.executable, "-m", "experiments.benchmark_baselines", "--ceilings-only"]
        done = subprocess.run([*words, "--cases", name], check=True, capture_output=True, text=True)
        parts = json.loads(done.stdout.splitlines()[-1])
        ceiling, speed = ceiling_of(parts), baseline_speed(by_name[name])
        row = {**parts, "ceiling": ceiling, "baseline": speed, "ratio": speed / ceiling}
        results.append({"case": name, **row})
        cells = [
            f"{row[column]:,.2f}" if column == "ratio" else f"{row[column]:,.0f}"
            for column in columns
        ]
        print(f"{name:>18}" + "".join(f"{cell:>10}" for cell in cells), flush=True)
    write_results(args.json, results)


if __name__ == "__main__":
    run_command_line(
        Args, main, "Speed of the torch baselines against the ceilings of the machine."
    )
