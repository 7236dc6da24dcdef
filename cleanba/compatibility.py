"""Parts of the original Cleanba's arithmetic that `--compat` restores, for both trainers.

The original is vwxyzjn/cleanba at d1f8979. docs/differences.md lists every difference, whether it changes
learning, and which part restores it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cleanba.exact.placement import Hardware

# These depend on the layout, as the original's arithmetic does.
OF_THE_LAYOUT = ("gradient-scale", "advantages", "seeds")


def restores(compat: Sequence[str], part: str) -> bool:
    """Whether `--compat` names a part of the original's arithmetic, or `original`, which is all of them."""
    return "original" in compat or part in compat


def depends_on_layout(compat: Sequence[str]) -> bool:
    """Whether any of some restored parts depends on the layout."""
    return bool({"original", *OF_THE_LAYOUT} & set(compat))


def env_overrides(compat: Sequence[str], is_atari: bool) -> dict[str, Any]:
    """Return options of EnvPool: the original starts an Atari game after at most one no-op."""
    return {"noop_max": 1} if is_atari and restores(compat, "no-ops") else {}


def overlapping_seeds(seed: int, num_envs: int, threads: int, num_processes: int) -> list[int]:
    """Return the environment seeds of the original, in which actor threads share all but a few.

    Environment i of thread t of process p has seed + p + t + i (cleanba_ppo.py, line 238, and EnvPool).

    Args:
      seed: of the run.
      num_envs: of the run.
      threads: actor threads of each process.
      num_processes: of the run.

    Raises:
      ValueError: with one line, if threads have different numbers of environments.
    """
    size, rest = divmod(num_envs, threads * num_processes)
    if rest:
        raise ValueError(
            f"--compat: {num_envs} environments cannot be divided among {num_processes} processes x "
            f"{threads} actor threads"
        )
    return [
        seed + process + thread + i
        for process in range(num_processes)
        for thread in range(threads)
        for i in range(size)
    ]


def advantage_chunks(
    hardware: Hardware, num_processes: int, num_envs: int, num_minibatches: int
) -> np.ndarray:
    """Return the chunk of each environment: the original normalizes advantages within a chunk.

    Every learner device has an equal part of the environments of each actor thread of its process, thread
    after thread, and cuts them into as many contiguous chunks as an epoch has minibatches.

    Args:
      hardware: actor threads and learner devices of each process.
      num_processes: of the run.
      num_envs: of the run.
      num_minibatches: of an epoch.

    Returns:
      The number of each environment's chunk, int32 [num_envs].

    Raises:
      ValueError: with one line, if the original could not divide the environments so.
    """
    threads = hardware.num_actor_threads * len(hardware.actor_device_ids)
    devices = len(hardware.learner_device_ids)
    parts = num_processes * threads * devices
    per_device = num_envs // (num_processes * devices)
    if num_envs % parts or per_device % num_minibatches:
        raise ValueError(
            f"--compat: {num_envs} environments cannot be divided among {num_processes} processes x "
            f"{threads} actor threads x {devices} learner devices, and each device's into "
            f"{num_minibatches} chunks"
        )
    env = np.arange(num_envs).reshape(num_processes, threads, devices, -1)
    by_device = env.transpose(0, 2, 1, 3).reshape(num_processes * devices * num_minibatches, -1)
    chunks = np.empty(num_envs, np.int32)
    chunks[by_device] = np.arange(len(by_device))[:, None]
    return chunks
