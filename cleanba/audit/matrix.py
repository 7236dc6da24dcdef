"""The contents of a certificate: configurations to train, and hardware settings to train them under."""

import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cleanba.record.layout import Layout
from cleanba.run.command_line import BadInput

NUM_ENV_GROUPS = 4  # of every certified run, so that up to 4 threads or devices can be used


@dataclass(frozen=True)
class Setting:
    """One hardware setting: a layout, the resources beside it, and the processor."""

    layout: Layout
    """Devices, processes and actor threads."""
    cores: int | None = None
    """CPU cores; None for all of the machine."""
    envpool_threads: int | None = None
    """EnvPool threads of each group; None for the trainer's default."""
    xla_cpu_pool_size: int | None = None
    """Threads of XLA's CPU pool; None for the trainer's default."""
    processor: str | None = None
    """Processor to emulate, a name of `qemu-x86_64 -cpu help`; None for the machine's own."""

    @property
    def name(self) -> str:
        """The layout's name, with -c(cores), -e(EnvPool threads), -pool(XLA's pool) and -(processor)."""
        suffixes = {
            "c": self.cores,
            "e": self.envpool_threads,
            "pool": self.xla_cpu_pool_size,
            "": self.processor,
        }
        given = [f"-{letters}{value}" for letters, value in suffixes.items() if value]
        return self.layout.name + "".join(given)

    @property
    def highest_device(self) -> int:
        """Largest device id of a process."""
        return max(*self.layout.actors, *self.layout.learners)

    def options(self) -> dict[str, Any]:
        """Return the options of a trainer, see `cleanba.run.flags`."""
        return {
            "distributed": True if self.layout.processes > 1 else None,
            "num_actor_threads": self.layout.threads,
            "actor_device_ids": self.layout.actors,
            "learner_device_ids": self.layout.learners,
            "envpool_threads": self.envpool_threads,
            "xla_cpu_pool_size": self.xla_cpu_pool_size,
            "setting": self.name,
        }


def _setting(layout: str, **resources: int | str) -> Setting:
    return Setting(Layout.parse(layout), **resources)


# The first setting is the reference of the others.
QUICK = (
    _setting("a0-l0-d1-t1"),
    _setting("a0-l0,1,2,3-d1-t4"),
    _setting("a0-l0-d1-t1", cores=1, envpool_threads=1),
    _setting("a0-l0-d2-t1"),
)
FULL = (
    _setting("a0-l0-d1-t1"),
    _setting("a0-l0-d1-t2"),
    _setting("a0-l0,1-d1-t3"),
    _setting("a0-l0,1,2-d1-t4"),
    _setting("a0-l0,1,2,3-d1-t4"),
    _setting("a0-l1-d1-t1"),
    _setting("a0-l1,2-d1-t2"),
    _setting("a0-l1,2,3-d1-t1"),
    _setting("a0,1-l2,3-d1-t2"),
    _setting("a0-l0-d1-t1", cores=1),
    _setting("a0-l0,1-d1-t2", cores=1),
    _setting("a0-l0-d1-t1", envpool_threads=1),
    _setting("a0-l0-d1-t2", envpool_threads=2),
    _setting("a0-l0-d2-t1"),
    _setting("a0-l0,1-d2-t2"),
    _setting("a0-l0-d1-t1", xla_cpu_pool_size=1),
    _setting("a0-l0-d1-t2", xla_cpu_pool_size=16),
)
# The machine's own processor first. The others differ in vendor, instructions and sizes of caches.
QUICK_PROCESSORS = tuple(
    _setting("a0-l0-d1-t1", processor=name) for name in (None, "Haswell", "EPYC")
)
PROCESSORS = tuple(
    _setting("a0-l0-d1-t1", processor=name)
    for name in (None, "Haswell", "Broadwell", "EPYC", "EPYC-Rome", "EPYC-Milan")
)


class Configuration(NamedTuple):
    """What is trained, with the same hyperparameters under every setting."""

    algo: str
    architecture: str
    env_id: str
    network: str

    @property
    def name(self) -> str:
        """Name for tables: `ppo sync Breakout-v5 nature`."""
        return " ".join(self)


def configurations(
    algos: Sequence[str],
    architectures: Sequence[str],
    tasks: Sequence[tuple[str, str]],
    quick: bool,
) -> list[Configuration]:
    """Return all combinations; with `quick`, each algorithm in its usual architecture only.

    Args:
      algos: algorithms.
      architectures: architectures.
      tasks: environment and network of each.
      quick: leave out the unusual architectures.

    Raises:
      BadInput: if none remains.
    """
    usual = {"ppo": "sync", "impala": "cleanba"}
    combinations = [
        Configuration(algo, architecture, *task)
        for algo, architecture, task in itertools.product(algos, architectures, tasks)
    ]
    chosen = [x for x in combinations if not quick or usual[x.algo] == x.architecture]
    if not chosen:
        raise BadInput(
            "--quick certifies each algorithm in its usual architecture only: ppo sync, impala cleanba"
        )
    return chosen


def choose_settings(
    candidates: Sequence[Setting],
    names: Sequence[str],
    platform: str,
    reduction: str,
    portable: bool,
) -> list[Setting]:
    """Return the settings to run, the reference first.

    Args:
      candidates: settings to choose from, the reference first.
      names: names of the settings to run beside the reference; all if empty.
      platform: kind of device. On an accelerator, settings that need more devices than there are, several
        processes or another CPU pool are left out.
      reduction: psum leaves out the settings whose learner devices do not divide the groups evenly.
      portable: otherwise the CPU pool is part of the arithmetic, and settings with another are left out.

    Raises:
      BadInput: if a name is unknown.
    """
    settings = [x for x in candidates if portable or not x.xla_cpu_pool_size]
    if platform != "cpu":
        count = _count_devices(platform)
        settings = [
            x
            for x in settings
            if not x.xla_cpu_pool_size and x.layout.processes == 1 and x.highest_device < count
        ]
    if reduction == "psum":
        settings = [
            x
            for x in settings
            if NUM_ENV_GROUPS % (len(x.layout.learners) * x.layout.processes) == 0
        ]
    known = [x.name for x in settings]
    for name in names:
        if name not in known:
            raise BadInput(f"--layouts {name}: choose from {', '.join(known)}")
    return [x for x in settings if not names or x is settings[0] or x.name in names]


def _count_devices(platform: str) -> int:
    """Count the devices in a separate process, so that jax is not configured in this one."""
    code = f"import jax; print(jax.local_device_count({platform!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise BadInput(f"--platform {platform}: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout)
