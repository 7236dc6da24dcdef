"""The score of a run, and HTS-RL's three metrics of a run."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.references import normalize
from analysis.tables import KEYS, Tables

EPISODES = 100  # a score is the mean of this many episodes


def trailing_mean(returns: np.ndarray, window: int = EPISODES) -> np.ndarray:
    """Return, at each episode, the mean of it and the up to `window - 1` before it.

    Args:
      returns: in the order in which the episodes ended, `[E]`.
      window: number of episodes.

    Returns:
      `[E]`; NaN where a return in the window is NaN.
    """
    # Differences of cumulative sums lose digits; taken about an integer near the mean they lose
    # none where returns are integers, as in Atari, and few elsewhere.
    finite = returns[np.isfinite(returns)]
    centre = np.rint(finite.mean()) if len(finite) else 0.0
    missing = ~np.isfinite(returns)
    sums = np.concatenate([[0.0], np.cumsum(np.where(missing, 0.0, returns - centre))])
    gaps = np.concatenate([[0], np.cumsum(missing)])
    end = np.arange(1, len(returns) + 1)
    start = np.maximum(end - window, 0)
    means = (sums[end] - sums[start]) / (end - start) + centre
    return np.where(gaps[end] > gaps[start], np.nan, means)


def score_at_end(returns: np.ndarray, window: int = EPISODES) -> float:
    """Return the mean of the last `window` episodes (of all, if there are fewer); NaN if none."""
    return float(np.mean(returns[-window:])) if len(returns) else float("nan")


def score_at(at: np.ndarray, returns: np.ndarray, limit: float, window: int = EPISODES) -> float:
    """Return the score of the episodes that had ended by a step or a time.

    Args:
      at: step or wall time at which each episode ended, in ascending order, `[E]`.
      returns: `[E]`.
      limit: the step or time; episodes at it count.
      window: number of episodes.
    """
    return score_at_end(returns[: np.searchsorted(at, limit, side="right")], window)


def best_score(returns: np.ndarray, window: int = EPISODES) -> float:
    """Return the largest mean of `window` episodes in a row (of all, if there are fewer)."""
    if len(returns) <= window:
        return score_at_end(returns, window)
    means = trailing_mean(returns, window)[window - 1 :]
    return float(np.nanmax(means)) if np.isfinite(means).any() else float("nan")


def time_to_reach(
    times: np.ndarray, returns: np.ndarray, target: float, window: int = EPISODES
) -> float:
    """Return when the running mean of the last `window` episodes first reached a target.

    This is the required time metric of HTS-RL (Liu et al., arXiv 2012.09849, section 5), with
    training episodes where the paper has evaluation episodes.

    Args:
      times: when each episode ended, ascending, `[E]`.
      returns: `[E]`.
      target: the score wanted.
      window: number of episodes; fewer do not count.

    Returns:
      The time, in the unit of `times`; infinity if the target was not reached.
    """
    means = trailing_mean(returns, window)[window - 1 :]
    reached = np.flatnonzero(means >= target)
    return float(times[window - 1 + reached[0]]) if len(reached) else float("inf")


class Rule(NamedTuple):
    """Which episodes make the score of a run: the last by default, or by a step, or by a time."""

    window: int = EPISODES
    step: float | None = None
    time: float | None = None
    best: bool = False


def run_episodes(curves: pd.DataFrame) -> list[tuple[tuple, pd.DataFrame]]:
    """Split a table of curves into runs, keys first; rows keep their order."""
    if curves.empty:
        return []
    return list(curves.groupby(KEYS, observed=True, sort=True))


def _score(run: pd.DataFrame, rule: Rule) -> float:
    axis = "wall_time" if rule.time is not None else "step"
    order = np.argsort(run[axis].to_numpy(), kind="stable")
    at = run[axis].to_numpy()[order]
    returns = run["return"].to_numpy()[order]
    limit = rule.time if rule.time is not None else rule.step
    if limit is not None:
        inside = np.searchsorted(at, limit, side="right")
        returns = returns[:inside]
    return best_score(returns, rule.window) if rule.best else score_at_end(returns, rule.window)


def final_scores(
    tables: Tables, rule: Rule | None = None, normalization: str = "human"
) -> pd.DataFrame:
    """Return one row per run: its keys, `score`, `normalized`, and `episodes` behind the score.

    Args:
      tables: as read by an importer; of published tables, the scores are taken as they are.
      rule: which episodes count.
      normalization: see `references.reference`.

    Returns:
      Keys, score (points), normalized (NaN where the environment has no reference), episodes,
      std (of a published mean over runs, else NaN).
    """
    rule = rule or Rule()
    rows = [
        (*key, _score(run, rule), min(len(run), rule.window))
        for key, run in run_episodes(tables.curves)
    ]
    measured = pd.DataFrame(rows, columns=[*KEYS, "score", "episodes"])
    measured["normalized"] = [
        normalize(s, e, normalization)
        for s, e in zip(measured["score"], measured["env_id"], strict=True)
    ]
    measured["std"] = np.nan
    published = tables.scores.copy()
    for name in ("run", "system", "setting", "env_id"):
        published[name] = published[name].astype(object)
    done = published["normalized"].to_numpy(dtype=bool)
    published["normalized"] = [
        s if n else normalize(s, e, normalization)
        for s, e, n in zip(published["score"], published["env_id"], done, strict=True)
    ]
    published["episodes"] = np.nan
    both = [frame for frame in (measured, published) if len(frame)]
    columns = [*KEYS, "score", "normalized", "episodes", "std"]
    if not both:
        return measured[columns]
    return pd.concat(both, ignore_index=True)[columns]


def by_environment(
    scores: pd.DataFrame, column: str = "normalized"
) -> tuple[list[str], list[np.ndarray]]:
    """Return environments, sorted, and the scores of the runs on each, without NaN.

    Args:
      scores: rows of `final_scores` of one system and setting.
      column: `normalized` or `score`.
    """
    present = scores[scores[column].notna()]
    groups = {str(env): g[column].to_numpy() for env, g in present.groupby("env_id", observed=True)}
    return sorted(groups), [groups[env] for env in sorted(groups)]


def hts_metrics(
    tables: Tables,
    targets: Sequence[float],
    time_limit: float | None = None,
    window: int = EPISODES,
) -> pd.DataFrame:
    """Return HTS-RL's final metric, final time metric and required time metrics of every run.

    Source: Liu et al., arXiv 2012.09849, section 5, "Evaluation protocol" and appendix G.

    Args:
      tables: as read by an importer.
      targets: scores for the required time metric (points).
      time_limit: seconds, for the final time metric; by default, as in the paper, when the fastest
        run on the same environment ended.
      window: number of episodes.

    Returns:
      Keys, `final_metric`, `time_limit`, `final_time_metric`, and `required_time_<target>` (s,
      infinite where the target was not reached).
    """
    runs = run_episodes(tables.curves)
    ends: dict[str, float] = {}
    for key, run in runs:
        env_id, end = key[KEYS.index("env_id")], float(run["wall_time"].max())
        ends[env_id] = min(end, ends.get(env_id, np.inf))
    rows = []
    for key, run in runs:
        ordered = run.sort_values("wall_time", kind="stable")
        times, returns = ordered["wall_time"].to_numpy(), ordered["return"].to_numpy()
        limit = ends[key[KEYS.index("env_id")]] if time_limit is None else time_limit
        rows.append(
            (
                *key,
                score_at_end(returns, window),
                limit,
                score_at(times, returns, limit, window),
                *(time_to_reach(times, returns, target, window) for target in targets),
            )
        )
    names = [f"required_time_{target:g}" for target in targets]
    return pd.DataFrame(
        rows, columns=[*KEYS, "final_metric", "time_limit", "final_time_metric", *names]
    )
