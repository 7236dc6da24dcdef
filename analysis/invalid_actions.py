"""Measures of how systems handle invalid actions, as the paper on invalid action masking defines them.

Huang and Ontañón, "A Closer Look at Invalid Action Masking in Policy Gradient Algorithms"
(https://arxiv.org/abs/2006.14171), section "Evaluation Metrics".
"""

import numpy as np
import pandas as pd

from analysis.scores import ordered_episodes, score_at_end, time_to_reach
from analysis.tables import KEYS, InputError, Tables, split_runs

WINDOW = 10  # episodes
SOLVED = 40.0  # mean return at which the harvesting task counts as solved
KINDS = ("null", "busy", "owner")


def masking_metrics(tables: Tables, solved: float = SOLVED) -> pd.DataFrame:
    """Return the metrics of every run that counted its invalid actions.

    Args:
      tables: as read from run records.
      solved: return that the mean of the last 10 episodes has to reach. The paper says "exceed", but the
        best return of an episode that harvests one mine is exactly 40.

    Returns:
      Keys; `return`: mean over the last 10 episodes; `null`, `busy`, `owner`: mean number of actions per
      episode that select a source unit which is not there, is busy, or is not the player's, over the last
      10 episodes; `solve` and `first`: shares of the run's steps until the task is solved, and until the
      end of the first episode with a positive return (infinite if that never happened).

    Raises:
      InputError: if no run counted its invalid actions.
    """
    if "invalid_null" not in tables.curves:
        raise InputError("no run has counted its invalid actions")
    steps = tables.runs.set_index("run")["steps"]
    rows = []
    for key, run in split_runs(tables.curves.dropna(subset="invalid_null")):
        at, returns, counts = ordered_episodes(run)
        last = run.iloc[np.argsort(run["step"].to_numpy(), kind="stable")].tail(WINDOW)
        positive = np.flatnonzero(returns > 0)
        rows.append(
            (
                *key,
                score_at_end(returns, WINDOW, counts),
                *(last[f"invalid_{kind}"].mean() for kind in KINDS),
                time_to_reach(at, returns, solved, WINDOW, counts) / steps[key.run],
                at[positive[0]] / steps[key.run] if len(positive) else float("inf"),
            )
        )
    return pd.DataFrame(rows, columns=[*KEYS, "return", *KINDS, "solve", "first"])
