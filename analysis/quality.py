"""Problems with the data, which are reported instead of being silently dropped or averaged over."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from analysis import fingerprints, selection
from analysis.references import ATARI, game_name, reference
from analysis.tables import InputError, Tables, quality_frame

# A run that ends before this share of the longest run of its system and environment is short.
SHORT = 0.98
MOST_MISSING = 20  # of the 57 games, that a table of the benchmark lacks


class Refused(Exception):
    """Data with a problem, where `--strict` allows none; the message is one line."""


def check(tables: Tables, normalization: str = "human") -> pd.DataFrame:
    """Return the data-quality table: run (or system and setting), problem.

    Besides the importers' problems (runs not completed, damage, NaN) it has duplicate runs, missing
    environments and seeds, runs of unequal length, environments without a reference, runs with the
    same fingerprints and other episodes, games under two names, and tables that lack a few of the
    57 Atari games.
    """
    found = list(tables.quality.itertuples(index=False, name=None))
    runs = _runs(tables)
    for problems in (
        _doubled(runs),
        _missing(runs),
        _unequal(runs, tables.updates),
        _unknown(tables, normalization),
        _contradictory(tables),
        _aliases(runs),
        _missing_games(runs),
    ):
        found += problems
    return quality_frame(found)


def without_incomplete(
    tables: Tables, problems: pd.DataFrame, path: object
) -> tuple[Tables, pd.DataFrame]:
    """Return the tables without runs that did not complete, and the problems with a line for each.

    Raises:
      InputError: if nothing is left; the message starts with `path`.
    """
    runs = selection.incomplete(tables)
    if runs and len(runs) == len(tables.runs) and tables.scores.empty:
        raise InputError(
            f"{path}: no run is completed (--include-incomplete uses them all the same)"
        )
    what = "left out: the run is not completed (--include-incomplete)"
    added = [*problems.itertuples(index=False, name=None), *((run, what) for run in runs)]
    return selection.without_runs(tables, runs), quality_frame(added)


def refuse(problems: pd.DataFrame) -> None:
    """Raise Refused with the first problem, if there is any (`--strict`)."""
    if len(problems):
        first = problems.iloc[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise Refused(f"{first['run']}: {first['problem']}{more}")


def _runs(tables: Tables) -> pd.DataFrame:
    """Return one row per measured run and per published score, with the last step (NaN if unknown)."""
    columns = ["run", "system", "setting", "env_id", "seed"]
    measured = tables.runs[[*columns, "steps"]].astype({"run": object})
    measured = measured[tables.runs["status"] != "published"]
    published = tables.scores[columns].assign(steps=np.nan)
    parts = [part for part in (measured, published) if len(part)]
    if not parts:
        return pd.DataFrame(columns=[*columns, "steps"])
    return pd.concat([p.astype(dict.fromkeys(columns[:4], object)) for p in parts])


def _doubled(runs: pd.DataFrame) -> Iterator[tuple[str, str]]:
    same = ["system", "setting", "env_id", "seed"]
    for key, group in runs.groupby(same, sort=True):
        for run in group["run"].iloc[1:]:
            system, setting, env_id, seed = key
            named = f"{system}, {setting}, {env_id}, seed {seed}"
            yield run, f"duplicate run: {named} is also in {group['run'].iloc[0]}"


def _missing(runs: pd.DataFrame) -> Iterator[tuple[str, str]]:
    everywhere = sorted(set(runs["env_id"]))
    for (system, setting), group in runs.groupby(["system", "setting"], sort=True):
        counts = group.groupby("env_id")["seed"].nunique()
        most = counts.max()
        if lacking := [env_id for env_id in everywhere if env_id not in counts]:
            what = f"missing environment{'s' * (len(lacking) > 1)}: no run of {', '.join(lacking)}"
            yield f"{system}, {setting}", what
        if fewer := [f"{n} of {env_id}" for env_id, n in counts.items() if n < most]:
            what = f"missing seeds: {', '.join(fewer)}, {most} of others"
            yield f"{system}, {setting}", what


def _unequal(runs: pd.DataFrame, updates: pd.DataFrame) -> Iterator[tuple[str, str]]:
    runs = runs.dropna(subset="steps").sort_values("steps", ascending=False, kind="stable")
    for _, group in runs.groupby(["system", "env_id"], sort=True):
        longest = group.iloc[0]
        short = group[group["steps"] < SHORT * longest["steps"]]
        if len(short):
            # Runs of the same length may end an update apart, which may be of many steps.
            ends = updates.loc[updates["run"] == longest["run"], "step"]
            short = short[short["steps"] < longest["steps"] - np.nan_to_num(ends.diff().max())]
        for run, steps in zip(short["run"], short["steps"], strict=True):
            yield run, f"unequal length: ends at step {steps:.0f}, others at {longest['steps']:.0f}"


def _unknown(tables: Tables, normalization: str) -> Iterator[tuple[str, str]]:
    raw = tables.scores["env_id"][~tables.scores["normalized"].astype(bool)]
    envs = sorted({*tables.runs["env_id"], *raw})
    if unknown := [env for env in envs if reference(env, normalization) is None]:
        noun = "environment" if len(unknown) == 1 else "environments"
        what = f"unknown {noun}: no {normalization} reference, left out of normalized scores"
        yield ", ".join(unknown), what


def _contradictory(tables: Tables) -> Iterator[tuple[str, str]]:
    if not len(tables.updates):
        return
    for row in fingerprints.pairs(tables).itertuples():
        if row.identical and row.to_the_end and not row.same_episodes:
            yield row.run_b, f"same fingerprints as {row.run_a} to the end, but other episodes"


def _aliases(runs: pd.DataFrame) -> Iterator[tuple[str, str]]:
    names: dict[str, list[str]] = {}
    for env_id in sorted(set(runs["env_id"])) if len(runs) else ():
        names.setdefault(game_name(env_id), []).append(env_id)
    for game, several in names.items():
        if len(several) > 1:
            yield (
                ", ".join(several),
                f"names of one game, {game}: counted as {len(several)} environments",
            )


def _missing_games(runs: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield the games that a table lacks that has most of the 57."""
    for (system, setting), group in runs.groupby(["system", "setting"], sort=True):
        games = {game_name(env_id) for env_id in set(group["env_id"])} & ATARI.keys()
        missing = sorted(ATARI.keys() - games)
        if missing and len(missing) <= MOST_MISSING:
            what = f"{len(games)} of the 57 Atari games: without {', '.join(missing)}"
            yield f"{system}, {setting}", what
