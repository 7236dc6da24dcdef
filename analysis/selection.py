"""Which runs a table or figure is about: completed ones, some environments, comparable systems."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analysis.references import ATARI, game_name
from analysis.scores import final_scores
from analysis.tables import Tables

MOST_NAMED = 12  # environments of a sentence
GROUP = ["system", "setting", "env_id"]  # what the runs of one row of a table have in common


def completed(tables: Tables, without: Collection[str] = ()) -> Tables:
    """Return the tables of completed runs, except those whose folder name is in `without`."""
    runs = tables.runs["run"][tables.runs["completed"].to_numpy(bool)]
    return of_runs(tables, [run for run in runs if run_folder_name(run) not in without])


def of_runs(tables: Tables, names: Iterable[str]) -> Tables:
    """Return the tables of the named runs (their `run` column)."""
    wanted = set(names)
    frames = {
        name: frame[frame["run"].isin(wanted)].reset_index(drop=True)
        for name, frame in zip(Tables._fields, tables, strict=True)
    }
    return Tables(**frames)


def incomplete(tables: Tables) -> list[str]:
    """Return the runs that are known not to have completed; of some logs it is unknown."""
    runs = tables.runs
    known = ~runs["status"].isin(["unknown", "excerpt", "published"])
    return [str(run) for run in runs["run"][known & ~runs["completed"].astype(bool)]]


def without_runs(tables: Tables, names: Collection[str]) -> Tables:
    """Return the tables without the named runs; `quality` stays as it is."""
    dropped = list(names)
    frames = {
        name: frame
        if name == "quality"
        else frame[~frame["run"].isin(dropped)].reset_index(drop=True)
        for name, frame in zip(Tables._fields, tables, strict=True)
    }
    return Tables(**frames)


class Shared(NamedTuple):
    """The environments on which every system and setting of a table has a score.

    Attributes:
      environments: their names, sorted.
      lacking: "system, setting" -> the environments that others have and it lacks, sorted; only those
        that lack one.
    """

    environments: list[str]
    lacking: dict[str, list[str]]

    def sentence(self) -> str:
        """Return which environments a table is over, and what each row lacks, in one line."""
        number = len(self.environments)
        noun = "environment" if number == 1 else "environments"
        names = f" ({', '.join(self.environments)})" if 0 < number <= MOST_NAMED else ""
        text = f"over the {number} {noun} that all rows have{names}"
        if self.lacking:
            rows: dict[str, list[str]] = {}
            for who, envs in self.lacking.items():
                rows.setdefault(", ".join(envs), []).append(who)
            text += ". " + "; ".join(
                f"{' and '.join(who)} {'lacks' if len(who) == 1 else 'lack'} {envs}"
                for envs, who in rows.items()
            )
        return text


def shared_environments(scores: pd.DataFrame) -> Shared:
    """Return the environments on which every system and setting has a normalized score.

    Args:
      scores: as `scores.final_scores` returns them.
    """
    _, have = _environments_of(scores.dropna(subset=["normalized"]))
    if have.empty:
        return Shared([], {})
    every, shared = set.union(*have), set.intersection(*have)
    lacking = {", ".join(who): sorted(every - envs) for who, envs in have.items() if envs != every}
    return Shared(sorted(shared), lacking)


def _who(frame: pd.DataFrame) -> pd.Series:
    """Return the (system, setting) of each row."""
    pairs = zip(frame["system"].astype(str), frame["setting"].astype(str), strict=True)
    return pd.Series(list(pairs), frame.index, dtype=object)


def _environments_of(scores: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return each score's (system, setting), and (system, setting) -> the set of its environments."""
    who = _who(scores)
    return who, scores["env_id"].astype(str).groupby(who).agg(set)


def over_shared(scores: pd.DataFrame) -> tuple[pd.DataFrame, Shared]:
    """Return the scores on the environments that all systems and settings have, and which these are.

    Scores without a reference stay, so that a table names whose they are.
    """
    shared = shared_environments(scores)
    kept = scores["env_id"].isin(shared.environments) | scores["normalized"].isna()
    return scores[kept], shared


def environments_of_all(tables: Tables) -> list[str]:
    """Return the environments on which every system and setting has a run, sorted."""
    _, have = _environments_of(tables.runs)
    return sorted(set.intersection(*have)) if len(have) else []


def on_environments(tables: Tables, environments: Collection[str]) -> Tables:
    """Return the tables of runs on some environments."""
    others = tables.runs["run"][~tables.runs["env_id"].isin(list(environments))]
    return without_runs(tables, others)


def without(
    tables: Tables, env_ids: Collection[str], systems: Collection[tuple[str, str]]
) -> Tables:
    """Return tables without some environments and some systems under a setting."""
    frames = {}
    for name, frame in zip(Tables._fields, tables, strict=True):
        if "env_id" in frame:
            excluded = frame["env_id"].isin(list(env_ids)) | _who(frame).isin(list(systems))
            frame = frame[~excluded]
        frames[name] = frame.reset_index(drop=True)
    return Tables(**frames)


def environments(tables: Tables) -> list[str]:
    """Return the environments of all runs, sorted."""
    return sorted(tables.runs["env_id"].astype(str).unique())


class Comparable(NamedTuple):
    """The runs that scores over several environments are computed from.

    Attributes:
      tables: tables of these runs; None if fewer than two environments remain.
      environments: excluded environments, sorted.
      systems: excluded systems as (system, setting), sorted.
    """

    tables: Tables | None
    environments: list[str]
    systems: list[tuple[str, str]]


def comparable(tables: Tables) -> Comparable:
    """Select runs such that every system has a normalized score on the same environments.

    Aggregates over different sets of environments are not comparable. So either the environments
    that some system lacks are excluded, or the systems that lack some environment: whichever
    leaves more scores.

    Args:
      tables: completed runs.
    """
    scores = final_scores(tables).dropna(subset=["normalized"])
    if scores.empty:
        return Comparable(None, [], [])
    who, have = _environments_of(scores)
    every, shared = set.union(*have), set.intersection(*have)
    whole = set(have.index[have == every])
    if len(shared) > 1 and len(shared) * len(have) >= len(every) * len(whole):
        kept = scores["env_id"].isin(shared)
        environments, systems = sorted(every - shared), []
    else:
        kept = who.isin(whole)
        environments, systems = [], sorted(set(have.index) - whole)
    several = scores["env_id"][kept].nunique() > 1
    return Comparable(
        of_runs(tables, scores["run"][kept]) if several else None, environments, systems
    )


def score_name(tables: Tables) -> str:
    """Return the name of a normalized score: human-normalized on Atari, else relative to solving."""
    names = set(environments(tables)) | set(tables.scores["env_id"])
    atari = all(game_name(env_id) in ATARI for env_id in names)
    return "human-normalized score" if atari else "normalized score"


def run_folder_name(run: object) -> str:
    """Return the name of a run's folder, without the path, which pages must not show."""
    return Path(str(run)).name
