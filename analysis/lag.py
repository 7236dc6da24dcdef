"""Policy lag: which policy version produced the data that each update learned from."""

import numpy as np
import pandas as pd

from analysis.tables import KEYS, Tables, split_runs

QUANTILES = (0.05, 0.5, 0.95)


def lag_summary(tables: Tables) -> pd.DataFrame:
    """Return one row per run.

    Returns:
      Keys, rollouts, and for `changes` (policy changes within a rollout), `lag` (learner version
      when used, less the mean version over the rollout's steps) and `asynchrony` (learner version
      when a gradient was applied, less the one it was computed at): mean, 5%, 50% and 95% quantile
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
    """Return, per update, the version it was applied to less the one its gradient was computed at.

    Source: the definition of gradient asynchrony in design terms of modular distributed RL; an
    update that makes version v is applied to v - 1. It needs the optional field
    `gradient_version` of updates; without it the result is empty.
    """
    if "gradient_version" not in updates:
        return np.empty(0)
    return (updates["version"] - 1 - updates["gradient_version"]).dropna().to_numpy(dtype=float)


def lag_distribution(tables: Tables, column: str = "lag") -> pd.DataFrame:
    """Return how often each value occurs: keys, value, rollouts, share (of the run's rollouts)."""
    frames = []
    for key, group in split_runs(tables.rollouts):
        values, count = np.unique(group[column].dropna().to_numpy(), return_counts=True)
        frame = pd.DataFrame({"value": values, "rollouts": count, "share": count / count.sum()})
        for name, label in reversed(list(zip(KEYS, key, strict=True))):
            frame.insert(0, name, label)
        frames.append(frame)
    return _concat(frames)


def lag_over_time(tables: Tables, bins: int = 50) -> pd.DataFrame:
    """Return the mean lag and changes in even stretches of each run, in the order of use.

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
        for name, label in reversed(list(zip(KEYS, key, strict=True))):
            frame.insert(0, name, label)
        frames.append(frame)
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
    put under the version that it ended with; without `versions` its steps are shared evenly by
    the versions from first to last.

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


def _concat(frames: list[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=KEYS)
