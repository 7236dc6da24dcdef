"""How speed is measured: of a call, of the environments, of a program from its run record."""

import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cleanba.environments import EnvSpec
from cleanba.record import Run, Update, find_runs, read_run

T = TypeVar("T")
UNTIMED_CALLS = 3  # which compile, and fill caches
TIMEOUT = 1800  # seconds after which a program is killed


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    """Call a function in a new Python process: nothing is loaded, configured or allocated there.

    Args:
      function: of a module; its module is imported in the new process.
      args: its arguments, which like its result have to be picklable.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def calls_per_second(call: Callable[[], Any], seconds: float) -> float:
    """Return how many calls are made per second, after the first few, timed for so many seconds."""
    for _ in range(UNTIMED_CALLS):
        call()
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        call()
        calls += 1
    return calls / (time.perf_counter() - start)


def environment_speed(env_id: str, num_envs: int, num_groups: int, seconds: float) -> float:
    """Return the steps per second of EnvPool alone, with random actions.

    Args:
      env_id: EnvPool environment.
      num_envs: environments of all groups.
      num_groups: pools that the environments are in, stepped one after the other.
      seconds: to measure.
    """
    from cleanba.environments import describe_env, env_seeds, make_envs

    size = num_envs // num_groups
    groups = [
        make_envs(env_id, env_seeds(1, group * size, size), min(cores(), size))
        for group in range(num_groups)
    ]
    rng = np.random.default_rng(0)
    actions = rng.integers(0, describe_env(env_id).num_actions, (1000, size)).astype(np.int32)
    ids = np.arange(size, dtype=np.int32)
    for envs in groups:
        envs.async_reset()
    turn = iter(range(10**9))

    def step() -> None:
        for envs in groups:
            envs.recv()
            envs.send(actions[next(turn) % 1000], ids)

    return calls_per_second(step, seconds) * num_envs


def random_observations(spec: EnvSpec, *shape: int) -> np.ndarray:
    """Return observations of an environment, drawn at random: `[*shape, ...]`."""
    rng, size = np.random.default_rng(0), (*shape, *spec.obs_shape)
    obs = rng.integers(0, 255, size) if spec.obs_dtype == np.uint8 else rng.normal(size=size)
    return obs.astype(spec.obs_dtype)


def torch_gradients(network: Any, spec: EnvSpec, shape: tuple[int, int], seconds: float) -> float:
    """Return the images (observations) per second of the gradient of monobeast's loss.

    Args:
      network: of torch.
      spec: of the environment.
      shape: [T + 1, B] of the batch.
      seconds: to measure.
    """
    import torch

    from baselines import monobeast_study

    torch.set_num_threads(cores())
    batch = monobeast_study.Batch(
        obs=torch.from_numpy(random_observations(spec, *shape)),
        rewards=torch.zeros(shape),
        dones=torch.zeros(shape, dtype=torch.bool),
        last_actions=torch.zeros(shape, dtype=torch.int64),
        logits=torch.zeros(shape[0] - 1, shape[1], spec.num_actions),
        core_state=None,
    )
    args = monobeast_study.Args()
    calls = calls_per_second(
        lambda: monobeast_study.compute_gradient(network, batch, args), seconds
    )
    return calls * shape[0] * shape[1]


def ceiling(parts: Mapping[str, float]) -> float:
    """Return the steps per second of a system whose parts take turns.

    Args:
      parts: `env`, `forward` and `gradient`, each in units per second when timed alone, and
        `gradients_per_step`, the units of `gradient` per step.
    """
    learning = parts["gradients_per_step"] / parts["gradient"]
    return 1 / (1 / parts["env"] + 1 / parts["forward"] + learning)


def run_and_read(command: Sequence[str], folder: Path) -> Run:
    """Run a program that writes one record into a folder, and read the record.

    Args:
      command: the command line.
      folder: of the record; not within another run's.

    Raises:
      RuntimeError: with the last line of the program's standard error, if it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{' '.join(command)}: {last_line}")
    (path,) = find_runs(folder)
    return read_run(path)


def steps_per_second(updates: Sequence[Update]) -> float:
    """Return the speed of a run between the first and the last of some of its updates.

    Args:
      updates: consecutive updates of a record. The first only marks the start, so that leaving out the first
        updates of a run leaves out its compilation.
    """
    first, last = updates[0], updates[-1]
    return (last.step - first.step) / (last.wall_time - first.wall_time)
