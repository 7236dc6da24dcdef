"""Where environment groups are computed: actor threads, actor devices, learner devices, processes.

Everything here is a hardware setting. It may change how fast a run is, never what it computes. There are two
exceptions: the hyperparameter `portable`, which has to be set before jax starts, and the size of XLA's thread
pool without it.
"""

import ctypes
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from cleanba.record.layout import Layout
from cleanba.run.arguments import Count

Item = TypeVar("Item")

# Otherwise some sums of a GPU have no fixed order, and autotuning chooses kernels by measured time. With this
# flag it takes the first kernel that fits (XLA's autotuner_pass.cc, `select_first_config`).
# --xla_gpu_autotune_level=0 is not needed for that, and made convolutions 44 times slower on an H200.
GPU_FLAGS = "--xla_gpu_deterministic_ops=true"

PORTABLE_FLAGS = " ".join(
    (
        # The same machine code for all processors that have AVX2. With AVX2 as the limit, XLA tunes code to a
        # processor that has no more than that.
        "--xla_cpu_max_isa=AVX",
        # The same approximations of functions for every processor.
        "--xla_cpu_enable_platform_dependent_math=false",
        # No sums by YNNPACK, whose order depends on the processor and on the size of the pool.
        "--xla_cpu_experimental_ynn_fusion_type=",
    )
)
PORTABLE_FEATURES = {
    "avx2",
    "fma",
}  # that an x86-64 processor needs, for speed and for exact kernels

# Default size of XLA's pool with --no-portable. It is fixed because the size changes the result.
FIXED_POOL_SIZE = 8

# Size of the compilation cache; the least recently used programs are evicted.
MAX_CACHE_BYTES = 2**30
MIN_COMPILE_SECONDS = 0.1  # of a program that is cached
_seconds_saved: list[float] = []  # one per cache hit of this process

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # of malloc.h

# Seconds without a sign of life after which a process of a run counts as dead and the others exit.
HEARTBEAT_TIMEOUT = 30


@dataclass(frozen=True)
class Hardware:
    """Hardware settings: they may change how fast a run is, never its result."""

    num_actor_threads: Count = 2
    """Actor threads for each actor device. Any number up to the number of environment groups."""
    actor_device_ids: tuple[int, ...] = (0,)
    """Devices (of each process) that compute the actions."""
    learner_device_ids: tuple[int, ...] = (0,)
    """Devices (of each process) that compute the gradients."""
    distributed: bool = False
    """Run as one of several processes, started by Slurm or with the same variables set by hand."""
    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    """Kind of device; auto: an accelerator if jax finds one."""
    xla_host_devices: Count | None = None
    """Number of virtual CPU devices; by default as many as the layout names."""
    envpool_threads: Count | None = None
    """Threads that step a group's environments; by default one per core, at most one per environment."""
    xla_cpu_pool_size: Count | None = None
    """Threads of XLA's pool on a CPU; by default one per core. With --no-portable they are part of the
    arithmetic: recorded among the hyperparameters, 8 by default."""
    compilation_cache: bool = True
    """Use JAX's persistent compilation cache, in ~/.cache/cleanba unless JAX_COMPILATION_CACHE_DIR is set."""


class ActorPlacement(NamedTuple):
    """One actor thread: its number in the run, its device, and its environment groups."""

    thread: int
    device_id: int
    groups: tuple[int, ...]


class Placement(NamedTuple):
    """Where one process computes each of its environment groups."""

    num_groups: int  # of the whole run
    process: int
    num_processes: int
    actors: tuple[ActorPlacement, ...]
    learner_of_group: dict[int, int]  # device id by group
    learner_device_ids: tuple[int, ...]

    @property
    def local_groups(self) -> tuple[int, ...]:
        """Groups of this process, in order."""
        return tuple(sorted(self.learner_of_group))


def split_contiguous(items: Sequence[Item], parts: int) -> list[tuple[Item, ...]]:
    """Split a sequence into contiguous parts whose sizes differ by one at most.

    Args:
      items: what to split.
      parts: number of parts, from 1 to the number of items.

    Returns:
      `parts` tuples, none empty; the larger ones come first.

    Raises:
      ValueError: if a part would be empty.
    """
    if not 1 <= parts <= len(items):
        raise ValueError(f"cannot split {len(items)} items into {parts} parts")
    size, larger = divmod(len(items), parts)
    result, start = [], 0
    for part in range(parts):
        end = start + size + (part < larger)
        result.append(tuple(items[start:end]))
        start = end
    return result


def plan(hardware: Hardware, num_groups: int, process: int, num_processes: int) -> Placement:
    """Assign the environment groups of this process to its actor threads and learner devices.

    Args:
      hardware: threads and device ids.
      num_groups: environment groups of the whole run, a multiple of the number of processes.
      process: index of this process.
      num_processes: number of processes.

    Returns:
      The placement of this process's groups.

    Raises:
      ValueError: with one line, if the processes do not divide the groups evenly, device ids are missing,
        negative or repeated, or a process has more actor threads or learner devices than groups.
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
    per_process = num_groups // num_processes
    threads = hardware.num_actor_threads * len(hardware.actor_device_ids)
    for count, what in (
        (threads, "actor threads (--num-actor-threads x --actor-device-ids)"),
        (len(hardware.learner_device_ids), "learner devices (--learner-device-ids)"),
    ):
        if count > per_process:
            raise ValueError(
                f"{count} {what} but {per_process} environment groups per process: "
                "each needs its own group; --num-env-groups sets the number of groups"
            )
    groups = range(process * per_process, (process + 1) * per_process)
    devices = [d for d in hardware.actor_device_ids for _ in range(hardware.num_actor_threads)]
    actors = tuple(
        ActorPlacement(process * threads + i, device, part)
        for i, (device, part) in enumerate(
            zip(devices, split_contiguous(groups, threads), strict=True)
        )
    )
    learner_parts = split_contiguous(groups, len(hardware.learner_device_ids))
    learner_of_group = {
        group: device
        for device, part in zip(hardware.learner_device_ids, learner_parts, strict=True)
        for group in part
    }
    return Placement(
        num_groups, process, num_processes, actors, learner_of_group, hardware.learner_device_ids
    )


def layout_of(hardware: Hardware, num_processes: int) -> Layout:
    """Return the layout of a hardware setting; its name is the default name of the setting."""
    return Layout(
        tuple(hardware.actor_device_ids),
        tuple(hardware.learner_device_ids),
        num_processes,
        hardware.num_actor_threads,
    )


def default_num_env_groups(num_envs: int, units_per_env: int, num_minibatches: int) -> int:
    """Return the largest number of groups, up to 8, that divides everything evenly (or 1).

    Args:
      num_envs: environments of the run.
      units_per_env: units that an environment contributes to the minibatches of an epoch: its steps
        (PPO) or 1, itself (IMPALA).
      num_minibatches: minibatches of an epoch; every group contributes the same share to each.
    """
    for groups in range(min(8, num_envs), 1, -1):
        group_size, rest = divmod(num_envs, groups)
        if not rest and group_size * units_per_env % num_minibatches == 0:
            return groups
    return 1


def slurm_processes(hardware: Hardware) -> tuple[int, int]:
    """Return this process's index and the number of processes, from Slurm's variables.

    Raises:
      ValueError: with one line, if `--distributed` is given and the variables are not set.
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
    """Return the indices of this process's GPUs among those that are visible to it.

    jax's own choice is a single GPU, `SLURM_LOCALID`, however many the process is given.

    Args:
      count: GPUs of each process.
      variables: environment variables. If `CUDA_VISIBLE_DEVICES` names at most `count` GPUs, they all belong
        to this process. Otherwise the processes of a node divide the GPUs among them by `SLURM_LOCALID`.
    """
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    own = visible is not None and len(visible.split(",")) <= count
    first = 0 if own else int(variables.get("SLURM_LOCALID", 0)) * count
    return list(range(first, first + count))


def cpu_pool_size(hardware: Hardware, portable: bool) -> int:
    """Return the threads of XLA's pool on a CPU."""
    default = len(os.sched_getaffinity(0)) if portable else FIXED_POOL_SIZE
    return hardware.xla_cpu_pool_size or default


def configure_process(hardware: Hardware, portable: bool) -> None:
    """Set all process-wide state that jax and the C library read, before jax touches a device.

    - the C library's allocator (`_keep_freed_memory`): speed only;
    - jax's compilation cache (`_keep_compiled_programs`): speed only;
    - `NPROC`: the size of XLA's CPU thread pool, read when the CPU client starts;
    - `XLA_FLAGS`: one instruction set on a CPU (`PORTABLE_FLAGS`), if `portable`; deterministic sums on a GPU
      (`GPU_FLAGS`), unless the platform is the CPU;
    - jax's options: the number of virtual CPU devices, the platform, and the library for
      communication between processes.

    Args:
      hardware: platform, devices and processes.
      portable: compute the same bits on every processor.
    """
    import jax

    _keep_freed_memory()
    if hardware.compilation_cache and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        _keep_compiled_programs()
    _count_cache_hits()
    os.environ["NPROC"] = str(cpu_pool_size(hardware, portable))
    ours = PORTABLE_FLAGS.split() if portable else []
    ours += GPU_FLAGS.split() if hardware.platform != "cpu" else []
    # The last of two flags counts. Ours appear once, even if a parent process has set them: they are part of
    # the key under which a program is cached.
    users = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag not in ours]
    os.environ["XLA_FLAGS"] = " ".join(users + ours)
    host_devices = hardware.xla_host_devices or _devices_named(hardware)
    jax.config.update("jax_num_cpu_devices", host_devices)
    if hardware.platform != "auto":
        platforms = {"gpu": "cuda,cpu", "tpu": "tpu,cpu", "cpu": "cpu"}[hardware.platform]
        jax.config.update("jax_platforms", platforms)
    if hardware.distributed:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # Its signal handler would keep SIGTERM from this process, which trains on.
        jax.config.update("jax_enable_preemption_service", False)


def pinned_hardware(portable: bool) -> dict[str, Any]:
    """Return what must be equal on two machines for the same program to compute the same bits there.

    Args:
      portable: it computes the same bits on every processor.
    """
    import jax

    device = jax.local_devices()[0]
    if portable:
        return {"platform": device.platform, "machine": os.uname().machine}
    kind = cpu_model() if device.platform == "cpu" else device.device_kind
    return {"platform": device.platform, "device_kind": kind}


def start_jax(hardware: Hardware, portable: bool) -> None:
    """Configure this process, start jax, and check that the devices of a hardware setting exist.

    Args:
      hardware: platform, devices and processes.
      portable: compute the same bits on every processor, if the platform is the CPU.

    Raises:
      ValueError: with one line, if a device does not exist, the pool is too small, or the processor or the
        machine lacks what `portable` needs.
    """
    import jax

    configure_process(hardware, portable)
    needed = _devices_named(hardware)
    if hardware.distributed:
        jax.distributed.initialize(
            local_device_ids=local_gpus(needed, os.environ),
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            **_on_loopback(os.environ),
        )
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(f"--platform {hardware.platform}: {first_line}") from None
    if hardware.platform not in ("auto", devices[0].platform):
        # JAX continues on the CPU where the first of its platforms cannot be started.
        raise ValueError(
            f"--platform {hardware.platform}: jax found only {devices[0].platform} devices"
        )
    if needed > len(devices):
        raise ValueError(
            f"device {needed - 1} is not there: this process has {len(devices)} "
            f"{devices[0].platform} device(s), ids 0 to {len(devices) - 1}"
        )
    if devices[0].platform != "cpu":
        return
    pool_size = cpu_pool_size(hardware, portable)
    if not portable and len(devices) > pool_size:
        # XLA's pool would have one thread per device, and the layout would change the arithmetic.
        raise ValueError(
            f"--xla-cpu-pool-size {pool_size}: must be at least the number of devices on the CPU, "
            f"{len(devices)}"
        )
    if portable:
        from cleanba.exact import kernels

        check_instruction_set()
        kernels.load()


def check_instruction_set() -> None:
    """Refuse an x86-64 processor without the instructions that `PORTABLE_FLAGS` names.

    Raises:
      ValueError: with one line.
    """
    missing = PORTABLE_FEATURES - _cpu_features() if os.uname().machine == "x86_64" else ()
    if missing:
        raise ValueError(
            f"--portable: this processor lacks {' and '.join(sorted(missing))}; give --no-portable"
        )


def _cpu_features() -> set[str]:
    """Return the features of the processor, or those that are needed where the system does not list them."""
    return set(cpu_info("flags").split()) or PORTABLE_FEATURES


def _on_loopback(variables: Mapping[str, str]) -> dict[str, str]:
    """Return arguments of `jax.distributed.initialize` for processes that are all on this node.

    By default the coordinator listens on all interfaces, and nothing authenticates those that connect. The
    port is the one that jax derives from the job's id. Several nodes get jax's defaults.
    """
    if variables.get("SLURM_STEP_NUM_NODES") != "1":
        return {}
    port = int(variables["SLURM_JOB_ID"]) % 2**12 + 65535 - 2**12 + 1
    address = f"127.0.0.1:{port}"
    return {"coordinator_address": address, "coordinator_bind_address": address}


def _devices_named(hardware: Hardware) -> int:
    """Return the number of devices that a process needs to have: the highest id, plus one."""
    return max(*hardware.actor_device_ids, *hardware.learner_device_ids) + 1


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory for later allocations; no effect with another C library.

    By default glibc returns blocks of more than 32 MB to the system as soon as they are freed. XLA allocates
    such a block in every call on a CPU, and would spend up to a quarter of its time on page faults. Only one
    arena can be kept from doing so: every other one maps blocks of more than 64 MB by themselves.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _keep_compiled_programs() -> None:
    """Enable JAX's persistent compilation cache, in a directory for the features of this CPU.

    JAX's cache key has the program, its options and the version of XLA, but not the CPU. Code that uses
    instructions which the CPU lacks would crash.
    """
    import jax

    from cleanba.exact import kernels

    features = hashlib.sha256(" ".join(sorted(_cpu_features())).encode()).hexdigest()[:16]
    folder = kernels.cache_folder() / f"xla-{features}"
    try:
        kernels.make_cache_folder(folder)
    except OSError as error:
        print(f"compilation cache disabled: {error}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", MAX_CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)


def saved_by_cache() -> dict[str, float]:
    """Return `compile_seconds_saved` for the record's hardware, or nothing without a cache hit.

    For each hit, JAX reports the original compilation time, rounded down to whole seconds, minus the
    retrieval time. So the sum is a lower bound.
    """
    if not _seconds_saved:
        return {}
    return {"compile_seconds_saved": round(sum(max(s, 0.0) for s in _seconds_saved), 1)}


@cache
def _count_cache_hits() -> None:
    """Register the listener once, however often jax is configured."""
    import jax

    def count(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/compilation_cache/compile_time_saved_sec":
            _seconds_saved.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(count)


def describe_hardware(hardware: Hardware, num_processes: int) -> dict[str, Any]:
    """Return the `hardware` part of a run record: the requested setting and the devices found."""
    import jax

    devices = jax.local_devices()
    return {
        "platform": devices[0].platform,
        "device_kind": cpu_model() if devices[0].platform == "cpu" else devices[0].device_kind,
        "machine": os.uname().machine,
        "num_actor_threads": hardware.num_actor_threads,
        "actor_device_ids": list(hardware.actor_device_ids),
        "learner_device_ids": list(hardware.learner_device_ids),
        "num_processes": num_processes,
        "host_devices": len(devices),
        "cpu_affinity": sorted(os.sched_getaffinity(0)),
        "envpool_threads": hardware.envpool_threads,
        "xla_cpu_pool_size": int(os.environ["NPROC"]) if devices[0].platform == "cpu" else None,
    }


def cpu_model() -> str:
    """Return the name of the processor, or 'cpu' where the system does not provide it."""
    return cpu_info("model name") or "cpu"


def cpu_info(name: str) -> str:
    """Return a value of /proc/cpuinfo, such as "model name", or "" if it is not there."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    values = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in values if key.strip() == name), "")
