"""Learning curves: every run on one grid, and bands over runs.

A mean curve against wall time consists of the mean score and the mean wall time of its runs at equal steps. A
mean at equal times would stop where the fastest run ends, before the others reach their final score.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import aggregates, bootstrap
from analysis.quality import SHORT
from analysis.references import normalize
from analysis.scores import EPISODES, ordered_episodes, trailing_mean
from analysis.tables import KEYS, Tables, split_runs

AXES = {"step": "step", "time": "wall_time"}
POINTS = 100
NO_TOTALS = {"steps": np.nan, "seconds": np.nan}


class Curves(NamedTuple):
    """Runs on one grid.

    Attributes:
      axis: `step` or `time`.
      grid: `[P]`, agent steps or seconds.
      values: `[N, P]`, the running mean of the returns; NaN before the first episode of a run and
        beyond its end. Curves are extrapolated only over the last 2% of the grid, because runs of
        one length stop a few steps apart (`quality.SHORT`; shorter runs are reported there).
      seconds: `[N, P]`, the wall time of each run at each point, interpolated linearly between episodes; NaN
        where it is unknown.
      runs: the keys of the N runs.
    """

    axis: str
    grid: np.ndarray
    values: np.ndarray
    seconds: np.ndarray
    runs: pd.DataFrame


def smooth(
    at: np.ndarray,
    returns: np.ndarray,
    grid: np.ndarray,
    window: int = EPISODES,
    counts: np.ndarray | None = None,
) -> np.ndarray:
    """Return the mean of the last `window` episodes that had ended at each point of a grid.

    Args:
      at: step or wall time of each episode's end, ascending, `[E]`.
      returns: `[E]`.
      grid: ascending, `[P]`.
      window: number of episodes.
      counts: how many episodes each entry averages, `[E]`, if not one.

    Returns:
      `[P]`; NaN before the first episode.
    """
    means = trailing_mean(np.asarray(returns, dtype=float), window, counts)
    ended = np.searchsorted(at, grid, side="right")
    return np.concatenate([[np.nan], means])[ended]


def run_curves(
    tables: Tables,
    axis: str = "step",
    points: int = POINTS,
    window: int = EPISODES,
    grid: np.ndarray | None = None,
) -> Curves:
    """Put all runs of the tables on one grid.

    Args:
      tables: as read by an importer.
      axis: of the grid, `step` or `time`.
      points: number of points; the last is the end of the longest run.
      window: number of episodes that a point averages.
      grid: replaces the evenly spaced grid.
    """
    column = AXES[axis]
    runs = split_runs(tables.curves)
    totals = tables.runs.set_index("run")[["steps", "seconds"]].astype(float)
    known = [totals.loc[key.run] if key.run in totals.index else NO_TOTALS for key, _ in runs]
    total = "steps" if axis == "step" else "seconds"
    ends = [
        np.fmax(run[column].max(), of_run[total])
        for (_, run), of_run in zip(runs, known, strict=True)
    ]
    if grid is None:
        longest = max((e for e in ends if e == e), default=1.0)
        grid = np.linspace(longest / points, longest, points)
    values, seconds = np.full((2, len(runs), len(grid)), np.nan)
    for row, ((_, run), end) in enumerate(zip(runs, ends, strict=True)):
        at, returns, counts = ordered_episodes(run, column)
        curve = smooth(at, returns, grid, window, counts)
        values[row] = np.where(grid * SHORT <= end, curve, np.nan)
        seconds[row] = grid if axis == "time" else _wall_time(run, known[row], grid)
    keys = pd.DataFrame([key for key, _ in runs], columns=KEYS)
    return Curves(axis, grid, values, seconds, keys)


def _wall_time(run: pd.DataFrame, totals: Mapping[str, float], grid: np.ndarray) -> np.ndarray:
    """Return the wall time of a run at each step of a grid; NaN if no wall time is known."""
    steps = np.array([0.0, *run["step"], totals["steps"]], dtype=float)
    seconds = np.array([0.0, *run["wall_time"], totals["seconds"]], dtype=float)
    known = np.flatnonzero(np.isfinite(steps) & np.isfinite(seconds))
    if len(known) < 2:  # none but the start
        return np.full(len(grid), np.nan)
    order = known[np.lexsort((seconds[known], steps[known]))]
    return np.interp(grid, steps[order], seconds[order])


def normalized(curves: Curves, normalization: str = "human") -> Curves:
    """Return the curves with every run's values as normalized scores (see `references`)."""
    values = np.stack(
        [
            normalize(values, env_id, normalization) * np.ones_like(values)
            for values, env_id in zip(curves.values, curves.runs["env_id"], strict=True)
        ]
    ) if len(curves.values) else curves.values  # fmt: skip
    return curves._replace(values=values)


def band(
    scores: Sequence[np.ndarray],
    statistic: Callable = aggregates.iqm,
    repetitions: int = 2000,
    level: float = bootstrap.LEVEL,
    seed: int = 0,
) -> np.ndarray:
    """Return an aggregate along curves, with its stratified bootstrap band.

    All points use the same resampled runs: a replicate is a set of whole curves.

    Args:
      scores: one array `[runs, P]` per environment. Points where a run is NaN have no aggregate,
        because the remaining runs would be a different set.
      statistic: a function of `analysis.aggregates`.
      repetitions: bootstrap replicates.
      level: confidence level.
      seed: seed of the draws.

    Returns:
      `[3, P]`: value, low, high; low and high are NaN where every environment has one run only.
    """
    sizes = [len(column) for column in scores]
    points = scores[0].shape[1]
    whole = np.flatnonzero(np.all([np.isfinite(c).all(axis=0) for c in scores], axis=0))
    result = np.full((3, points), np.nan)
    at = [[column[:, p] for column in scores] for p in range(points)]
    for p in whole:
        result[0, p] = statistic(at[p])
    if max(sizes) < 2 or not len(whole):
        return result

    def along(counts: np.ndarray) -> np.ndarray:
        return np.stack([statistic(at[p], counts) for p in whole])

    drawn = bootstrap.replicates(along, sizes, repetitions, seed)
    result[1:, whole] = bootstrap.percentile_interval(drawn, level)
    return result


def curve_table(
    curves: Curves,
    statistic: Callable = aggregates.mean,
    repetitions: int = 2000,
    level: float = bootstrap.LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Return the learning curve of every system and setting on every environment.

    Args:
      curves: on a grid of steps.
      statistic: over runs.
      repetitions: bootstrap replicates.
      level: confidence level.
      seed: seed of the draws.

    Returns:
      system, setting, env_id, step, seconds (mean over runs), value, low, high (over seeds), runs.
    """
    names = ["system", "setting", "env_id"]
    frames = []
    for key, rows in _groups(curves.runs, names):
        values = band([curves.values[rows]], statistic, repetitions, level, seed)
        frames.append(_frame(names, key, curves, rows, values))
    return _concat(frames, names)


def run_table(curves: Curves) -> pd.DataFrame:
    """Return the curve of every run.

    Args:
      curves: on a grid of steps.

    Returns:
      run, system, setting, env_id, seed, step, seconds, value.
    """
    runs, points = curves.values.shape
    keys = curves.runs.loc[np.repeat(curves.runs.index, points)].reset_index(drop=True)
    return keys.assign(
        step=np.tile(curves.grid, runs),
        seconds=curves.seconds.ravel(),
        value=curves.values.ravel(),
    )


def update_curve_table(
    tables: Tables,
    column: str,
    points: int = POINTS,
) -> pd.DataFrame:
    """Return a column of the updates, such as `value_loss`, against steps.

    Each run's updates are averaged between two points of the grid, so that a curve does not depend
    on the number of updates per step.

    Returns:
      system, setting, env_id, step, seconds (NaN), value, low, high (over seeds), runs.
    """
    names = ["system", "setting", "env_id"]
    runs = [
        (key, run.dropna(subset=[column]))
        for key, run in (split_runs(tables.updates) if column in tables.updates else [])
    ]
    runs = [(key, run) for key, run in runs if len(run)]
    if not runs:
        return _concat([], names)
    longest = max(run["step"].max() for _, run in runs)
    grid = np.linspace(longest / points, longest, points)
    values = np.full((len(runs), points), np.nan)
    for row, (_, run) in enumerate(runs):
        at = np.searchsorted(grid, run["step"].to_numpy(float) * (1 - 1e-12))
        sums = np.bincount(at, run[column].to_numpy(float), points)
        counts = np.bincount(at, minlength=points)
        with np.errstate(invalid="ignore"):
            values[row] = sums / counts
    keys = pd.DataFrame([key for key, _ in runs], columns=KEYS)
    curves = Curves("step", grid, values, np.full_like(values, np.nan), keys)
    return curve_table(curves)


def aggregate_curve_table(
    curves: Curves,
    metrics: Sequence[str] = ("median", "iqm"),
    repetitions: int = 2000,
    level: float = bootstrap.LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Return sample-efficiency curves, and with their seconds wall-time-efficiency curves.

    Args:
      curves: on a grid of steps, of normalized scores; environments without a reference are left out, and
        `quality` names them.
      metrics: names of `aggregates.AGGREGATES`.
      repetitions: bootstrap replicates.
      level: confidence level.
      seed: seed of the draws.

    Returns:
      system, setting, metric, step, seconds (mean over runs), value, low, high, runs, environments.
    """
    frames = []
    for key, rows in _groups(curves.runs, ["system", "setting"]):
        envs = curves.runs["env_id"].to_numpy()[rows]
        members = [rows[envs == env] for env in sorted(set(envs))]
        members = [each for each in members if np.isfinite(curves.values[each]).any()]
        if not members:
            continue
        strata = [curves.values[each] for each in members]
        for metric in metrics:
            values = band(strata, aggregates.AGGREGATES[metric], repetitions, level, seed)
            frame = _frame(("system", "setting"), key, curves, np.concatenate(members), values)
            frame.insert(2, "metric", metric)
            frame["environments"] = len(strata)
            frames.append(frame)
    return _concat(frames, ["system", "setting", "metric"])


def _groups(runs: pd.DataFrame, by: list[str]) -> list[tuple[tuple, np.ndarray]]:
    return [(key, group.index.to_numpy()) for key, group in runs.groupby(by, sort=True)]


def _frame(
    names: Sequence[str], key: tuple, curves: Curves, rows: np.ndarray, values: np.ndarray
) -> pd.DataFrame:
    labels = {name: [label] * len(curves.grid) for name, label in zip(names, key, strict=True)}
    value, low, high = values
    x = {"step": curves.grid, "seconds": curves.seconds[rows].mean(axis=0)}
    return pd.DataFrame(labels | x | {"value": value, "low": low, "high": high, "runs": len(rows)})


def _concat(frames: list[pd.DataFrame], names: list[str]) -> pd.DataFrame:
    if not frames:
        return pd.DataFrame(columns=[*names, "step", "seconds", "value", "low", "high", "runs"])
    return pd.concat(frames, ignore_index=True)


def area_under_curve(grid: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the mean height of curves over the part of the grid where all are finite.

    Args:
      grid: `[P]`.
      values: `[N, P]`.

    Returns:
      `[N]`: the area under each curve (trapezoids) divided by the width of that part; NaN if it has fewer
      than two points.
    """
    whole = np.flatnonzero(np.isfinite(values).all(axis=0))
    if len(whole) < 2:
        return np.full(len(values), np.nan)
    x, y = grid[whole], values[:, whole]
    return np.sum((y[:, 1:] + y[:, :-1]) / 2 * np.diff(x), axis=1) / (x[-1] - x[0])
