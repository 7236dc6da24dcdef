"""Studies as data: a small TOML file says what to compare, this module makes the list of runs.

A study is systems x hardware settings x environments x seeds x budget, in one or several blocks:

    title = "..."
    question = "..."

    [settings.a0-l0-t1]
    num_actor_threads = 1
    ...

    [[runs]]
    systems = ["cleanba_ppo"]
    settings = ["a0-l0-t1"]
    env_ids = ["CartPole-v1"]
    seeds = [1, 2, 3]
    total_timesteps = 100_000
    [runs.hyperparameters]
    num_envs = 8

The same question in several sizes is several presets, and so is how long two CPU cores take:

    [presets.cpu]
    minutes = 15
    [[presets.cpu.runs]]
    ...
    [presets.paper.settings.a0-l0-t1]    # in place of the one above
    ...
    [[presets.paper.runs]]
    ...

Hyperparameters are whatever the systems of the block take as flags; a hardware setting is said in
the fields of `Setting`, which every system translates for itself (see experiments/systems.py). What only
one system has is said in its own flags:

    [settings.delayed.flags]
    learner_delay_seconds = 1.0

A setting may differ by system, where the same machine is used in another way:

    [settings.workstation.systems.monobeast]
    num_actor_threads = 80

Where the question is after how many steps runs reach some return, reports say so:

    target_episodes = 100  # whose mean return has to reach it; this many by default

    [targets]
    CartPole-v1 = 400

`env_ids = ["atari57"]` stands for the 57 games of the papers, `atari12` for those of Cleanba's figure 5.
"""

import difflib
import itertools
import tomllib
import types
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cleanba import record
from experiments.games import ENV_SETS

STUDIES = Path(__file__).parent / "studies"
DEFAULT_PRESET = "cpu"
TARGET_EPISODES = 100  # as analysis takes for scores; studies do not depend on it
SETTING_FIELDS = {
    "num_actor_threads": int,
    "actor_device_ids": list,
    "learner_device_ids": list,
    "host_devices": int,
    "cores": int,
}
OPTIONAL_SETTING_FIELDS = {"processes": int, "gpus": int, "nodes": int}


class StudyError(Exception):
    """A study that cannot be read or makes no sense; the message is one line."""


class Setting(NamedTuple):
    """A hardware setting: all that may change the speed of a run, and nothing else of it."""

    name: str
    num_actor_threads: int
    actor_device_ids: tuple[int, ...]
    learner_device_ids: tuple[int, ...]
    host_devices: int  # devices that the CPU is made to show; 0 leaves the machine as it is
    cores: int  # CPU cores that a run gets for itself, with all its processes
    processes: int = 1  # of a run; threads and devices are those of each
    gpus: int = 0  # of a run; it sees no others
    nodes: int = 1  # that they and the processes are on, as many on each
    flags: tuple[tuple[str, Any], ...] = ()  # further flags, of systems that have them


class PlannedRun(NamedTuple):
    """One run of a study."""

    study: str
    system: str
    setting: Setting
    env_id: str
    seed: int
    total_timesteps: int
    hyperparameters: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return record.run_name(self.system, self.setting.name, self.env_id, self.seed)


class Study(NamedTuple):
    """A question, and the runs that answer it.

    Attributes:
      name: of the folder of its records: of the file, and of the preset where it is not the default.
      title: of its report.
      question: that it answers.
      runs: to be made.
      preset: which of the study's sizes this is.
      minutes: that two CPU cores take, as the file says; None where it does not.
      targets: mean return of `target_episodes` episodes that runs are to reach, by environment.
    """

    name: str
    title: str
    question: str
    runs: tuple[PlannedRun, ...]
    preset: str = DEFAULT_PRESET
    minutes: int | None = None
    targets: Mapping[str, float] = types.MappingProxyType({})
    target_episodes: int = TARGET_EPISODES


def study_names() -> list[str]:
    """Return the names of the studies that come with the toolkit."""
    return sorted(path.stem for path in STUDIES.glob("*.toml"))


def find_study(name: str) -> Path:
    """Return the file of a study.

    Args:
      name: the name of a study in `experiments/studies`, or the path of a TOML file.

    Raises:
      StudyError: if there is no such study; the message names the nearest ones.
    """
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise StudyError(f"there is no study file {name}")
        return path
    known = study_names()
    if name not in known:
        near = difflib.get_close_matches(name, known) or known
        raise StudyError(f"there is no study {name!r}; did you mean {' or '.join(near)}?")
    return STUDIES / f"{name}.toml"


def load_study(path: Path, preset: str | None = None) -> Study:
    """Read a study file.

    Args:
      path: a TOML file as the docstring of this module describes it.
      preset: which size of the study; by default `cpu`, or for a copy beside records (`study.toml`) the
        one that its folder is named after.

    Raises:
      StudyError: if the file is not readable, lacks or misspells a field, or plans a run twice.
    """
    data, sizes = _read(path)
    copy = path.stem == "study"
    folder = path.resolve().parent.name
    named = [one for one in sizes if one != DEFAULT_PRESET and folder.endswith(f"-{one}")]
    own = named[0] if copy and named else DEFAULT_PRESET
    if copy and preset not in (None, own):
        raise StudyError(f"{path}: holds the records of preset {own!r}, not {preset!r}")
    preset = preset or own
    if preset not in sizes:
        raise StudyError(f"{path.name}: has no preset {preset!r}; it has {', '.join(sizes)}")
    settings = data["settings"] | sizes[preset].get("settings", {})
    settings = {name: _settings(path, name, fields) for name, fields in settings.items()}
    systems = {
        system for size in sizes.values() for block in size["runs"] for system in block["systems"]
    }
    for name, by_system in settings.items():
        for system in by_system.keys() - systems - {""}:
            raise StudyError(
                f"{path.name}: the setting {name!r} is about {system!r}, which has no run"
            )
    name = path.stem if preset == DEFAULT_PRESET else f"{path.stem}-{preset}"
    name = folder if copy else name
    blocks = sizes[preset]["runs"]
    runs = tuple(run for block in blocks for run in _block_runs(path, name, settings, block))
    twice = [run for run, count in Counter(run.name for run in runs).items() if count > 1]
    if twice:
        raise StudyError(f"{path.name}: plans the run {twice[0]} more than once")
    if not runs:
        raise StudyError(f"{path.name}: plans no run")
    _check_targets(path, data, {run.env_id for run in runs})
    return Study(
        name,
        data["title"].strip(),
        " ".join(data["question"].split()),
        runs,
        preset,
        sizes[preset].get("minutes"),
        data.get("targets", {}),
        data.get("target_episodes", TARGET_EPISODES),
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what a study file says, and what it says of each of its sizes, with all blocks checked."""
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StudyError(f"{path.name}: {error}") from None
    fields = {"title": str, "question": str, "settings": dict}
    optional = {"targets": dict, "target_episodes": int}
    if "presets" in data:
        _check_fields(path, "the study", data, fields | {"presets": dict}, optional)
        sizes = data["presets"]
        for name, size in sizes.items():
            parts = {"minutes": int, "settings": dict}
            _check_fields(path, f"the preset {name!r}", size, {"runs": list}, parts)
    else:
        _check_fields(path, "the study", data, fields | {"runs": list}, optional | {"minutes": int})
        sizes = {DEFAULT_PRESET: {name: data[name] for name in ("runs", "minutes") if name in data}}
    for size in sizes.values():
        for block in size["runs"]:
            _check_block(path, block)
    return data, sizes


def _check_targets(path: Path, data: Mapping[str, Any], env_ids: Collection[str]) -> None:
    if data.get("target_episodes", TARGET_EPISODES) < 1:
        raise StudyError(f"{path.name}: target_episodes must be 1 or more")
    for env_id, target in data.get("targets", {}).items():
        if env_id not in env_ids:
            raise StudyError(f"{path.name}: there is a target for {env_id!r}, which has no run")
        if not isinstance(target, int | float) or isinstance(target, bool):
            raise StudyError(f"{path.name}: the target for {env_id!r} must be a number")


def _settings(path: Path, name: str, fields: Any) -> dict[str, Setting]:
    """Read a hardware setting: by system, for those that have it in a way of their own, and for ''."""
    if not isinstance(fields, dict):
        raise StudyError(f"{path.name}: the setting {name!r} is not a table")
    own = fields.get("systems", {})
    if not isinstance(own, dict) or not all(isinstance(one, dict) for one in own.values()):
        raise StudyError(f"{path.name}: the setting {name!r}: systems must be a table of tables")
    fields = {key: value for key, value in fields.items() if key != "systems"}
    every = {"": {}, **own}
    return {system: _setting(path, name, {**fields, **one}) for system, one in every.items()}


def _setting(path: Path, name: str, fields: Any) -> Setting:
    flags = fields.pop("flags", {})
    if not isinstance(flags, dict):
        raise StudyError(f"{path.name}: the setting {name!r}: flags must be a table")
    _check_fields(path, f"the setting {name!r}", fields, SETTING_FIELDS, OPTIONAL_SETTING_FIELDS)
    processes, nodes = fields.get("processes", 1), fields.get("nodes", 1)
    if min(fields["cores"], fields["num_actor_threads"], processes, nodes) < 1:
        raise StudyError(
            f"{path.name}: the setting {name!r} needs at least one core, one thread and one process"
        )
    if processes % nodes or fields.get("gpus", 0) % nodes:
        raise StudyError(
            f"{path.name}: the setting {name!r}: processes and gpus must be as many on each of {nodes} nodes"
        )
    for key in ("actor_device_ids", "learner_device_ids"):
        _check_items(path, f"the setting {name!r}", key, fields[key], int)
    ids = {key: tuple(fields[key]) for key in ("actor_device_ids", "learner_device_ids")}
    return Setting(name=name, **{**fields, **ids}, flags=tuple(flags.items()))


def _check_block(path: Path, block: Any) -> None:
    lists = {"systems": str, "settings": str, "env_ids": str, "seeds": int}
    fields = {**dict.fromkeys(lists, list), "total_timesteps": int, "hyperparameters": dict}
    _check_fields(path, "a [[runs]] block", block, fields)
    for name, kind in lists.items():
        _check_items(path, "a [[runs]] block", name, block[name], kind)


def _block_runs(
    path: Path, study: str, settings: Mapping[str, Mapping[str, Setting]], block: Mapping[str, Any]
) -> list[PlannedRun]:
    unknown = [name for name in block["settings"] if name not in settings]
    if unknown:
        raise StudyError(
            f"{path.name}: a [[runs]] block names the setting {unknown[0]!r}, not defined"
        )
    env_ids = [env for name in block["env_ids"] for env in ENV_SETS.get(name, (name,))]
    axes = itertools.product(block["settings"], block["systems"], env_ids, block["seeds"])
    return [
        PlannedRun(
            study=study,
            system=system,
            setting=settings[setting].get(system, settings[setting][""]),
            env_id=env_id,
            seed=seed,
            total_timesteps=block["total_timesteps"],
            hyperparameters=block["hyperparameters"],
        )
        for setting, system, env_id, seed in axes
    ]


def _check_fields(
    path: Path,
    what: str,
    data: Any,
    fields: Mapping[str, type],
    optional: Mapping[str, type] = types.MappingProxyType({}),
) -> None:
    """Require exactly these fields, with these types: a misspelt one must not pass silently."""
    if not isinstance(data, dict):
        raise StudyError(f"{path.name}: {what} is not a table")
    missing = [name for name in fields if name not in data]
    fields = {**fields, **{name: kind for name, kind in optional.items() if name in data}}
    unknown = [name for name in data if name not in fields]
    if missing:
        raise StudyError(f"{path.name}: {what} lacks {missing[0]!r}")
    if unknown:
        raise StudyError(f"{path.name}: {what} has an unknown field {unknown[0]!r}")
    for name, kind in fields.items():
        if not _is(data[name], kind):
            raise StudyError(f"{path.name}: {what}: {name} must be of type {kind.__name__}")


def _check_items(path: Path, what: str, name: str, items: list, kind: type) -> None:
    if not all(_is(item, kind) for item in items):
        raise StudyError(f"{path.name}: {what}: {name} must be a list of type {kind.__name__}")


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
