"""Studies as data: a TOML file describes what to compare, and this module lists the runs.

A study is systems x hardware settings x environments x seeds x budget, in one or more blocks:

    title = "..."
    question = "..."
    minutes = 15  # on two CPU cores; optional

What its page says first is optional, too:

    paper = "Cleanba"  # whose question it is; the index groups pages by it
    findings = ["bits", "speedup"]  # which sentences answer the question: `Finding`
    main_figure = "curves_steps"  # which figure shows it: `MainFigure`
    remark = "..."  # what the findings, which are computed, leave out

    [settings.a0-l0-t1]
    num_actor_threads = 1
    ...

    [[runs]]
    systems = ["cleanba_ppo"]
    settings = ["a0-l0-t1"]
    env_ids = ["CartPole-v1"]
    seeds = [1, 2, 3]
    total_timesteps = 100_000
    checkpoints = 3  # kept, evenly spread, for an audit (docs/audit.md); optional
    [runs.hyperparameters]
    num_envs = 8

The same question in several sizes is several presets:

    [presets.cpu]
    minutes = 15
    [[presets.cpu.runs]]
    ...
    [presets.paper.settings.a0-l0-t1]    # replaces the setting above
    ...
    [[presets.paper.runs]]
    ...

Hyperparameters are passed to the systems of the block as flags. A hardware setting has the fields of
`Setting`; experiments/systems.py translates them for each system. Flags that only some systems have:

    [settings.delayed.flags]
    learner_delay_seconds = 1.0

A setting may differ by system, if systems use the same machine in different ways:

    [settings.workstation.systems.monobeast]
    num_actor_threads = 80

A system that does not come with the toolkit is described in the study (docs/adding-a-baseline.md):

    [systems.my_a2c]
    script = "my_a2c.py"

A score is the mean return of the last 100 episodes, as is a point of a learning curve. Runs of few episodes
need fewer:

    score_episodes = 10

If the question is how many steps a run needs to reach some score, reports show it:

    [targets]
    CartPole-v1 = 400

`env_ids = ["atari57"]` stands for the 57 games of the papers, `atari12` for those of Cleanba's figure 5.
"""

import difflib
import itertools
import re
import shutil
import tomllib
import types
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from cleanba import record
from cleanba.record.files import LARGEST_STUDY, read_file
from cleanba.record.redaction import has_token
from cleanba.record.schema import LARGEST, LONGEST_NAME, SHOWN, Name
from experiments.games import ENV_SETS
from experiments.systems import ROOT, SYSTEMS, Flags, System

STUDIES = Path(__file__).parent / "studies"
DEFAULT_PRESET = "cpu"
SCORE_EPISODES = 100  # the default of the analysis of scores

MOST_RUNS = 10_000  # of a study
MOST_DOTS = 100  # in a line of a study file

# Sentences that a page computes from its tables (reports/findings.py), and its figures.
Finding = Literal[
    "bits",
    "targets",
    "verdicts",
    "differences",
    "scores",
    "aggregates",
    "speeds",
    "speedup",
    "run_times",
    "lag",
    "changes",
]
MainFigure = Literal[
    "aggregates", "efficiency", "curves_steps", "curves_time", "final_scores", "speed", "run_times",
    "scaling", "speedups", "policy_lag", "policy_changes",
]  # fmt: skip

Count = Annotated[int, Meta(ge=1, le=LARGEST)]
CountOrZero = Annotated[int, Meta(ge=0, le=LARGEST)]
# A name that becomes part of a folder's: neither a path nor hidden.
FolderName = Annotated[str, Meta(pattern=rf"^(?!\.)(?!.*[/\\]){SHOWN}+\Z", max_length=LONGEST_NAME)]
T = TypeVar("T")


class StudyError(Exception):
    """A study that cannot be read or is inconsistent; the message is one line."""


class Setting(Struct, frozen=True, forbid_unknown_fields=True):
    """A hardware setting: what may change the speed of a run, and nothing else about it.

    Attributes:
      name: of the setting.
      num_actor_threads: of each actor device; in systems without threads, actor processes or peers.
      actor_device_ids: devices that act, of each process.
      learner_device_ids: devices that learn, of each process.
      host_devices: devices that JAX makes of the CPU; 0 leaves the machine as it is.
      cores: CPU cores that a run has to itself, for all its processes.
      processes: of a run.
      gpus: of a run, for all its processes; it sees no others.
      nodes: machines that the processes and GPUs are spread over evenly.
      flags: further flags, of systems that have them.
    """

    name: str
    num_actor_threads: Count
    actor_device_ids: tuple[int, ...]
    learner_device_ids: tuple[int, ...]
    host_devices: int
    cores: Count
    processes: Count = 1
    gpus: CountOrZero = 0
    nodes: Count = 1
    flags: tuple[tuple[str, Any], ...] = ()


class PlannedRun(NamedTuple):
    """One run of a study."""

    study: str
    system: str
    program: System | None  # None if nothing describes the system
    setting: Setting
    env_id: str
    seed: int
    total_timesteps: int
    hyperparameters: Mapping[str, Any]
    checkpoints: int = 0  # to keep, at least; 0 for the number that resuming needs

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return record.run_name(self.system, self.setting.name, self.env_id, self.seed)


class Study(NamedTuple):
    """A question, and the runs that answer it.

    Attributes:
      name: of the folder of its records: the file's name, with the preset's unless that is the default.
      title: of its report.
      question: that it answers.
      runs: to be made.
      preset: which of the study's sizes this is.
      minutes: that two CPU cores take, according to the file; None if it does not give them.
      paper: whose question it is; '' if it is the toolkit's own.
      findings: kinds of sentences that answer the question; () for the page's choice.
      main_figure: that shows the answer; '' for the page's choice.
      remark: what the findings leave out, in its authors' words.
      targets: score that runs are to reach, by environment; only of the preset's environments.
      score_episodes: number of episodes whose mean return is a score.
    """

    name: str
    title: str
    question: str
    runs: tuple[PlannedRun, ...]
    preset: str = DEFAULT_PRESET
    minutes: int | None = None
    paper: str = ""
    findings: tuple[Finding, ...] = ()
    main_figure: MainFigure | Literal[""] = ""
    remark: str = ""
    targets: Mapping[str, float] = types.MappingProxyType({})
    score_episodes: int = SCORE_EPISODES


class _Block(Struct, forbid_unknown_fields=True):
    """A [[runs]] block as the file has it: the product of its lists."""

    systems: list[FolderName]
    settings: list[FolderName]
    env_ids: list[Name]
    seeds: list[CountOrZero]
    total_timesteps: Count
    hyperparameters: dict[str, Any]
    checkpoints: CountOrZero = 0


class _Preset(Struct, forbid_unknown_fields=True):
    """One size of a study as the file has it."""

    runs: list[_Block]
    settings: dict[FolderName, dict[str, Any]] = {}
    minutes: int | None = None


class _File(Struct, forbid_unknown_fields=True):
    """A study file. Its settings become `Setting`s once those of the preset and system are known."""

    title: str
    question: str
    settings: dict[FolderName, Any]
    systems: dict[FolderName, System] = {}
    runs: list[_Block] | None = None
    minutes: int | None = None
    presets: dict[str, _Preset] | None = None
    paper: str = ""
    findings: tuple[Finding, ...] = ()
    main_figure: MainFigure | Literal[""] = ""
    remark: str = ""
    targets: dict[str, float] = {}
    score_episodes: Count = SCORE_EPISODES


_FIELDS = [
    field.name
    for kind in (_File, _Preset, _Block, Setting, System, Flags)
    for field in msgspec.structs.fields(kind)
]


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
    file = _decode(path, "", _read_toml(path), _File)
    sizes = _presets(path, file)
    is_copy = path.stem == "study"
    preset = _choose_preset(path, sizes, preset, is_copy)
    known = {name for one in sizes.values() for block in one.runs for name in block.systems}
    settings = {
        name: _settings(path, name, fields, known)
        for name, fields in (file.settings | sizes[preset].settings).items()
    }
    programs = SYSTEMS | _own_systems(path, file)
    name = path.stem if preset == DEFAULT_PRESET else f"{path.stem}-{preset}"
    name = path.resolve().parent.name if is_copy else name
    blocks = sizes[preset].runs
    planned = sum(len(b.systems) * len(b.settings) * len(b.env_ids) * len(b.seeds) for b in blocks)
    if planned > MOST_RUNS:
        raise StudyError(f"{path.name}: plans {planned} runs; a study has at most {MOST_RUNS}")
    runs = tuple(run for block in blocks for run in _plan(path, name, programs, settings, block))
    twice = [run for run, count in Counter(run.name for run in runs).items() if count > 1]
    if twice:
        raise StudyError(f"{path.name}: plans the run {twice[0]} more than once")
    if not runs:
        raise StudyError(f"{path.name}: plans no run")
    in_any = {env_id for one in sizes.values() for block in one.runs for env_id in _env_ids(block)}
    for env_id in file.targets.keys() - in_any:
        raise StudyError(f"{path.name}: there is a target for {env_id!r}, which has no run")
    in_preset = {run.env_id for run in runs}
    return Study(
        name,
        file.title.strip(),
        " ".join(file.question.split()),
        runs,
        preset,
        sizes[preset].minutes,
        " ".join(file.paper.split()),
        file.findings,
        file.main_figure,
        " ".join(file.remark.split()),
        {env_id: score for env_id, score in file.targets.items() if env_id in in_preset},
        file.score_episodes,
    )


def _read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file."""
    try:
        text = read_file(path, LARGEST_STUDY).decode()
        if deep := next(
            (n for n, line in enumerate(text.splitlines(), 1) if line.count(".") > MOST_DOTS), 0
        ):
            # tomllib takes time and memory in proportion to the square of a key's parts
            raise StudyError(f"{path.name}, line {deep}: has more than {MOST_DOTS} dots")
        if has_token(text):
            raise StudyError(
                f"{path.name}: holds a secret, which is stored with the records: "
                "put it into an environment variable"
            )
        return tomllib.loads(text)
    except OSError as error:
        raise StudyError(f"{path.name}: {error.strerror}") from None
    except RecursionError:
        raise StudyError(f"{path.name}: nested too deeply") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StudyError(f"{path.name}: {error}") from None


def explain(setting: Setting) -> str:
    """Return a hardware setting in words: `actor device 0, learner devices 0 and 1, 2 actor threads, ...`."""

    def devices(kind: str, ids: tuple[int, ...]) -> str:
        noun = "device" if len(ids) == 1 else "devices"
        return f"{kind} {noun} {' and '.join(filter(None, (', '.join(map(str, ids[:-1])), str(ids[-1]))))}"

    def count(number: int, noun: str) -> str:
        return f"{number} {noun}{'' if number == 1 else 's'}"

    parts = [
        *(devices("actor", ids) for ids in [setting.actor_device_ids] if ids),
        *(devices("learner", ids) for ids in [setting.learner_device_ids] if ids),
        count(setting.num_actor_threads, "actor thread")
        + (" per actor device" if len(setting.actor_device_ids) > 1 else ""),
        count(setting.cores, "CPU core"),
        *([count(setting.gpus, "GPU")] if setting.gpus else []),
        *([f"{setting.processes} processes of this kind"] if setting.processes > 1 else []),
        *([f"{setting.nodes} nodes"] if setting.nodes > 1 else []),
        *(f"{name.replace('_', ' ')} {value}" for name, value in setting.flags),
    ]
    return ", ".join(parts)


def check_systems(runs: Iterable[PlannedRun]) -> None:
    """Refuse runs of systems that nothing describes, whose program is missing, or that cannot make them.

    Raises:
      StudyError: for the first such run; the message names the nearest systems.
    """
    for run in runs:
        program, several = run.program, run.setting.processes > 1
        if program is None:
            near = difflib.get_close_matches(run.system, SYSTEMS) or list(SYSTEMS)
            raise StudyError(
                f"there is no system {run.system!r}; did you mean {' or '.join(near)}?"
            )
        if not (ROOT / program.script).is_file():
            raise StudyError(f"{run.system}: there is no program {program.script}")
        if program.interpreter and shutil.which(program.interpreter[0]) is None:
            raise StudyError(f"{run.system}: there is no program {program.interpreter[0]}")
        if several and (program.interpreter or not program.flags.distributed):
            raise StudyError(
                f"the setting {run.setting.name!r} has several processes; {run.system} runs in one"
            )


def _decode(path: Path, where: str, data: Any, kind: type[T]) -> T:
    """Convert a table to its type; a misspelled field must not pass silently."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        unknown = re.search("unknown field `(.*?)`", str(error))
        others = [name for name in _FIELDS if unknown and name != unknown[1]]
        near = difflib.get_close_matches(unknown[1], others, n=1) if unknown else []
        advice = f"; did you mean {near[0]}?" if near else ""
        raise StudyError(f"{path.name}: {where}{error}{advice}") from None


def _presets(path: Path, file: _File) -> Mapping[str, _Preset]:
    """Return the sizes of a study: its presets, or the only one."""
    outside = file.runs is not None or file.minutes is not None
    if file.presets is not None and not outside:
        return file.presets
    if file.runs is not None and file.presets is None:
        return {DEFAULT_PRESET: _Preset(file.runs, minutes=file.minutes)}
    raise StudyError(
        f"{path.name}: needs either [[runs]] or [presets], which have runs and minutes"
    )


def _choose_preset(
    path: Path, sizes: Mapping[str, _Preset], preset: str | None, is_copy: bool
) -> str:
    folder = path.resolve().parent.name
    others = sorted((one for one in sizes if one != DEFAULT_PRESET), key=len)
    if not is_copy and (ends := [one for one in others if path.stem.endswith(f"-{one}")]):
        raise StudyError(f"{path.name}: a study with a preset {ends[0]!r} cannot end in -{ends[0]}")
    named = [one for one in others if folder.endswith(f"-{one}")]
    own = named[-1] if is_copy and named else DEFAULT_PRESET
    if is_copy and preset not in (None, own):
        raise StudyError(f"{path}: holds the records of preset {own!r}, not {preset!r}")
    preset = preset or own
    if preset not in sizes:
        raise StudyError(f"{path.name}: has no preset {preset!r}; it has {', '.join(sizes)}")
    return preset


def _own_systems(path: Path, file: _File) -> dict[str, System]:
    """Return the systems that a study file describes; their programs are relative to the file."""
    own = {}
    for name, system in file.systems.items():
        if name in SYSTEMS:
            raise StudyError(f"{path.name}: the system {name!r} comes with the toolkit: rename it")
        script = str(path.resolve().parent / system.script)
        own[name] = msgspec.structs.replace(system, script=script)
    return own


def _settings(path: Path, name: str, fields: Any, known: Iterable[str]) -> dict[str, Setting]:
    """Return a hardware setting by system, for those that have their own; that of the others is ''."""
    where = f"the setting {name!r}: "
    fields = _decode(path, where, fields, dict[str, Any])
    own = _decode(path, where + "systems: ", fields.pop("systems", {}), dict[str, dict[str, Any]])
    for system in own.keys() - known:
        raise StudyError(f"{path.name}: the setting {name!r} is about {system!r}, which has no run")
    if "name" in fields:
        raise StudyError(f"{path.name}: {where}its name is the name of its table, not a field")
    return {
        system: _setting(path, where, {**fields, **changes, "name": name})
        for system, changes in {"": {}, **own}.items()
    }


def _setting(path: Path, where: str, fields: dict[str, Any]) -> Setting:
    flags = _decode(path, where + "flags: ", fields.get("flags", {}), dict[str, Any])
    hashable = {n: tuple(v) if isinstance(v, list) else v for n, v in flags.items()}
    setting = _decode(path, where, fields | {"flags": tuple(hashable.items())}, Setting)
    if setting.processes % setting.nodes or setting.gpus % setting.nodes:
        raise StudyError(
            f"{path.name}: {where}processes and gpus must be multiples of its {setting.nodes} nodes"
        )
    return setting


def _env_ids(block: _Block) -> list[str]:
    """Return the environments of a block, those of sets one by one."""
    return [env_id for name in block.env_ids for env_id in ENV_SETS.get(name, (name,))]


def _plan(
    path: Path,
    study: str,
    programs: Mapping[str, System],
    settings: Mapping[str, Mapping[str, Setting]],
    block: _Block,
) -> list[PlannedRun]:
    for name in block.settings:
        if name not in settings:
            raise StudyError(
                f"{path.name}: a [[runs]] block names the setting {name!r}, not defined"
            )
    return [
        PlannedRun(
            study=study,
            system=system,
            program=programs.get(system),
            setting=settings[setting].get(system, settings[setting][""]),
            env_id=env_id,
            seed=seed,
            total_timesteps=block.total_timesteps,
            hyperparameters=block.hyperparameters,
            checkpoints=block.checkpoints,
        )
        for setting, system, env_id, seed in itertools.product(
            block.settings, block.systems, _env_ids(block), block.seeds
        )
    ]
