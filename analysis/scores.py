"""The score of a run, and HTS-RL's three metrics of a run."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.references import normalize
from analysis.tables import KEYS, Tables, split_runs

EPISODES = 100  # a score is the mean of this many episodes


def _window_starts(counts: np.ndarray, window: int) -> np.ndarray:
    """Return, for each row, the first row of those that lie within the last `window` episodes."""
    ended = np.cumsum(counts)
    before = np.concatenate([[0.0], ended])
    starts = np.searchsorted(before, ended - window, side="left")
    # A row with more episodes than the window counts alone.
    return np.minimum(starts, np.arange(len(counts)))


def trailing_mean(
    returns: np.ndarray, window: int = EPISODES, counts: np.ndarray | None = None
) -> np.ndarray:
    """Return, at each episode, the mean of the last `window` episodes, itself included.

    Args:
      returns: in the order in which the episodes ended, `[E]`.
      window: number of episodes; near the start there are fewer.
      counts: how many episodes each entry averages, `[E]`, if not one.

    Returns:
      `[E]`; NaN where a return in the window is NaN.
    """
    counts = np.ones(len(returns)) if counts is None else counts
    # Differences of cumulative sums lose precision. Subtracting an integer near the mean first avoids
    # this where returns are integers, as in Atari, and reduces it elsewhere.
    finite = returns[np.isfinite(returns)]
    centre = np.rint(finite.mean()) if len(finite) else 0.0
    missing = ~np.isfinite(returns)
    sums = np.concatenate([[0.0], np.cumsum(np.where(missing, 0.0, returns - centre) * counts)])
    weights = np.concatenate([[0.0], np.cumsum(counts)])
    gaps = np.concatenate([[0], np.cumsum(missing)])
    end = np.arange(1, len(returns) + 1)
    start = _window_starts(counts, window)
    means = (sums[end] - sums[start]) / (weights[end] - weights[start]) + centre
    return np.where(gaps[end] > gaps[start], np.nan, means)


def score_at_end(
    returns: np.ndarray, window: int = EPISODES, counts: np.ndarray | None = None
) -> float:
    """Return the mean of the last `window` episodes (of all, if there are fewer); NaN if none."""
    if not len(returns):
        return float("nan")
    if counts is None:
        return float(np.mean(returns[-window:]))
    start = _window_starts(counts, window)[-1]
    return float(np.average(returns[start:], weights=counts[start:]))


def score_at(
    at: np.ndarray,
    returns: np.ndarray,
    limit: float,
    window: int = EPISODES,
    counts: np.ndarray | None = None,
) -> float:
    """Return the score of the episodes that had ended by a step or a time.

    Args:
      at: step or wall time at which each episode ended, in ascending order, `[E]`.
      returns: `[E]`.
      limit: the step or time; episodes at it count.
      window: number of episodes.
      counts: as for `trailing_mean`.
    """
    end = np.searchsorted(at, limit, side="right")
    return score_at_end(returns[:end], window, None if counts is None else counts[:end])


def best_score(
    returns: np.ndarray, window: int = EPISODES, counts: np.ndarray | None = None
) -> float:
    """Return the largest mean of `window` episodes in a row (of all, if there are fewer)."""
    counts = np.ones(len(returns)) if counts is None else counts
    means = trailing_mean(returns, window, counts)[np.cumsum(counts) >= window]
    if not len(means):
        return score_at_end(returns, window, counts)
    return float(np.nanmax(means)) if np.isfinite(means).any() else float("nan")


def time_to_reach(
    times: np.ndarray,
    returns: np.ndarray,
    target: float,
    window: int = EPISODES,
    counts: np.ndarray | None = None,
) -> float:
    """Return when the running mean of the last `window` episodes first reached a target.

    This is the required time metric of HTS-RL (Liu et al., arXiv 2012.09849, section 5), with
    training episodes where the paper has evaluation episodes.

    Args:
      times: when each episode ended, ascending, `[E]`.
      returns: `[E]`.
      target: score to reach.
      window: number of episodes; fewer do not count.
      counts: as for `trailing_mean`.

    Returns:
      The time, in the unit of `times`; infinity if the target was not reached.
    """
    counts = np.ones(len(returns)) if counts is None else counts
    means = trailing_mean(returns, window, counts)
    reached = np.flatnonzero((means >= target) & (np.cumsum(counts) >= window))
    return float(times[reached[0]]) if len(reached) else float("inf")


class Rule(NamedTuple):
    """Which episodes make up the score of a run: the last ones, at the end or at a step or time."""

    window: int = EPISODES
    step: float | None = None
    time: float | None = None
    best: bool = False


class Episodes(NamedTuple):
    """The episodes of one run in order: where each ended, its return, and `counts`."""

    at: np.ndarray
    returns: np.ndarray
    counts: np.ndarray | None


def ordered_episodes(run: pd.DataFrame, axis: str = "step") -> Episodes:
    """Return the episodes of one run in the order of `step` or of `wall_time`."""
    at = run[axis].to_numpy()
    order = np.argsort(at, kind="stable")
    counts = None
    if "episodes" in run and run["episodes"].notna().any():
        counts = run["episodes"].fillna(1.0).to_numpy()[order]
    return Episodes(at[order], run["return"].to_numpy()[order], counts)


def _score(run: pd.DataFrame, rule: Rule) -> tuple[float, float]:
    """Return the score of one run, and the number of episodes behind it."""
    at, returns, counts = ordered_episodes(run, "step" if rule.time is None else "wall_time")
    limit = rule.step if rule.time is None else rule.time
    end = len(at) if limit is None else int(np.searchsorted(at, limit, side="right"))
    kept = None if counts is None else counts[:end]
    score = (best_score if rule.best else score_at_end)(returns[:end], rule.window, kept)
    if kept is None or rule.best or not end:
        return score, min(end if kept is None else kept.sum(), rule.window)
    return score, kept[_window_starts(kept, rule.window)[-1] :].sum()


def final_scores(
    tables: Tables, rule: Rule | None = None, normalization: str = "human"
) -> pd.DataFrame:
    """Return one row per run: its keys, `score`, `normalized`, and `episodes` behind the score.

    Args:
      tables: as read by an importer; of published tables, the scores are used unchanged.
      rule: which episodes count.
      normalization: see `references.reference`.

    Returns:
      Keys, score (points), normalized (NaN where the environment has no reference), episodes,
      std (of a published mean over runs, else NaN).
    """
    rule = rule or Rule()
    rows = [(*key, *_score(run, rule)) for key, run in split_runs(tables.curves)]
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


def by_environment(scores: pd.DataFrame) -> tuple[list[str], list[np.ndarray]]:
    """Return environments, sorted, and the normalized scores of the runs on each, without NaN.

    Args:
      scores: rows of `final_scores` of one system and setting.
    """
    present = scores.dropna(subset=["normalized"])
    groups = {
        str(env): g["normalized"].to_numpy() for env, g in present.groupby("env_id", observed=True)
    }
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
      time_limit: seconds, for the final time metric; by default when the first run on the same
        environment ended (in the paper, when the fastest system did).
      window: number of episodes.

    Returns:
      Keys, `final_metric`, `time_limit`, `final_time_metric`, `required_time_<target>` (s) and
      `required_step_<target>` (agent steps; both infinite where the target was not reached).
    """
    runs = split_runs(tables.curves)
    seconds = dict(zip(tables.runs["run"], tables.runs["seconds"].astype(float), strict=True))
    ends: dict[str, float] = {}
    for key, run in runs:
        end = float(np.fmax(run["wall_time"].max(), seconds.get(key.run, np.nan)))
        ends[key.env_id] = min(end, ends.get(key.env_id, np.inf))
    rows = []
    for key, run in runs:
        times, returns, counts = ordered_episodes(run, "wall_time")
        # by steps, which episodes are the last does not depend on the machine
        *steps, step_counts = ordered_episodes(run, "step")
        limit = ends[key.env_id] if time_limit is None else time_limit
        rows.append(
            (
                *key,
                score_at_end(steps[1], window, step_counts),
                limit,
                score_at(times, returns, limit, window, counts),
                *(time_to_reach(times, returns, target, window, counts) for target in targets),
                *(time_to_reach(*steps, target, window, step_counts) for target in targets),
            )
        )
    names = [f"required_{axis}_{target:g}" for axis in ("time", "step") for target in targets]
    return pd.DataFrame(
        rows, columns=[*KEYS, "final_metric", "time_limit", "final_time_metric", *names]
    )
