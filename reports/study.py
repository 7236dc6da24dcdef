"""The runs of a study, as read for its page, and the tables that several sections share."""

import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from analysis import (
    lag_tables,
    problems,
    reproducibility,
    selection,
    speed,
    study_tables,
    summary,
    time_spent,
    verdicts,
)
from analysis.importers.records import read_readable_records
from analysis.scores import EPISODES
from analysis.selection import Comparable
from analysis.tables import Tables
from experiments import state
from experiments.pool import available_cores
from experiments.study import (
    DEFAULT_PRESET,
    Study,
    StudyError,
    find_study,
    load_study,
    study_names,
)
from experiments.systems import SYSTEMS
from plots import style
from reports import cells


class ReportError(Exception):
    """A page that cannot be made; the message is one line."""


@dataclass(frozen=True)
class StudyRuns:
    """The runs of a study.

    Attributes:
      name: of the study.
      runs: folder of its records.
      out: folder of its page.
      plan: the study, from the launcher's copy beside the records, if there is one.
      tables: all runs.
      changed: names of runs that were completed by another command than the plan's.
      published: whether the records are published copies, without logs and the like.
    """

    name: str
    runs: Path
    out: Path
    plan: Study | None
    tables: Tables
    changed: tuple[str, ...] = ()
    published: bool = False

    @cached_property
    def done(self) -> Tables:
        """Completed runs; all figures and numbers use only these."""
        return selection.completed(self.tables, self.changed)

    @property
    def source(self) -> str:
        """The source of the data, for captions."""
        return f"source: run records of study {self.name}"

    @cached_property
    def look(self) -> style.Look:
        """Colours and line styles."""
        return style.look_of(self.done.runs["system"], self.done.runs["setting"])

    @property
    def score_name(self) -> str:
        """Name of normalized scores."""
        return selection.score_name(self.done)

    @property
    def score_episodes(self) -> int:
        """Number of episodes whose mean return is a score."""
        return self.plan.score_episodes if self.plan else EPISODES

    @cached_property
    def scores(self) -> pd.DataFrame:
        """Of `study_tables.score_table`."""
        return study_tables.score_table(self.done, self.score_episodes)

    @cached_property
    def curves(self) -> study_tables.LearningCurves:
        """Of `study_tables.learning_curves`."""
        return study_tables.learning_curves(self.done, self.score_episodes)

    @cached_property
    def speeds(self) -> pd.DataFrame:
        """Of `speed.speed_table`."""
        return speed.speed_table(self.done)

    @cached_property
    def times(self) -> pd.DataFrame:
        """Of `time_spent.time_table`."""
        return time_spent.time_table(self.done)

    @cached_property
    def lags(self) -> pd.DataFrame:
        """Of `lag_tables.lag_table`."""
        return lag_tables.lag_table(self.done)

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """Of `verdicts.fingerprint_pairs`."""
        return verdicts.fingerprint_pairs(self.done)

    @cached_property
    def setting_verdicts(self) -> list[dict]:
        """Of `reproducibility.verdicts`."""
        return reproducibility.verdicts(self.done, window=self.score_episodes)

    @cached_property
    def system_verdicts(self) -> list[dict]:
        """Of `reproducibility.system_verdicts`."""
        return reproducibility.system_verdicts(self.done, window=self.score_episodes)

    @cached_property
    def comparable(self) -> Comparable:
        """The runs that scores over environments are computed from."""
        return selection.comparable(self.done)

    @cached_property
    def aggregates(self) -> pd.DataFrame:
        """Of `study_tables.aggregate_table`."""
        return study_tables.aggregate_table(self.comparable.tables, self.score_episodes)

    @cached_property
    def run_times(self) -> pd.DataFrame:
        """Of `summary.run_times`, on the environments that all systems and settings have."""
        shared = selection.environments_of_all(self.done)
        return pd.DataFrame(summary.run_times(selection.on_environments(self.done, shared)))

    @cached_property
    def changing(self) -> Tables:
        """Runs of systems whose policy changes inside rollouts."""
        return lag_tables.changing(self.done)

    @cached_property
    def problems(self) -> list[tuple[str, str]]:
        """Problems with the data: (run or system, problem)."""
        planned = [run.name for run in self.plan.runs] if self.plan else []
        vary = _set_by_settings(self.plan, self.tables.runs) if self.plan else set()
        return problems.problems(self.tables, planned, settings_vary=vary, changed=self.changed)


def _set_by_settings(plan: Study, runs: pd.DataFrame) -> set[str]:
    """Return the systems some of whose hyperparameters are set by a study's hardware settings.

    A setting does so by further flags, or by a number of actors that the system records as a
    hyperparameter, as monobeast does.
    """
    recorded = {
        (system, name)
        for system, one in zip(runs["system"], runs["hyperparameters"], strict=True)
        for name in (one if isinstance(one, dict) else ())
    }
    return {
        run.system
        for run in plan.runs
        if run.setting.flags or (run.program and (run.system, run.program.actors_name) in recorded)
    }


def read_study(name: str, runs: Path, out: Path, *, published: bool = False) -> StudyRuns:
    """Read the records of a study.

    Args:
      name: of the study.
      runs: folder with its run records.
      out: folder of its page.
      published: the records are published copies, without logs and the like.

    Raises:
      ReportError: if no run is completed, or no record can be read.
      InputError: if there is no record.
    """
    tables = read_readable_records(runs, len(available_cores()), published=published)
    if tables.runs.empty:
        raise ReportError(f"{runs}: none of the {len(tables.quality)} records there can be read")
    copy = runs / "study.toml"
    plan = load_study(copy) if copy.is_file() else None
    changed = _changed(plan, runs, tables) if plan else ()
    study = StudyRuns(name, runs, out, plan, tables, changed, published)
    if not len(study.done.runs):
        how = " by a command of its study" if changed else ""
        raise ReportError(f"{runs}: none of the {len(tables.runs)} runs there is completed{how}")
    return study


def _changed(study: Study, runs: Path, tables: Tables) -> tuple[str, ...]:
    """Return the runs that another command has completed, such as that of an older study file."""
    done = {Path(run).name for run in selection.completed(tables).runs["run"]}
    folder = runs.resolve().parent
    return tuple(
        run.name
        for run in study.runs
        if run.name in done
        and run.program is not None  # the command of other systems is not known
        and state.inspect(run, folder).state is state.State.CHANGED
    )


def commands(study: StudyRuns) -> tuple[str, ...]:
    """Return the shell commands that reproduce the runs and the page."""
    runs, out = (cells.neutral_path(str(path)) for path in (study.runs, study.out))
    lines = []
    words = _study_words(study.plan) if study.plan else []
    if study.plan and not words and all(run.program in SYSTEMS.values() for run in study.plan.runs):
        words = [f"{runs}/study.toml"]  # the scripts of other systems are relative to the original
    if words:
        runs_dir = cells.neutral_path(str(study.runs.parent))
        lines.append(["python", "-m", "experiments.launch", *words, "--runs-dir", runs_dir])
    options = ["--runs", runs, "--out", out]
    lines.append(["python", "-m", "reports.build", study.name, *options])
    return tuple(shlex.join(words) for words in lines)


def _study_words(study: Study) -> list[str]:
    """Return the launcher's arguments for a study of the toolkit; [] if the plan is a different one."""
    preset = [] if study.preset == DEFAULT_PRESET else ["--preset", study.preset]
    name = study.name.removesuffix(f"-{study.preset}") if preset else study.name
    try:
        same = (
            name in study_names() and load_study(find_study(name), study.preset).runs == study.runs
        )
    except StudyError:  # it has no such preset
        same = False
    return [name, *preset] if same else []
