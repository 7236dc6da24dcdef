"""Measures of how systems handle invalid actions, as the paper on invalid action masking defines them.

Huang and Ontañón, "A Closer Look at Invalid Action Masking in Policy Gradient Algorithms"
(https://arxiv.org/abs/2006.14171), section "Evaluation Metrics".
"""

import numpy as np
import pandas as pd

from analysis.scores import score_at_end, time_to_reach
from analysis.tables import KEYS, InputError, Tables, split_runs

WINDOW = 10  # episodes, or evaluations
# Mean return of 10 episodes in a row, or of 10 evaluations, at which the harvesting task counts as solved.
# The paper says "exceed", but the best return of an episode that harvests one mine is exactly 40.
SOLVED = 40.0
KINDS = ("null", "busy", "owner")
EVALUATED = ("ppo_microrts_removed",)  # its episodes with one step are an evaluation


def masking_metrics(tables: Tables) -> pd.DataFrame:
    """Return the metrics of every run that counted its invalid actions.

    Args:
      tables: as read from run records.

    Returns:
      Keys; `return`: mean over the last 10 episodes; `null`, `busy`, `owner`: mean number of actions per
      episode that select a source unit which is not there, is busy, or is not the player's, over the last
      10 episodes; `solve` and `first`: shares of the run's steps until the task is solved, and until the
      end of the first episode with a positive return (infinite if that never happened). For `first`,
      episodes count one after another in their recorded order, as in the paper's single environment.

    Raises:
      InputError: if no run counted its invalid actions.
    """
    if "invalid_null" not in tables.curves:
        raise InputError("no run has counted its invalid actions")
    steps = tables.runs.set_index("run")["steps"]
    rows = []
    for key, run in split_runs(tables.curves.dropna(subset="invalid_null")):
        in_order = run.sort_values("step", kind="stable")
        returns = in_order["return"].to_numpy()
        scored = in_order.set_index("step")["return"]
        if key.system in EVALUATED:
            scored = scored.groupby(level="step").mean()
        solved_at = time_to_reach(scored.index.to_numpy(), scored.to_numpy(), SOLVED, WINDOW)
        positive = np.flatnonzero(returns > 0)
        played = in_order["length"].cumsum().to_numpy()
        total = steps[key.run]
        rows.append(
            (
                *key,
                score_at_end(returns, WINDOW),
                *(in_order[f"invalid_{kind}"].tail(WINDOW).mean() for kind in KINDS),
                solved_at / total,
                played[positive[0]] / total if len(positive) else float("inf"),
            )
        )
    return pd.DataFrame(rows, columns=[*KEYS, "return", *KINDS, "solve", "first"])
