"""The systems that studies compare, as data: a program, and the flags in which it takes a planned run.

To add a system of any framework, describe it in the study that compares it (docs/adding-a-baseline.md):

    [systems.my_a2c]
    script = "my_a2c.py"                  # relative to the study file
    [systems.my_a2c.flags]
    num_actor_threads = "--num-workers"   # by default not passed

The program writes a run record (docs/run-record.md) into `<runs-dir>/<study>/<run name>`. The launcher needs
nothing else. The systems that come with the toolkit are described in the same way, in `SYSTEMS`.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from baselines.worker_schemes.schemes import AGENTS, SCHEMES
from cleanba.record.consistency import OWN_NAMES
from cleanba.run.flags import flag_with_value

if TYPE_CHECKING:
    from experiments.study import PlannedRun

ROOT = Path(__file__).parents[1]

CHECKPOINTS = 10  # per run, for systems that can resume; the newest are kept
# The number of checkpoints does not make it a different run.
CHECKPOINT_INTERVAL = "--checkpoint-every"


class Flags(Struct, frozen=True, forbid_unknown_fields=True):
    """Names of the flags with which the launcher starts a program; '' if the program has no such flag."""

    env_id: str = "--env-id"
    seed: str = "--seed"
    total_timesteps: str = "--total-timesteps"
    study: str = "--study"
    setting: str = "--setting"  # its name
    runs_dir: str = "--runs-dir"
    overwrite: str = "--overwrite"
    no_progress: str = "--no-progress"
    # Fields of a hardware setting.
    num_actor_threads: str = ""
    actor_device_ids: str = ""
    learner_device_ids: str = ""
    host_devices: str = ""  # passed unless 0
    distributed: str = ""  # passed to each of the several processes of a run, without a value
    # For systems that can resume an interrupted run. The record of a run that can be resumed has a positive
    # `checkpoint_every`.
    resume: str = ""
    num_checkpoints: str = ""
    keep_checkpoints: str = ""  # a number, or all


class System(Struct, frozen=True, forbid_unknown_fields=True):
    """One system of a comparison.

    Attributes:
      script: its program; in a study file, relative to that file.
      interpreter: words before the script; by default the Python that runs the launcher.
      flags: names of its flags.
      fixed: flags that every run of it has, such as `{"algorithm": "ppo"}`.
      separator: between the words of a hyperparameter's flag: `--num-envs` or `--num_envs`.
    """

    script: str
    interpreter: tuple[str, ...] = ()
    flags: Flags = Flags()
    fixed: dict[str, Any] = {}
    separator: Literal["-", "_"] = "-"

    def flag(self, name: str) -> str:
        """Return the flag of a hyperparameter or of another setting of the program's own."""
        return "--" + name.replace("_", self.separator)

    @property
    def actors_name(self) -> str:
        """The name under which a record has the number of actors: `num_actors` of `--num-actors`; or ''."""
        return self.flags.num_actor_threads.removeprefix("--").replace("-", "_")


_CLEANBA = Flags(
    num_actor_threads="--num-actor-threads",
    actor_device_ids="--actor-device-ids",
    learner_device_ids="--learner-device-ids",
    host_devices="--xla-host-devices",
    distributed="--distributed",
    resume="--resume",
    num_checkpoints="--num-checkpoints",
    keep_checkpoints="--keep-checkpoints",
)
# Actor threads are processes in monobeast and HTS-RL, and peers in moolib.
_MONOBEAST = Flags(
    env_id="--env",
    total_timesteps="--total-steps",
    setting="--xpid",
    num_actor_threads="--num-actors",
)
_MOOLIB = Flags(env_id="--env", total_timesteps="--total-steps", num_actor_threads="--num-peers")
_CLEANRL = Flags(num_checkpoints="--num-checkpoints", keep_checkpoints="--keep-checkpoints")
_HTS = replace(_CLEANRL, num_actor_threads="--num-actors")

_PROGRAMS = {
    "cleanba_ppo": System("cleanba/cleanba_ppo.py", flags=_CLEANBA),
    "cleanba_impala": System("cleanba/cleanba_impala.py", flags=_CLEANBA),
    "monobeast_study": System("baselines/monobeast_study.py", flags=_MONOBEAST),
    "moolib_atari": System("baselines/moolib_atari/__main__.py", flags=_MOOLIB),
    "cleanrl_ppo": System("baselines/cleanrl_ppo.py", flags=_CLEANRL),
    "ppo_microrts": System("baselines/ppo_microrts.py", flags=_CLEANRL),
    "action_guidance": System("baselines/action_guidance.py"),
    "hts_rl": System("baselines/hts_rl.py", flags=_HTS),
}
_WORKER_SCHEMES = System("baselines/worker_schemes/__main__.py")

SYSTEMS = {
    **{
        name: replace(_PROGRAMS[program], fixed=fixed)
        for name, (program, fixed) in OWN_NAMES.items()
    },
    **{
        f"schemes_{agent}-{scheme}": replace(
            _WORKER_SCHEMES, fixed={"agent": agent, "scheme": scheme}
        )
        for agent in AGENTS
        for scheme in SCHEMES
    },
}
# Its program names a system after its architecture alone.
_ORIGINAL = SYSTEMS["cleanba_impala-original"]
SYSTEMS["cleanba_impala-original"] = replace(
    _ORIGINAL, fixed=_ORIGINAL.fixed | {"exp_name": "cleanba_impala-original"}
)


def arguments(run: "PlannedRun") -> list[str]:
    """Translate a run into command-line flags, e.g. `["--num-envs", "8", "--no-anneal-lr"]`.

    A flag of the setting replaces a hyperparameter of the same name.
    """
    program, setting = run.program, run.setting
    names = program.flags
    values = {
        names.env_id: run.env_id,
        names.seed: run.seed,
        names.total_timesteps: run.total_timesteps,
        **{program.flag(name): value for name, value in run.hyperparameters.items()},
        **{program.flag(name): value for name, value in program.fixed.items()},
        names.num_actor_threads: setting.num_actor_threads,
        names.actor_device_ids: setting.actor_device_ids,
        names.learner_device_ids: setting.learner_device_ids,
        **({names.host_devices: setting.host_devices} if setting.host_devices else {}),
        **({names.distributed: True} if setting.processes > 1 else {}),
        **{program.flag(name): value for name, value in setting.flags},
        names.study: run.study,
        names.setting: setting.name,
    }
    return [word for flag, value in values.items() if flag for word in flag_with_value(flag, value)]


def command(run: "PlannedRun", runs_dir: Path, restart_flag: str = "") -> list[str]:
    """Return the command line of a run.

    Args:
      run: the run.
      runs_dir: folder of all studies' records.
      restart_flag: what to do with the record of an earlier attempt, as `state.restart_flag` returns it;
        '' if there is none.
    """
    names = run.program.flags
    number = run.checkpoints or (CHECKPOINTS if names.resume else 0)
    keeps = run.checkpoints and names.keep_checkpoints
    script = os.path.relpath(ROOT / run.program.script)
    return [
        *(run.program.interpreter or (sys.executable,)),
        script,
        *arguments(run),
        *([names.runs_dir, str(runs_dir)] if names.runs_dir else []),
        *([names.num_checkpoints, str(number)] if names.num_checkpoints and number else []),
        *([names.keep_checkpoints, "all"] if keeps else []),
        *filter(None, (names.no_progress, restart_flag)),
    ]


def changes(recorded: list[str], planned: list[str], program: System) -> list[str]:
    """Return how two command lines differ, apart from paths and the flags for records and checkpoints.

    Args:
      recorded: the command in a run record.
      planned: the command that the study would start.
      program: what both start.

    Returns:
      A text for each flag that differs, such as `--num-steps 32, now 16`; none if the recorded command is of
      another program, because the two cannot be compared then.
    """
    before, now = _identity(recorded, program), _identity(planned, program)
    if before is None or before == now:
        return []
    old, new = _by_flag(before), _by_flag(now or [])
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [
        f"{' '.join(filter(None, [name, *old[name]])) if name in old else f'no {name}'}, now "
        f"{' '.join(new[name]) or 'given' if name in new else 'not given'}"
        for name in names
    ] or ["the order of its flags"]


def _by_flag(words: list[str]) -> dict[str, list[str]]:
    """Return flag -> its values; words before the first flag are those of ''."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
            found[name] = []
        else:
            found.setdefault(name, []).append(word)
    return found


def _identity(words: list[str], program: System) -> list[str] | None:
    """Return the words after the script, without the flags that say where and how a record is kept."""
    names = program.flags
    housekeeping = {
        names.runs_dir: 1, names.study: 1, names.overwrite: 0, names.no_progress: 0,
        names.resume: 0, names.num_checkpoints: 1, names.keep_checkpoints: 1,
        CHECKPOINT_INTERVAL: 1,
    }  # fmt: skip
    name = Path(program.script).name
    at = next((i for i, word in enumerate(words) if Path(word).name == name), None)
    if at is None:
        return None
    kept = []
    skip = 0
    for word in words[at + 1 :]:
        if word in housekeeping:
            skip = housekeeping[word]
        elif skip:
            skip -= 1
        else:
            kept.append(word)
    return kept
