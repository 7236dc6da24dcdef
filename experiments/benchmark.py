"""Speed of the trainers against the ceilings of the machine, measured in one run.

    python -m experiments.benchmark --json runs/benchmark.json

For each case it times, in fresh processes: EnvPool with random actions, the trainer's forward pass
alone, its gradient alone (all at the shapes that the trainer uses), the trainer itself, and the
ceilings again. Done one after the other, those parts would allow

    1 / (1 / environments + 1 / forward + gradients per step / gradient)   steps per second,

and a trainer that lets them overlap can exceed it. Ratios within one run are what to compare:
absolute numbers drift with what else the machine does.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from cleanba.command_line import run_command_line
from experiments.benchmark_results import check_cases, write_results


class Case(NamedTuple):
    """One trainer, 16 environments in one group x 20 steps, 4 minibatches (PPO: 4 epochs)."""

    name: str
    algorithm: str
    env_id: str
    network: str
    updates: int  # that the trainer is timed for, after the first 4
    num_groups: int = 1
    num_envs: int = 16
    num_steps: int = 20


CASES = (
    Case("impala-breakout-nature", "impala", "Breakout-v5", "nature", 60),
    Case("ppo-breakout-nature", "ppo", "Breakout-v5", "nature", 24),
    Case("impala-breakout-resnet", "impala", "Breakout-v5", "resnet", 16),
    Case("ppo-breakout-resnet", "ppo", "Breakout-v5", "resnet", 6),
    Case("impala-cartpole", "impala", "CartPole-v1", "mlp", 300),
    Case("ppo-cartpole", "ppo", "CartPole-v1", "mlp", 100),
)
WARM_UP_UPDATES = 4
SECONDS_PER_CEILING = 3.0


def _arguments(case: Case) -> list[str]:
    return [
        "--env-id", case.env_id, "--network", case.network, "--num-envs", str(case.num_envs),
        "--num-env-groups", str(case.num_groups), "--num-steps", str(case.num_steps),
        "--num-actor-threads", "1", "--no-progress", "--fingerprint-every", "1000000",
    ]  # fmt: skip


def calls_per_second(call: Callable[[], Any], seconds: float = SECONDS_PER_CEILING) -> float:
    """Return how often per second a call can be made, after three that are not timed."""
    for _ in range(3):
        call()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        call()
        calls += 1
    return calls / (time.perf_counter() - start)


def measure_ceilings(case: Case, pool_size: int) -> dict[str, float]:
    """Time the parts of a trainer, each alone, in this process.

    Returns:
      Steps per second of `env`, `forward` and `gradient` (images or transitions per second), and
      `gradients_per_step`.
    """
    import jax

    from cleanba import cleanba_impala, cleanba_ppo, training
    from cleanba.actor_learner import GroupRollout
    from cleanba.command_line import parse
    from cleanba.environments import env_seeds, make_envs
    from cleanba.preparation import prepare_run
    from cleanba.reduction import make_gradient

    trainer = {"ppo": cleanba_ppo, "impala": cleanba_impala}[case.algorithm]
    is_ppo = case.algorithm == "ppo"
    with tempfile.TemporaryDirectory() as folder:
        argv = [*_arguments(case), "--total-timesteps", "100000", "--runs-dir", folder]
        argv += ["--xla-cpu-pool-size", str(pool_size)]
        args = parse(trainer.Args, argv, "")
        setup = prepare_run(
            args,
            name="bench",
            default_num_envs=case.num_envs,
            units_per_env=case.num_steps if is_ppo else 1,
            images_per_unit=1 if is_ppo else case.num_steps + 1,
        )
    rng = np.random.default_rng(0)
    size = setup.group_size
    threads = min(len(os.sched_getaffinity(0)), size)
    groups = [
        make_envs(case.env_id, env_seeds(1, g * size, size), threads)
        for g in range(case.num_groups)
    ]
    ids = np.arange(size, dtype=np.int32)
    actions = rng.integers(0, setup.spec.num_actions, (1000, size)).astype(np.int32)
    for envs in groups:
        envs.async_reset()
    turn = iter(range(10**9))

    def step_environments() -> None:
        for envs in groups:
            envs.recv()
            envs.send(actions[next(turn) % 1000], ids)

    env = calls_per_second(step_environments) * case.num_envs
    params = training.initial_params(setup)
    device = jax.local_devices()[0]
    params = jax.device_put(params, device)
    if setup.spec.obs_dtype == np.uint8:
        all_obs = rng.integers(0, 255, (case.num_steps + 1, size, *setup.spec.obs_shape))
    else:
        all_obs = rng.normal(size=(case.num_steps + 1, size, *setup.spec.obs_shape))
    all_obs = all_obs.astype(setup.spec.obs_dtype)
    act = trainer.make_act(setup.network)
    key = jax.device_put(jax.random.key(0), device)
    step = jax.device_put(np.int32(0), device)
    forward = calls_per_second(lambda: np.asarray(act(params, all_obs[0], key, step)[0])) * size
    shape = (case.num_steps, size)
    logits = rng.normal(size=(*shape, setup.spec.num_actions)).astype(np.float32)
    value = rng.normal(size=shape).astype(np.float32)
    rollout = GroupRollout(
        obs=all_obs,
        dones=np.zeros((case.num_steps + 1, size), bool),
        actions=rng.integers(0, setup.spec.num_actions, shape).astype(np.int32),
        rewards=value,
        behaviour=cleanba_ppo.Behaviour(value, value) if is_ppo else logits,
    )
    rollout = jax.device_put(rollout, device)
    gradient, _ = make_gradient(trainer.make_minibatches(args, setup)[0])
    if is_ppo:
        batch, moments = trainer.make_prepare(setup.network, args)(
            params, rollout, key, np.int32(1)
        )
        inputs = (batch, moments, np.int32(0), np.int32(0))
        images, per_step = setup.microbatch_size, float(args.update_epochs)
    else:
        inputs = (rollout, (), np.int32(0), np.int32(0))
        images = setup.microbatch_size * (case.num_steps + 1)
        per_step = (case.num_steps + 1) / case.num_steps
    gradients = calls_per_second(lambda: jax.block_until_ready(gradient(params, *inputs))) * images
    return {
        "env": env,
        "forward": forward,
        "gradient": gradients,
        "gradients_per_step": per_step,
    }


def ceiling_of(parts: dict[str, float]) -> float:
    """Return the steps per second that the parts allow one after the other."""
    seconds = 1 / parts["env"] + 1 / parts["forward"]
    return 1 / (seconds + parts["gradients_per_step"] / parts["gradient"])


def trainer_speed(case: Case, flags: list[str], folder: Path, seconds_limit: float = 900) -> float:
    """Train a case with some flags, recording into a folder.

    Returns:
      Steps per second, after the first updates.
    """
    batch = case.num_envs * case.num_steps
    script = Path(__file__).parents[1] / "cleanba" / f"cleanba_{case.algorithm}.py"
    command = [
        sys.executable, str(script), *_arguments(case), *flags, "--runs-dir", str(folder),
        "--total-timesteps", str(batch * (case.updates + WARM_UP_UPDATES)),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds_limit)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
    (path,) = folder.glob("*/*/updates.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    first, last = rows[WARM_UP_UPDATES - 1], rows[-1]
    return (last["step"] - first["step"]) / (last["wall_time"] - first["wall_time"])


def measure_trainer(case: Case, architecture: str, pool_size: int) -> float:
    """Return the steps per second of a trainer, after its first updates."""
    flags = [architecture, "--xla-cpu-pool-size", str(pool_size)]
    with tempfile.TemporaryDirectory() as folder:
        return trainer_speed(case, flags, Path(folder))


def _ceilings_in_a_process(case: Case, pool_size: int) -> dict[str, float]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "experiments.benchmark",
            "--cases",
            case.name,
            "--ceilings-only",
            "--pool-sizes",
            str(pool_size),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(case: Case, pool_size: int) -> dict[str, Any]:
    """Measure one case: ceilings, the trainer in both architectures, and the ceilings again."""
    before = _ceilings_in_a_process(case, pool_size)
    cleanba = measure_trainer(case, "--concurrency", pool_size)
    synchronous = measure_trainer(case, "--no-concurrency", pool_size)
    after = _ceilings_in_a_process(case, pool_size)
    parts = {k: (before[k] + after[k]) / 2 for k in before}
    ceiling = ceiling_of(parts)
    return {
        "case": case.name,
        "pool": pool_size,
        **parts,
        "ceiling": ceiling,
        "ceiling_drift": ceiling_of(after) / ceiling_of(before),
        "cleanba": cleanba,
        "synchronous": synchronous,
        "cleanba_ratio": cleanba / ceiling,
        "synchronous_ratio": synchronous / ceiling,
    }


@dataclass(frozen=True)
class Args:
    """What to measure."""

    cases: tuple[str, ...] = tuple(case.name for case in CASES)
    """Cases, by name."""
    pool_sizes: tuple[int, ...] = (8, 2)
    """Sizes of XLA's CPU thread pool, a part of the configuration: the default, and a faster one where
    there are 2 cores and at most 2 devices."""
    json: str | None = None
    """Write the results to this file too."""
    ceilings_only: Annotated[bool, tyro.conf.arg(help="Print the ceilings of one case.")] = False


COLUMNS = (
    ("case", "{}"), ("pool", "{}"), ("env", "{:,.0f}"), ("forward", "{:,.0f}"), ("gradient", "{:,.0f}"),
    ("ceiling", "{:,.0f}"), ("cleanba", "{:,.0f}"), ("cleanba_ratio", "{:.2f}"),
    ("synchronous", "{:,.0f}"), ("synchronous_ratio", "{:.2f}"), ("ceiling_drift", "{:.2f}"),
)  # fmt: skip


def _width(name: str) -> int:
    return max(7, len(name))


def main(args: Args) -> None:
    """Measure, print a table, and write JSON."""
    by_name = {case.name: case for case in CASES}
    check_cases(args.cases, by_name)
    if args.ceilings_only:
        print(json.dumps(measure_ceilings(by_name[args.cases[0]], args.pool_sizes[0])))
        return
    cores = len(os.sched_getaffinity(0))
    print(f"steps per second on {cores} cores; {CASES[0].__doc__}")
    print(
        "  ".join(
            f"{name:>22}" if name == "case" else f"{name:>{_width(name)}}" for name, _ in COLUMNS
        )
    )
    results = []
    for name, pool_size in itertools.product(args.cases, args.pool_sizes):
        row = measure(by_name[name], pool_size)
        results.append(row)
        cells = [form.format(row[column]) for column, form in COLUMNS]
        widths = [22, *(_width(name) for name, _ in COLUMNS[1:])]
        print("  ".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)), flush=True)
    write_results(args.json, {"cores": cores, "results": results})


if __name__ == "__main__":
    run_command_line(Args, main, "Speed of the trainers against the ceilings of the machine.")
