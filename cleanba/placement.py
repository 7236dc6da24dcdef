"""Where environment groups are computed: actor threads, actor devices, learner devices, processes.

Everything here is a hardware setting. It may change how fast a run is, never what it computes.
A layout is named as in the Cleanba README, `a0-l1,2-d1`, with the number of actor threads besides.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

Item = TypeVar("Item")

# What makes a GPU add in one order: its own sums are not all deterministic, and autotuning chooses
# kernels by the clock.
GPU_FLAGS = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h

# Seconds after which a silent process of a run is taken for dead, and ends the others.
HEARTBEAT_TIMEOUT = 30


@dataclass(frozen=True)
class Hardware:
    """Hardware settings: they may change how fast a run is, never its result."""

    num_actor_threads: int = 2
    """Actor threads for each actor device. Any number up to the number of environment groups."""
    actor_device_ids: tuple[int, ...] = (0,)
    """Devices (of each process) that compute the actions."""
    learner_device_ids: tuple[int, ...] = (0,)
    """Devices (of each process) that compute the gradients."""
    distributed: bool = False
    """Run as one of several processes, started by Slurm or with the same variables set by hand."""
    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    """Kind of device; auto takes an accelerator where jax finds one."""
    xla_host_devices: int | None = None
    """Number of devices that a CPU pretends to be; by default as many as the layout names."""
    envpool_threads: int | None = None
    """Threads that step the environments of each group; by default the cores, at most one per environment."""


class ActorPlacement(NamedTuple):
    """One actor thread: its number in the run, its device, and the groups that it holds."""

    thread: int
    device_id: int
    groups: tuple[int, ...]


class Layout(NamedTuple):
    """Which group lives where, seen from one process."""

    num_groups: int
    process: int
    num_processes: int
    actors: tuple[ActorPlacement, ...]
    learner_of_group: dict[int, int]
    learner_device_ids: tuple[int, ...]

    @property
    def local_groups(self) -> tuple[int, ...]:
        """Groups of this process, in order."""
        return tuple(sorted(self.learner_of_group))


def deal(items: Sequence[Item], hands: int) -> list[tuple[Item, ...]]:
    """Deal items out in order, in contiguous hands whose sizes differ by one at most.

    Args:
      items: what to deal.
      hands: number of hands, from 1 to the number of items.

    Returns:
      `hands` tuples, none empty; the larger ones come first.
    """
    if not 1 <= hands <= len(items):
        raise ValueError(f"cannot deal {len(items)} items into {hands} hands")
    size, larger = divmod(len(items), hands)
    dealt, start = [], 0
    for hand in range(hands):
        end = start + size + (hand < larger)
        dealt.append(tuple(items[start:end]))
        start = end
    return dealt


def plan(hardware: Hardware, num_groups: int, process: int, num_processes: int) -> Layout:
    """Decide where each environment group of this process lives.

    Args:
      hardware: threads and device ids.
      num_groups: environment groups of the whole run, a multiple of the number of processes.
      process: index of this process.
      num_processes: number of processes.

    Returns:
      The layout of this process.

    Raises:
      ValueError: with one line, if there are more processes, threads or devices than groups.
    """
    if num_groups % num_processes:
        raise ValueError(
            f"--num-env-groups {num_groups}: must be a multiple of the {num_processes} processes"
        )
    for name, ids in (
        ("--actor-device-ids", hardware.actor_device_ids),
        ("--learner-device-ids", hardware.learner_device_ids),
    ):
        if not ids or min(ids) < 0 or len(set(ids)) != len(ids):
            raise ValueError(f"{name}: needs one or more different device ids from 0 on")
    if hardware.num_actor_threads < 1:
        raise ValueError("--num-actor-threads: must be 1 or more")
    if hardware.envpool_threads is not None and hardware.envpool_threads < 1:
        raise ValueError("--envpool-threads: must be 1 or more")
    per_process = num_groups // num_processes
    threads = hardware.num_actor_threads * len(hardware.actor_device_ids)
    for count, what in (
        (threads, "actor threads (--num-actor-threads x --actor-device-ids)"),
        (len(hardware.learner_device_ids), "learner devices (--learner-device-ids)"),
    ):
        if count > per_process:
            raise ValueError(
                f"{count} {what} but {per_process} environment groups per process: "
                "at most one of them per group; --num-env-groups makes more groups"
            )
    groups = range(process * per_process, (process + 1) * per_process)
    devices = [d for d in hardware.actor_device_ids for _ in range(hardware.num_actor_threads)]
    actors = tuple(
        ActorPlacement(process * threads + i, device, hand)
        for i, (device, hand) in enumerate(zip(devices, deal(groups, threads), strict=True))
    )
    learner_hands = deal(groups, len(hardware.learner_device_ids))
    learner_of_group = {
        group: device
        for device, hand in zip(hardware.learner_device_ids, learner_hands, strict=True)
        for group in hand
    }
    return Layout(
        num_groups, process, num_processes, actors, learner_of_group, hardware.learner_device_ids
    )


def setting_name(hardware: Hardware, num_processes: int) -> str:
    """Name a hardware setting as the Cleanba README does, with actor threads: `a0-l1,2-d1-t2`."""
    actors = ",".join(map(str, hardware.actor_device_ids))
    learners = ",".join(map(str, hardware.learner_device_ids))
    return f"a{actors}-l{learners}-d{num_processes}-t{hardware.num_actor_threads}"


def default_num_env_groups(num_envs: int, units_per_env: int, num_minibatches: int) -> int:
    """Return the largest number of groups, up to 8, that divides everything evenly (or 1).

    Args:
      num_envs: environments of the run.
      units_per_env: what minibatches are cut from, per environment: its steps (PPO) or itself, 1
        (IMPALA).
      num_minibatches: minibatches that each group has to give the same share to.
    """
    for groups in range(min(8, num_envs), 1, -1):
        group_size, rest = divmod(num_envs, groups)
        if not rest and group_size * units_per_env % num_minibatches == 0:
            return groups
    return 1


def slurm_processes(hardware: Hardware) -> tuple[int, int]:
    """Return this process's index and the number of processes, from Slurm's variables.

    Raises:
      ValueError: with one line, if `--distributed` is given and the variables are not there.
    """
    if not hardware.distributed:
        return 0, 1
    try:
        return int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    except (KeyError, ValueError):
        raise ValueError(
            "--distributed: needs SLURM_PROCID and SLURM_NTASKS (and SLURM_JOB_ID, "
            "SLURM_STEP_NODELIST, SLURM_LOCALID), set by srun or by hand"
        ) from None


def local_gpus(count: int, variables: Mapping[str, str]) -> list[int]:
    """Return the GPUs of this process, of those that it can see.

    jax takes one by itself, `SLURM_LOCALID`, however many the process is given.

    Args:
      count: GPUs of each process.
      variables: of the environment. Where more GPUs can be seen than the process needs (or nothing is said of
        them), the processes of a node share them out by their `SLURM_LOCALID`.
    """
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    own = visible is not None and len(visible.split(",")) <= count
    first = 0 if own else int(variables.get("SLURM_LOCALID", 0)) * count
    return list(range(first, first + count))


def start_jax(hardware: Hardware, xla_cpu_pool_size: int) -> None:
    """Configure jax for a hardware setting, before it has touched a device.

    Args:
      hardware: platform, devices and processes.
      xla_cpu_pool_size: size of XLA's thread pool on a CPU. Convolutions and matrix products are
        split by it, so it is part of the arithmetic (docs/guarantee.md).

    Raises:
      ValueError: with one line, if a device id is not there.
    """
    import jax

    if xla_cpu_pool_size < 1:
        raise ValueError(f"--xla-cpu-pool-size {xla_cpu_pool_size}: must be 1 or more")
    highest = max(*hardware.actor_device_ids, *hardware.learner_device_ids)
    _keep_freed_memory()
    os.environ["NPROC"] = str(xla_cpu_pool_size)  # read by XLA when the CPU client starts
    if hardware.platform != "cpu":
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {GPU_FLAGS}".strip()
    jax.config.update("jax_num_cpu_devices", hardware.xla_host_devices or highest + 1)
    if hardware.platform != "auto":
        platform = {"gpu": "cuda,cpu", "tpu": "tpu,cpu", "cpu": "cpu"}[hardware.platform]
        jax.config.update("jax_platforms", platform)
    if hardware.distributed:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            local_device_ids=local_gpus(highest + 1, os.environ),
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
        )
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(f"--platform {hardware.platform}: {first_line}") from None
    if highest >= len(devices):
        raise ValueError(
            f"device {highest} is not there: this process has {len(devices)} "
            f"{devices[0].platform} device(s), ids 0 to {len(devices) - 1}"
        )
    if devices[0].platform == "cpu" and len(devices) > xla_cpu_pool_size:
        # XLA takes the larger of the two, and the number of devices would be part of the arithmetic.
        raise ValueError(
            f"--xla-cpu-pool-size {xla_cpu_pool_size}: must be at least the number of devices on "
            f"the CPU, {len(devices)}"
        )


def _keep_freed_memory() -> None:
    """Make the C library keep what is freed, for the next allocation of that size.

    It gives blocks of more than 32 MB back to the system at once, and XLA's calls on a CPU, which allocate
    one such block each, spend a sixth of their time on pages that are new again. Nothing happens where the
    C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def describe_hardware(hardware: Hardware, num_processes: int) -> dict[str, Any]:
    """Return the `hardware` part of a run record: what was asked for and what was found."""
    import jax

    devices = jax.local_devices()
    return {
        "platform": devices[0].platform,
        "device_kind": cpu_model() if devices[0].platform == "cpu" else devices[0].device_kind,
        "num_actor_threads": hardware.num_actor_threads,
        "actor_device_ids": list(hardware.actor_device_ids),
        "learner_device_ids": list(hardware.learner_device_ids),
        "num_processes": num_processes,
        "host_devices": len(devices),
        "cpu_affinity": sorted(os.sched_getaffinity(0)),
        "envpool_threads": hardware.envpool_threads,
    }


def cpu_model() -> str:
    """Return the name of the processor, or 'cpu' where the system does not tell."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "cpu"
