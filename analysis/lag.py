"""Policy lag: which policy version produced the data that each update learned from."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.queueing import expected_latency
from analysis.selection import GROUP
from analysis.tables import KEYS, Tables, split_runs

QUANTILES = (0.05, 0.5, 0.95)
SKIPPED_UPDATES = 10  # the first ones, whose times are not yet steady
WAITING = 0.1  # share of a rollout's time from which on actors count as waiting for a free buffer

# Mid-rollout changes that the Cleanba paper reports of monobeast (80 actors, batches of 8 rollouts of 240
# steps; a learner delayed by 1 s; 40 actors): by its text (section 3), and as the excerpts from its logs
# average (appendix G: 87, 24 and 17 rollouts; https://arxiv.org/abs/2310.00036).
PAPER_CHANGES = {
    "control": ("12 to 13", 12.7),
    "delayed": ("1", 1.0),
    "half-actors": ("8", 5.2),
}


def lag_summary(tables: Tables) -> pd.DataFrame:
    """Return one row per run.

    Returns:
      Keys, rollouts, and for `changes` (policy changes within a rollout), `lag` (learner version
      when used, minus the mean version over the rollout's steps) and `asynchrony` (learner version
      when a gradient was applied, minus the one it was computed at): mean, 5%, 50% and 95% quantile
      and maximum. NaN where the source does not record it.
    """
    asynchrony = {key: gradient_asynchrony(group) for key, group in split_runs(tables.updates)}
    rows = []
    for key, group in split_runs(tables.rollouts):
        row = dict(zip(KEYS, key, strict=True), rollouts=len(group))
        row |= _spread("changes", group["changes"].to_numpy())
        row |= _spread("lag", group["lag"].to_numpy())
        row |= _spread("asynchrony", asynchrony.get(key, np.empty(0)))
        rows.append(row)
    return pd.DataFrame(rows)


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    values = values[np.isfinite(values)]
    if not len(values):
        return {f"{name}_{what}": np.nan for what in ("mean", "p5", "p50", "p95", "max")}
    low, middle, high = np.quantile(values, QUANTILES)
    return {
        f"{name}_mean": values.mean(),
        f"{name}_p5": low,
        f"{name}_p50": middle,
        f"{name}_p95": high,
        f"{name}_max": values.max(),
    }


def gradient_asynchrony(updates: pd.DataFrame) -> np.ndarray:
    """Return, per update, the version it was applied to minus the one its gradient was computed at.

    An update that makes version v is applied to v - 1. It needs `gradient_version`, a field of
    updates that only asynchronous systems have; without it the result is empty.
    """
    if "gradient_version" not in updates:
        return np.empty(0)
    return (updates["version"] - 1 - updates["gradient_version"]).dropna().to_numpy(dtype=float)


def predictions(tables: Tables) -> pd.DataFrame:
    """Return theoretical predictions for each run, from numbers that were not measured in that run.

    Returns:
      Keys, and
      `changes_by_actors`: actors / rollouts per batch. If actors never wait, each of the A actors
        finishes one rollout while one rollout is collected, which makes A / B batches of B
        rollouts, and as many updates.
      `changes_by_time`: rollout time / time between updates: the number of updates while a rollout
        is collected. If actors wait for free buffers, rollouts begin when an update ends and frees
        some, so only complete updates count: the mean of the quotients, rounded down. The first
        updates, which compile, are excluded.
      `latency_mm1`: rho / (1 - rho) updates (HTS-RL, claim 2), with the utilization rho: the share
        of the time in which the learner trains.
      The last two are means over the other runs of the same system, setting and environment. NaN if
      there is no other run, or a source does not record what is needed.
    """
    measured = pd.DataFrame(
        [
            (key.run, _updates_in_a_rollout(group), _latency(group))
            for key, group in split_runs(tables.updates)
        ],
        columns=["run", "changes_by_time", "latency_mm1"],
    ).set_index("run")
    seeds = {key: list(group) for key, group in tables.runs.groupby(GROUP, observed=True)["run"]}
    rows = []
    for run in tables.runs.itertuples(index=False):
        config = run.hyperparameters if isinstance(run.hyperparameters, Mapping) else {}
        others = [o for o in seeds[tuple(getattr(run, n) for n in GROUP)] if o != run.run]
        rows.append(
            {
                **{name: getattr(run, name) for name in KEYS},
                "changes_by_actors": _number(config, "num_actors") / _number(config, "batch_size"),
                **measured.reindex(others).mean(),
            }
        )
    return pd.DataFrame(rows, columns=[*KEYS, "changes_by_actors", *measured.columns])


def _updates_in_a_rollout(updates: pd.DataFrame) -> float:
    steady = updates.iloc[SKIPPED_UPDATES:]
    if len(steady) < 2 or not {"rollout_time", "wall_time"} <= set(steady):
        return np.nan
    between = np.diff(steady["wall_time"].to_numpy(float)).mean()
    quotients = steady["rollout_time"].to_numpy(float) / between
    waiting = steady["rollout_queue_put_time"].mean() if "rollout_queue_put_time" in steady else 0.0
    if waiting > WAITING * steady["rollout_time"].mean():
        quotients = np.floor(quotients)
    return float(quotients.mean())


def _number(config: Mapping[str, Any], name: str) -> float:
    try:
        return float(config[name])
    except (KeyError, TypeError, ValueError):
        return np.nan


def _median(updates: pd.DataFrame, name: str) -> float:
    return float(updates[name].median()) if name in updates else np.nan


def _median_interval(updates: pd.DataFrame) -> float:
    times = updates["wall_time"].dropna().to_numpy() if "wall_time" in updates else np.empty(0)
    return float(np.median(np.diff(times))) if len(times) > 1 else np.nan


def _latency(updates: pd.DataFrame) -> float:
    utilization = _median(updates, "training_time") / _median_interval(updates)
    return expected_latency(1, utilization, 1.0) if utilization == utilization else np.nan


def lag_distribution(tables: Tables, column: str = "lag") -> pd.DataFrame:
    """Return the frequency of each value: keys, value, rollouts, share (of the run's rollouts)."""
    frames = []
    for key, group in split_runs(tables.rollouts):
        values, count = np.unique(group[column].dropna().to_numpy(), return_counts=True)
        frame = pd.DataFrame({"value": values, "rollouts": count, "share": count / count.sum()})
        frames.append((key, frame))
    return _concat(frames)


def lag_over_time(tables: Tables, bins: int = 50) -> pd.DataFrame:
    """Return the mean lag and changes in equal parts of each run, in the order of completion.

    Returns:
      Keys, bin (0 ...), wall_time (mean, s), rollouts, changes, lag (means).
    """
    frames = []
    for key, group in split_runs(tables.rollouts):
        ordered = group.sort_values("wall_time", kind="stable").reset_index(drop=True)
        part = pd.Series(np.arange(len(ordered)) * min(bins, len(ordered)) // len(ordered))
        means = ordered.groupby(part)[["wall_time", "changes", "lag"]].mean()
        means.insert(1, "rollouts", ordered.groupby(part).size())
        frame = means.rename_axis("bin").reset_index()
        frames.append((key, frame))
    return _concat(frames)


def lag_by_actor(tables: Tables) -> pd.DataFrame:
    """Return keys, actor, rollouts, and the mean changes and lag of each actor."""
    if tables.rollouts.empty:
        return pd.DataFrame(columns=[*KEYS, "actor", "rollouts", "changes", "lag"])
    groups = tables.rollouts.groupby([*KEYS, "actor"], observed=True, sort=True)
    means = groups[["changes", "lag"]].mean()
    means.insert(0, "rollouts", groups.size())
    return means.reset_index()


def version_shares(rollouts: pd.DataFrame) -> pd.DataFrame:
    """Return how much of the data of each learner version came from each policy version.

    This is what the stacked bars of monobeast_study show. A rollout without `learner_version` is
    attributed to the version that it ended with; without `versions` its steps are divided evenly
    among the versions from first to last.

    Args:
      rollouts: the rollouts of one run.

    Returns:
      learner_version, version, steps, share (of the steps of that learner version), sorted.
    """
    rows = []
    columns = ("learner_version", "versions", "version_first", "version_last", "steps")
    for learner, pairs, first, last, steps in zip(*(rollouts[c] for c in columns), strict=True):
        if not pairs:
            span = range(int(first), int(last) + 1)
            size = steps if steps == steps else 1.0
            pairs = [(version, size / max(len(span), 1)) for version in span]
        rows += [(learner if learner == learner else last, v, s) for v, s in pairs]
    frame = pd.DataFrame(rows, columns=["learner_version", "version", "steps"])
    frame = frame.groupby(["learner_version", "version"], as_index=False, sort=True).sum()
    frame["share"] = frame["steps"] / frame.groupby("learner_version")["steps"].transform("sum")
    return frame


def all_version_shares(tables: Tables) -> pd.DataFrame:
    """Return `version_shares` of every run, with its keys."""
    return _concat([(key, version_shares(group)) for key, group in split_runs(tables.rollouts)])


def _concat(frames: list[tuple[Sequence[str], pd.DataFrame]]) -> pd.DataFrame:
    """Concatenate tables of runs, each after the columns of its run's keys."""
    for key, frame in frames:
        for name, label in reversed(list(zip(KEYS, key, strict=True))):
            frame.insert(0, name, label)
    if not frames:
        return pd.DataFrame(columns=KEYS)
    return pd.concat([frame for _, frame in frames], ignore_index=True)
