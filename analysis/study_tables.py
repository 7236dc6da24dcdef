"""Tables of a study: scores, targets, aggregates and learning curves by system, setting and environment."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import aggregates, bootstrap
from analysis.learning_curves import (
    aggregate_curve_table,
    curve_table,
    normalized,
    run_curves,
    run_table,
    update_curve_table,
)
from analysis.scores import EPISODES, Rule, final_scores, hts_metrics
from analysis.selection import GROUP, environments, of_runs
from analysis.summary import aggregate, aggregate_frame
from analysis.tables import Tables


def score_table(tables: Tables, window: int = EPISODES) -> pd.DataFrame:
    """Return the mean final score of each system, setting and environment, with its interval.

    Args:
      tables: completed runs.
      window: number of episodes that a score averages.

    Returns:
      system, setting, env_id, value, low, high (NaN with one run), runs, each (scores of the runs).
    """
    rows = []
    scores = final_scores(tables, Rule(window))
    for key, group in scores[scores["score"].notna()].groupby(GROUP, observed=True, sort=True):
        each = group["score"].to_numpy(float)
        interval = bootstrap.interval(_mean_of(each), [len(each)])
        rows.append((*key, *interval, len(each), tuple(each)))
    return pd.DataFrame(rows, columns=[*GROUP, "value", "low", "high", "runs", "each"])


def _mean_of(scores: np.ndarray) -> Callable[[np.ndarray | None], np.ndarray]:
    return lambda counts: aggregates.mean([scores], counts)


def target_table(tables: Tables, targets: Mapping[str, float], episodes: int) -> pd.DataFrame:
    """Return when runs first reached the target return of their environment.

    Args:
      tables: completed runs.
      targets: environment -> target for the mean return.
      episodes: number of consecutive episodes that the mean is over.

    Returns:
      system, setting, env_id, target, runs, reached (number of runs that did), fallen (of these, the
      number whose final score is below the target), steps, seconds (one per run; infinite if it did not
      reach the target).
    """
    rows = []
    for env_id, target in targets.items():
        runs = tables.runs[tables.runs["env_id"] == env_id]
        found = hts_metrics(of_runs(tables, runs["run"]), [target], window=episodes)
        measured = dict(list(found.groupby(GROUP, observed=True)))
        for key, count in runs.groupby(GROUP, observed=True, sort=True).size().items():
            group = measured.get(key, found.head(0))
            never = (np.inf,) * (count - len(group))  # runs without an episode
            steps, seconds = (
                (*group[f"required_{what}_{target:g}"].astype(float), *never)
                for what in ("step", "time")
            )
            reached = np.isfinite(steps)
            below = (*(group["final_metric"] < target), *(False for _ in never))
            fallen = int((reached & below).sum())
            rows.append((*key, target, count, int(reached.sum()), fallen, steps, seconds))
    columns = ["target", "runs", "reached", "fallen", "steps", "seconds"]
    return pd.DataFrame(rows, columns=[*GROUP, *columns])


def aggregate_table(tables: Tables | None, window: int = EPISODES) -> pd.DataFrame:
    """Return `analysis.summary.aggregate_frame` of the final scores, without metrics that have no value.

    Environments without a reference score do not count.

    Args:
      tables: completed runs; None gives an empty table.
      window: number of episodes that a score averages.
    """
    entries = []
    if tables is not None:
        entries = aggregate(final_scores(tables, Rule(window)), window=window)
    frame = aggregate_frame(entries)
    return frame[frame["value"].notna()].reset_index(drop=True)


class LearningCurves(NamedTuple):
    """Learning curves of a study, on a separate grid for each environment.

    Attributes:
      means: rows of `learning_curves.curve_table`.
      runs: rows of `learning_curves.run_table`.
    """

    means: pd.DataFrame
    runs: pd.DataFrame


def learning_curves(tables: Tables, window: int = EPISODES) -> LearningCurves:
    """Return the learning curves of systems and settings, and of their runs.

    Args:
      tables: completed runs.
      window: number of episodes that a point averages.
    """
    runs = tables.runs
    # Filtering the large tables, which curves do not need, would take seconds per environment.
    needed = tables._replace(updates=tables.updates.head(0), rollouts=tables.rollouts.head(0))
    curves = [
        run_curves(of_runs(needed, runs["run"][runs["env_id"] == env_id]), window=window)
        for env_id in environments(tables)
    ]
    return LearningCurves(
        *(
            pd.concat([table(each) for each in curves], ignore_index=True)
            for table in (curve_table, run_table)
        )
    )


def value_losses(tables: Tables) -> pd.DataFrame:
    """Return `learning_curves.update_curve_table` of the value loss, one grid per environment."""
    runs = tables.runs
    frames = [
        update_curve_table(of_runs(tables, runs["run"][runs["env_id"] == env_id]), "value_loss")
        for env_id in environments(tables)
    ]
    return pd.concat(frames or [update_curve_table(tables, "value_loss")], ignore_index=True)


def efficiency(
    tables: Tables | None, metrics: Sequence[str] = ("median",), window: int = EPISODES
) -> pd.DataFrame:
    """Return `learning_curves.aggregate_curve_table`.

    Args:
      tables: completed runs; None gives an empty table.
      metrics: names of `aggregates.AGGREGATES`.
      window: number of episodes that a point averages.
    """
    if tables is None:
        return pd.DataFrame()
    return aggregate_curve_table(normalized(run_curves(tables, window=window)), metrics)
