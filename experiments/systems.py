"""The systems that studies compare, one entry each: its name, its command, how it says a run.

To add a system of any framework: write one entry whose `arguments` turn a planned run into the
flags of your program, which writes a run record (docs/run-record.md) into the folder
`<runs-dir>/<study>/<run name>`. The launcher knows nothing else of it.
"""

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.study import PlannedRun, StudyError

ROOT = Path(__file__).parents[1]

# Flags that say where and how a run is kept, not what it is: two commands that differ in these
# alone make the same run.
HOUSEKEEPING = {
    "--runs-dir": 1, "--study": 1,
    "--overwrite": 0, "--resume": 0, "--checkpoint-every": 1, "--no-progress": 0,
}  # fmt: skip
# As baselines/worker_schemes names them: importing them from there would import torch.
WORKER_SCHEMES = (
    "single-threaded", "dppo", "ddppo", "appo", "impala", "ape-x", "rapid", "async-rapid",
)  # fmt: skip
CHECKPOINTS = 10  # of a run, for systems that can go on from one


class System(NamedTuple):
    """One system of a comparison.

    Attributes:
      name: in studies and records.
      script: below the root of the source tree.
      arguments: turns a planned run into its flags.
      checkpoints: turns it into the flags that make a run which `--resume` can go on with; None if the
        system has no such flag: then an interrupted run begins again.
      several_processes: whether a run can be made by several processes that find each other by the
        variables of Slurm.
    """

    name: str
    script: str
    arguments: Callable[[PlannedRun], list[str]]
    checkpoints: Callable[[PlannedRun], list[str]] | None = None
    several_processes: bool = False


def flags(values: Mapping[str, Any]) -> list[str]:
    """Write settings as command line flags.

    Args:
      values: e.g. `{"num_envs": 8, "anneal_lr": False, "learner_device_ids": [0, 1]}`.

    Returns:
      e.g. `["--num-envs", "8", "--no-anneal-lr", "--learner-device-ids", "0", "1"]`.
    """
    words = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (list, tuple)):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", str(value)]
    return words


def cleanba_arguments(run: PlannedRun) -> list[str]:
    """Say a run in the flags of the Cleanba trainers; `-sync` is their synchronous architecture."""
    setting = run.setting
    return flags(
        {
            "env_id": run.env_id,
            "seed": run.seed,
            "total_timesteps": run.total_timesteps,
            **run.hyperparameters,
            "concurrency": not run.system.endswith("-sync"),
            "num_actor_threads": setting.num_actor_threads,
            "actor_device_ids": setting.actor_device_ids,
            "learner_device_ids": setting.learner_device_ids,
            **({"xla_host_devices": setting.host_devices} if setting.host_devices else {}),
            **({"distributed": True} if setting.processes > 1 else {}),
            **dict(setting.flags),
            "study": run.study,
            "setting": setting.name,
        }
    )


def cleanba_checkpoints(run: PlannedRun) -> list[str]:
    """Return the flag for some checkpoints over a run of the Cleanba trainers."""
    num_envs, num_steps = (120, 128) if "ppo" in run.system else (128, 20)  # their defaults
    said = {**run.hyperparameters, **dict(run.setting.flags)}
    batch = said.get("num_envs", num_envs) * said.get("num_steps", num_steps)
    return flags({"checkpoint_every": max(1, run.total_timesteps // batch // CHECKPOINTS)})


def monobeast_arguments(run: PlannedRun) -> list[str]:
    """Say a run in the flags of monobeast, whose actor threads are processes."""
    return flags(
        {
            "env": run.env_id,
            "seed": run.seed,
            "total_steps": run.total_timesteps,
            **run.hyperparameters,
            "num_actors": run.setting.num_actor_threads,
            **dict(run.setting.flags),
            "study": run.study,
            "xpid": run.setting.name,
        }
    )


def moolib_arguments(run: PlannedRun) -> list[str]:
    """Say a run in the flags of moolib's example, whose actor threads are peers."""
    return flags(
        {
            "env": run.env_id,
            "seed": run.seed,
            "total_steps": run.total_timesteps,
            **run.hyperparameters,
            "num_peers": run.setting.num_actor_threads,
            **dict(run.setting.flags),
            "study": run.study,
            "setting": run.setting.name,
        }
    )


def _plain_arguments(run: PlannedRun, **own: Any) -> list[str]:
    """Say a run in flags that are named as in a study, and a system's own after its hyperparameters."""
    return flags(
        {
            "env_id": run.env_id,
            "seed": run.seed,
            "total_timesteps": run.total_timesteps,
            **run.hyperparameters,
            **own,
            **dict(run.setting.flags),
            "study": run.study,
            "setting": run.setting.name,
        }
    )


def cleanrl_arguments(run: PlannedRun) -> list[str]:
    """Say a run in the flags of CleanRL's PPO, which has one process and one device."""
    return _plain_arguments(run)


def hts_arguments(run: PlannedRun) -> list[str]:
    """Say a run in the flags of HTS-RL, whose actor threads are processes; `-sync` is its baseline."""
    _, _, algorithm = run.system.removesuffix("-sync").split("_")
    return _plain_arguments(
        run,
        algorithm=algorithm,
        schedule="synchronous" if run.system.endswith("-sync") else "hts",
        num_actors=run.setting.num_actor_threads,
    )


def schemes_arguments(run: PlannedRun) -> list[str]:
    """Say a run in the flags of the worker schemes, whose system is `schemes_<agent>-<scheme>`."""
    agent, _, scheme = run.system.removeprefix("schemes_").partition("-")
    return _plain_arguments(run, agent=agent, scheme=scheme)


SYSTEMS = {
    system.name: system
    for system in (
        *(
            System(
                f"{name}{architecture}",
                f"cleanba/{name}.py",
                cleanba_arguments,
                cleanba_checkpoints,
                several_processes=True,
            )
            for name in ("cleanba_ppo", "cleanba_impala")
            for architecture in ("", "-sync")
        ),
        System("monobeast", "baselines/monobeast_study.py", monobeast_arguments),
        System("moolib", "baselines/moolib_atari/__main__.py", moolib_arguments),
        System("cleanrl_ppo", "baselines/cleanrl_ppo.py", cleanrl_arguments),
        *(
            System(f"hts_rl_{algorithm}{schedule}", "baselines/hts_rl.py", hts_arguments)
            for algorithm in ("a2c", "ppo")
            for schedule in ("", "-sync")
        ),
        *(
            System(
                f"schemes_{agent}-{scheme}",
                "baselines/worker_schemes/__main__.py",
                schemes_arguments,
            )
            for agent in ("ppo", "impala", "sac")
            for scheme in WORKER_SCHEMES
        ),
    )
}


def check_systems(runs: Iterable[PlannedRun]) -> None:
    """Refuse runs of systems that have no entry here, and settings that they cannot have.

    Raises:
      StudyError: for the first such run; the message names the nearest systems.
    """
    for run in runs:
        if run.system not in SYSTEMS:
            near = difflib.get_close_matches(run.system, SYSTEMS) or list(SYSTEMS)
            raise StudyError(
                f"there is no system {run.system!r}; did you mean {' or '.join(near)}?"
            )
        if run.setting.processes > 1 and not SYSTEMS[run.system].several_processes:
            raise StudyError(
                f"the setting {run.setting.name!r} has several processes; {run.system} runs in one"
            )


def command(run: PlannedRun, runs_dir: Path, again: str = "") -> list[str]:
    """Return the command line of a run.

    Args:
      run: the run.
      runs_dir: folder of all studies' records.
      again: what to do with what an earlier try left in its folder: `--resume`, `--overwrite`, or nothing,
        where there is none.
    """
    system = SYSTEMS[run.system]
    script = os.path.relpath(ROOT / system.script)
    words = [sys.executable, script, *system.arguments(run), "--runs-dir", str(runs_dir)]
    checkpoints = system.checkpoints(run) if system.checkpoints else []
    return [*words, *checkpoints, "--no-progress", *([again] if again else [])]


def same_run(recorded: list[str], planned: list[str], script: str) -> bool:
    """Whether two command lines make the same run, wherever they were started and write to.

    Args:
      recorded: the command in a run record.
      planned: the command that the study would start.
      script: the program, as in the entry of the system.

    Returns:
      True also where the recorded command is not of this program, so that nothing can be said.
    """
    recorded_arguments = _arguments_of(recorded, script)
    return recorded_arguments is None or recorded_arguments == _arguments_of(planned, script)


def _arguments_of(words: list[str], script: str) -> list[str] | None:
    """Return the words after the script, without the housekeeping flags and their values."""
    name = Path(script).name
    at = next((i for i, word in enumerate(words) if Path(word).name == name), None)
    if at is None:
        return None
    kept = []
    skip = 0
    for word in words[at + 1 :]:
        if word in HOUSEKEEPING:
            skip = HOUSEKEEPING[word]
        elif skip:
            skip -= 1
        else:
            kept.append(word)
    return kept
