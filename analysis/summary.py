"""Summaries of systems: aggregates with intervals, performance profiles, probability of improvement."""

from collections.abc import Sequence
from functools import partial
from itertools import combinations

import numpy as np
import pandas as pd

from analysis import aggregates, bootstrap
from analysis.output import span
from analysis.scores import EPISODES, by_environment
from analysis.tables import Tables

METRICS = tuple(aggregates.AGGREGATES)
LARGEST_TAU = 8.0  # end of the axis of performance profiles in the papers' figures
NUM_TAUS = 161


def aggregate(
    scores: pd.DataFrame,
    repetitions: int = bootstrap.REPETITIONS,
    level: float = bootstrap.LEVEL,
    seed: int = 0,
    method: str = "percentile",
    window: int = EPISODES,
) -> list[dict]:
    """Return the aggregates of every system and setting.

    Args:
      scores: as `scores.final_scores` returns them.
      repetitions: bootstrap replicates.
      level: confidence level.
      seed: seed of the draws.
      method: `percentile` or `bca`.
      window: episodes that a score is meant to average; a note tells which average fewer.

    Returns:
      One entry per system and setting: system, setting, then `median`, `iqm`, `mean` and
      `optimality_gap`, each with value, low, high, runs and environments; runs (None where means
      over runs were published), environments, and `note`, caveats about the intervals.
    """
    entries = []
    for (system, setting), group in _systems(scores):
        environments, columns = by_environment(group)
        sizes = [len(column) for column in columns]
        published = bool(len(group)) and bool((group["seed"] < 0).all())
        # The number of runs of a published mean is unknown.
        runs = None if published else sum(sizes)
        entry: dict = {"system": system, "setting": setting}
        estimates = [bootstrap.Interval(np.nan, np.nan, np.nan)] * len(METRICS)
        if columns:
            estimates = bootstrap.intervals(
                partial(aggregates.all_aggregates, columns),
                sizes,
                0 if published else repetitions,
                level,
                seed,
                method,
            )
        for name, estimate in zip(METRICS, estimates, strict=True):
            entry[name] = {**estimate._asdict(), "runs": runs, "environments": len(environments)}
        entry["runs"] = runs
        entry["environments"] = len(environments)
        notes = (
            _note(sizes, published),
            _missing(group["score"]),
            few_episodes(group["episodes"], window),
        )
        entry["note"] = "; ".join(filter(None, notes))
        entries.append(entry)
    return entries


def _systems(scores: pd.DataFrame) -> list[tuple[tuple, pd.DataFrame]]:
    return list(scores.groupby(["system", "setting"], sort=True, observed=True))


def _note(sizes: Sequence[int], published: bool) -> str:
    if not sizes:
        return "no score on an environment with a reference: nothing to aggregate"
    if published:
        return "published means over runs: no interval; iqm and optimality_gap are of the means"
    if max(sizes) < 2:
        return "one run per environment: no interval"
    if min(sizes) < bootstrap.FEW_RUNS:
        return (
            f"{span(sizes)} runs per environment: the interval is too narrow (docs/statistics.md)"
        )
    return ""


def _missing(scores: pd.Series) -> str:
    missing = int(scores.isna().sum())
    if not missing:
        return ""
    return f"{missing} of {len(scores)} runs {'has' if missing == 1 else 'have'} no score"


def few_episodes(episodes: pd.Series, window: int = EPISODES) -> str:
    """Return how many scores average fewer episodes than they should, in a clause; '' if none does.

    Args:
      episodes: behind each score; NaN where unknown.
      window: that a score is meant to average.
    """
    few = episodes[episodes < window]
    if few.empty:
        return ""
    number = f"{len(few)} of {len(episodes)} scores"
    return f"{number} are of fewer than {window} episodes (the fewest {few.min():.0f})"


def aggregate_frame(entries: Sequence[dict]) -> pd.DataFrame:
    """Return the entries of `aggregate` as a table, one row per system, setting and metric.

    Returns:
      system, setting, metric, value, low, high, runs, environments, note.
    """
    rows = [
        {"system": e["system"], "setting": e["setting"], "metric": m, **e[m], "note": e["note"]}
        for e in entries
        for m in METRICS
    ]
    columns = [
        "system",
        "setting",
        "metric",
        "value",
        "low",
        "high",
        "runs",
        "environments",
        "note",
    ]
    return pd.DataFrame(rows, columns=columns)


def run_times(tables: Tables) -> list[dict]:
    """Return the mean run time of every system and setting: seconds, runs, ratio to the fastest.

    Only runs that are known to have completed count.
    """
    done = tables.runs[tables.runs["completed"].astype(bool) & tables.runs["seconds"].notna()]
    if done.empty:
        return []
    groups = done.groupby(["system", "setting"], sort=True, observed=True)["seconds"]
    means, counts = groups.mean(), groups.size()
    return [
        {
            "system": system,
            "setting": setting,
            "seconds": float(seconds),
            "runs": int(counts[system, setting]),
            "times_the_fastest": float(seconds / means.min()),
        }
        for (system, setting), seconds in means.items()
    ]


def improvements(
    scores: pd.DataFrame, repetitions: int = 2000, level: float = bootstrap.LEVEL, seed: int = 0
) -> list[dict]:
    """Return, for every two systems, the probability that a run of the first beats one of the second.

    Only environments that both systems have count.

    Returns:
      One entry per pair: x, y ("system, setting"), value, low, high, environments.
    """
    sides = [
        (key, dict(zip(*by_environment(group), strict=True))) for key, group in _systems(scores)
    ]
    entries = []
    for (name_x, x), (name_y, y) in combinations(sides, 2):
        shared = sorted(x.keys() & y.keys())
        if not shared:
            continue
        a, b = [x[env] for env in shared], [y[env] for env in shared]
        sizes = [len(c) for c in a] + [len(c) for c in b]
        split = sum(map(len, a))

        def statistic(
            counts: np.ndarray | None, a: list = a, b: list = b, split: int = split
        ) -> np.ndarray:
            if counts is None:
                return aggregates.probability_of_improvement(a, b)
            return aggregates.probability_of_improvement(a, b, counts[:split], counts[split:])

        estimate = bootstrap.interval(statistic, sizes, repetitions, level, seed)
        entries.append(
            {
                "x": ", ".join(name_x),
                "y": ", ".join(name_y),
                **estimate._asdict(),
                "environments": len(shared),
            }
        )
    return entries


def game_improvements(scores: pd.DataFrame, first: tuple[str, str]) -> pd.DataFrame:
    """Return how much better one side is than each other side, environment by environment.

    The improvement is (a - b) / max(1, b) for mean normalized scores a of the first side and b of the other:
    the difference, relative to the reference score or to the other side, whichever is higher (Wang et al.,
    "Dueling network architectures", https://arxiv.org/abs/1511.06581, equation 10).

    Args:
      scores: as `scores.final_scores` returns them.
      first: system and setting of the first side.

    Returns:
      system, setting (of the other side), env_id, value, low and high (the smallest and the largest value
      that two single runs give; NaN if both sides have one run), runs (of the side with fewer). One row per
      environment that both sides have.
    """
    sides = {key: dict(zip(*by_environment(group), strict=True)) for key, group in _systems(scores)}
    rows = []
    for key in sides:
        for env_id in sorted(sides[first].keys() & sides[key].keys()) if key != first else ():
            a, b = sides[first][env_id], sides[key][env_id]
            each = (a[:, None] - b) / max(1.0, b.mean())
            several = max(len(a), len(b)) > 1
            low, high = (each.min(), each.max()) if several else (np.nan, np.nan)
            rows.append((*key, env_id, each.mean(), low, high, min(len(a), len(b))))
    columns = ["system", "setting", "env_id", "value", "low", "high", "runs"]
    return pd.DataFrame(rows, columns=columns)


def thresholds(scores: pd.DataFrame) -> np.ndarray:
    """Return thresholds of profiles: from 0 to 1, or beyond the highest score, but at most `LARGEST_TAU`."""
    highest = np.nan_to_num(scores["normalized"].max(), nan=0.0)
    return np.linspace(0.0, min(max(1.1 * highest, 1.1), LARGEST_TAU), NUM_TAUS)


def profiles(
    scores: pd.DataFrame,
    taus: np.ndarray,
    repetitions: int = 2000,
    level: float = bootstrap.LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Return the performance profile of every system and setting, with its band.

    Args:
      scores: as `scores.final_scores` returns them.
      taus: thresholds on the normalized score, `[T]`.
      repetitions: bootstrap replicates.
      level: confidence level (at each point).
      seed: seed of the draws.

    Returns:
      system, setting, tau, value (share of runs above tau), low, high, runs, environments.
    """
    frames = []
    for (system, setting), group in _systems(scores):
        _, columns = by_environment(group)
        if not columns:
            continue
        sizes = [len(column) for column in columns]
        band = np.full((2, len(taus)), np.nan)
        if max(sizes) > 1:
            drawn = bootstrap.replicates(
                lambda counts, c=columns: aggregates.profile(c, taus, counts),
                sizes,
                repetitions,
                seed,
            )
            band = bootstrap.percentile_interval(drawn, level)
        value = aggregates.profile(columns, taus)
        frames.append(
            pd.DataFrame(
                {
                    "system": system,
                    "setting": setting,
                    "tau": taus,
                    "value": value,
                    "low": band[0],
                    "high": band[1],
                    "runs": sum(sizes),
                    "environments": len(sizes),
                }
            )
        )
    columns = ["system", "setting", "tau", "value", "low", "high", "runs", "environments"]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)
