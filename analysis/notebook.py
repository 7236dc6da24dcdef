"""One call for each result, for notebooks and scripts: `import analysis; analysis.aggregate(data)`.

`data` is what `load` returns, or a dictionary in rliable's format: algorithm -> normalized scores, of shape
`[runs, tasks]`, or `[runs, tasks, frames]` for `curves` and `sample_efficiency`. An optional entry `tasks`
names the tasks. Every function returns a DataFrame, and `plots` has a module whose `draw` accepts it.

Aggregates cover the environments that all rows share. `attrs["environments"]` of the result describes them,
and a warning is issued if a row lacks an environment that others have.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from analysis import (
    bootstrap,
    importers,
    learning_curves,
    output,
    quality,
    reproducibility,
    selection,
    summary,
)
from analysis.arrays import Arrays, score_curves, score_tables
from analysis.learning_curves import POINTS, Curves
from analysis.scores import EPISODES, Rule, final_scores
from analysis.selection import Shared
from analysis.tables import InputError, Tables

CURVE_REPETITIONS = 2000


def load(
    paths: Path | str | Sequence[Path | str],
    source: str = "auto",
    include_incomplete: bool = False,
    normalization: str = "human",
) -> Tables:
    """Read runs, logs and tables of scores, of all kinds that lie at or below some paths.

    Args:
      paths: files and folders, or one of these.
      source: kind of log, one of `importers.SOURCES`.
      include_incomplete: keep runs that are known not to have completed.
      normalization: `human` or `record`, which decides what environments have no reference.

    Returns:
      DataFrames: curves, rollouts, updates, runs, scores, and quality, which names all problems.

    Raises:
      InputError: if a path does not exist, holds no log, or is damaged.
    """
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    tables = importers.read(paths, source)
    problems = quality.check(tables, normalization)
    if not include_incomplete:
        tables, problems = quality.without_incomplete(tables, problems, paths[0])
    return tables._replace(quality=problems)


def aggregate(
    data: Tables | Arrays,
    *,
    normalization: str = "human",
    episodes: int = EPISODES,
    at_step: float | None = None,
    at_time: float | None = None,
    best: bool = False,
    repetitions: int = bootstrap.REPETITIONS,
    level: float = bootstrap.LEVEL,
    seed: int = 0,
    method: str = "percentile",
) -> pd.DataFrame:
    """Return median, IQM, mean and optimality gap of each system and setting, with intervals.

    Args:
      data: tables, or algorithm -> `[runs, tasks]`.
      normalization: `human` or `record`.
      episodes: that a score averages.
      at_step: score at this step, instead of at the end.
      at_time: score at this wall time (s).
      best: score of the best consecutive episodes.
      repetitions: bootstrap replicates.
      level: confidence level.
      seed: seed of the draws.
      method: `percentile` or `bca`.

    Returns:
      system, setting, metric, value, low, high, runs, environments, note.
    """
    rule = Rule(episodes, at_step, at_time, best)
    scores, shared = selection.over_shared(_scores(data, normalization, rule))
    entries = summary.aggregate(scores, repetitions, level, seed, method, episodes)
    return _over(summary.aggregate_frame(entries), shared, level)


def compare(
    data: Tables | Arrays,
    between: str = "systems",
    *,
    axis: str = "step",
    margin: float = reproducibility.MARGIN,
    alpha: float = reproducibility.ALPHA,
    seed: int = 0,
) -> pd.DataFrame:
    """Return a verdict on every two systems, or on every two settings of a system.

    Args:
      data: tables, or algorithm -> `[runs, tasks]`.
      between: `systems` (under each setting) or `settings` (of each system).
      axis: of learning curves, `step` or `time`.
      margin: largest difference that counts as equivalent, as a share of the level.
      alpha: chance that a table without any difference has a verdict *different*.
      seed: of permutations and bootstrap.

    Returns:
      One row per pair with the columns of `reproducibility.verdicts`, or of `system_verdicts`; `verdict` is
      identical, equivalent, different or undecided. `by_environment` expands the column of that name.
    """
    functions = {
        "systems": reproducibility.system_verdicts,
        "settings": reproducibility.verdicts,
    }
    if between not in functions:
        raise InputError(f"between: {between!r} is none of {', '.join(functions)}")
    tables = data if isinstance(data, Tables) else score_tables(_arrays(data))
    entries = functions[between](tables, axis, margin, alpha, seed=seed)
    if not entries:
        raise InputError(f"there are no two {between} to compare")
    rows = [{k: v for k, v in entry.items() if k != "by_environment"} for entry in entries]
    return output.flat(rows).assign(by_environment=[e["by_environment"] for e in entries])


def by_environment(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return what verdicts rest on: one row per pair, environment and outcome.

    Args:
      verdicts: of `compare`.

    Returns:
      The columns that name the pair, and those of `comparison.Row`.
    """
    names = [name for name in verdicts if name.startswith(("system", "setting"))]
    rows = [
        {**pair[names].to_dict(), **row}
        for _, pair in verdicts.iterrows()
        for row in pair["by_environment"]
    ]
    return pd.DataFrame(rows)


def curves(
    data: Tables | Arrays,
    *,
    points: int = POINTS,
    episodes: int = EPISODES,
    frames: ArrayLike | None = None,
    repetitions: int = CURVE_REPETITIONS,
    level: float = bootstrap.LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Return the learning curves of each system and setting on each environment, with bands over seeds.

    Args:
      data: tables, or algorithm -> `[runs, tasks, frames]`.
      points: of each curve.
      episodes: that a point averages.
      frames: steps of the last axis of the arrays.
      repetitions: bootstrap replicates.
      level: confidence level.
      seed: seed of the draws.

    Returns:
      system, setting, env_id, step, seconds, value, low, high, runs: the mean score and the mean wall time at
      each step.
    """
    measured = _curves(data, points, episodes, frames)
    frame = learning_curves.curve_table(measured, repetitions=repetitions, level=level, seed=seed)
    return _over(frame, None, level)


def sample_efficiency(
    data: Tables | Arrays,
    *,
    metrics: Sequence[str] = ("median", "iqm"),
    normalization: str = "human",
    points: int = POINTS,
    episodes: int = EPISODES,
    frames: ArrayLike | None = None,
    repetitions: int = CURVE_REPETITIONS,
    level: float = bootstrap.LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Return aggregates of normalized scores along training, over all environments.

    Args:
      data: tables, or algorithm -> `[runs, tasks, frames]`.
      metrics: some of median, iqm, mean, optimality_gap.
      normalization: `human` or `record`.
      points: of each curve.
      episodes: that a point averages.
      frames: steps of the last axis of the arrays.
      repetitions: bootstrap replicates.
      level: confidence level.
      seed: seed of the draws.

    Returns:
      system, setting, metric, step, seconds, value, low, high, runs, environments.
    """
    shared = None
    if isinstance(data, Tables):
        shared = selection.shared_environments(final_scores(data, normalization=normalization))
        data = selection.on_environments(data, shared.environments)
    measured = _curves(data, points, episodes, frames)
    if shared is not None:
        measured = learning_curves.normalized(measured, normalization)
    frame = learning_curves.aggregate_curve_table(measured, metrics, repetitions, level, seed)
    return _over(frame, shared, level)


def profiles(
    data: Tables | Arrays,
    taus: ArrayLike | None = None,
    *,
    normalization: str = "human",
    episodes: int = EPISODES,
    repetitions: int = CURVE_REPETITIONS,
    level: float = bootstrap.LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Return performance profiles: the share of runs whose score is above each threshold.

    Args:
      data: tables, or algorithm -> `[runs, tasks]`.
      taus: thresholds on the normalized score; by default from 0 to the highest score, but at most 8.
      normalization: `human` or `record`.
      episodes: that a score averages.
      repetitions: bootstrap replicates.
      level: confidence level, at each threshold.
      seed: seed of the draws.

    Returns:
      system, setting, tau, value, low, high, runs, environments.
    """
    scores, shared = selection.over_shared(_scores(data, normalization, Rule(episodes)))
    taus = summary.thresholds(scores) if taus is None else np.asarray(taus, np.float64)
    return _over(summary.profiles(scores, taus, repetitions, level, seed), shared, level)


def probability_of_improvement(
    data: Tables | Arrays,
    *,
    normalization: str = "human",
    episodes: int = EPISODES,
    repetitions: int = CURVE_REPETITIONS,
    level: float = bootstrap.LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Return, for every two systems, the probability that a run of X beats one of Y.

    Args:
      data: tables, or algorithm -> `[runs, tasks]`.
      normalization: `human` or `record`.
      episodes: that a score averages.
      repetitions: bootstrap replicates.
      level: confidence level.
      seed: seed of the draws.

    Returns:
      x, y, value, low, high, environments.
    """
    scores, shared = selection.over_shared(_scores(data, normalization, Rule(episodes)))
    frame = pd.DataFrame(summary.improvements(scores, repetitions, level, seed))
    return _over(frame, shared, level)


def _scores(data: Tables | Arrays, normalization: str, rule: Rule) -> pd.DataFrame:
    tables = data if isinstance(data, Tables) else score_tables(_arrays(data))
    return final_scores(tables, rule, normalization)


def _curves(data: Tables | Arrays, points: int, episodes: int, frames: ArrayLike | None) -> Curves:
    if not isinstance(data, Tables):
        return score_curves(_arrays(data), frames)
    if data.curves.empty:
        raise InputError("no learning curves, only scores")
    return learning_curves.run_curves(data, points=points, window=episodes)


def _arrays(data: object) -> Arrays:
    if not isinstance(data, Mapping):
        kind = type(data).__name__
        raise InputError(f"expected what `load` returns, or algorithm -> array, not {kind}")
    return data


def _over(frame: pd.DataFrame, shared: Shared | None, level: float) -> pd.DataFrame:
    """Return a table with the level of its intervals, and the environments it is over, as attributes."""
    frame.attrs["level"] = level
    if shared is None:
        return frame
    frame.attrs["environments"] = shared.sentence()
    if shared.lacking:
        warnings.warn(shared.sentence(), stacklevel=3)
    return frame
