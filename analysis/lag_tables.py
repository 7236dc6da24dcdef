"""Policy lag, changes inside rollouts and gradient asynchrony by system, setting and environment."""

import pandas as pd

from analysis.lag import PAPER_CHANGES, gradient_asynchrony, lag_distribution, predictions
from analysis.selection import GROUP, of_runs
from analysis.tables import Tables


def lag_table(tables: Tables, column: str = "lag") -> pd.DataFrame:
    """Return the distribution of the policy lag: system, setting, env_id, value, share, runs.

    Args:
      tables: completed runs.
      column: `lag`, or `changes` for the policy changes inside a rollout.
    """
    each = lag_distribution(tables, column)
    if each.empty:
        return pd.DataFrame(columns=[*GROUP, "value", "share", "runs"])
    runs = each.groupby(GROUP, observed=True)["run"].nunique().rename("runs")
    counts = each.groupby([*GROUP, "value"], observed=True)["rollouts"].sum()
    shares = counts / counts.groupby(level=GROUP, observed=True).transform("sum")
    return shares.rename("share").reset_index().merge(runs.reset_index(), on=GROUP)


def lag_means(lags: pd.DataFrame) -> pd.DataFrame:
    """Return the mean and the largest policy lag: system, setting, env_id, mean, max, runs."""
    rows = [
        (*key, float((one["value"] * one["share"]).sum()), one["value"].max(), one["runs"].iloc[0])
        for key, one in lags.groupby(GROUP, observed=True, sort=True)
    ]
    return pd.DataFrame(rows, columns=[*GROUP, "mean", "max", "runs"])


def asynchrony_table(tables: Tables) -> pd.DataFrame:
    """Return the gradient asynchrony where it is recorded: system, setting, env_id, mean, max."""
    rows = []
    for key, updates in tables.updates.groupby(GROUP, observed=True, sort=True):
        late = gradient_asynchrony(updates)
        if len(late):
            rows.append((*key, late.mean(), late.max()))
    return pd.DataFrame(rows, columns=[*GROUP, "mean", "max"])


def changing(tables: Tables) -> Tables:
    """Return the tables of systems that change the policy inside rollouts."""
    rollouts = tables.rollouts
    systems = set(rollouts["system"][rollouts["changes"] > 0])
    return of_runs(tables, tables.runs["run"][tables.runs["system"].isin(systems)])


def change_predictions(tables: Tables) -> pd.DataFrame:
    """Return measured and predicted policy changes per rollout, means over seeds.

    Returns:
      system, setting, env_id, runs, measured (changes per rollout), low, high (smallest and largest
      run), by_actors, by_time (see `analysis.lag.predictions`), lag (mean), paper_text, paper_logs
      (values of the Cleanba paper for a setting of this name, or None).
    """
    theory = predictions(tables).set_index("run")
    rows = []
    for key, group in tables.rollouts.groupby(GROUP, observed=True, sort=True):
        each = group.groupby("run", observed=True)[["changes", "lag"]].mean()
        predicted = theory.loc[each.index]
        rows.append(
            (
                *key,
                len(each),
                each["changes"].mean(),
                each["changes"].min(),
                each["changes"].max(),
                predicted["changes_by_actors"].mean(),
                predicted["changes_by_time"].mean(),
                each["lag"].mean(),
                *PAPER_CHANGES.get(str(key[1]), (None, None)),
            )
        )
    names = ["runs", "measured", "low", "high", "by_actors", "by_time", "lag"]
    return pd.DataFrame(rows, columns=[*GROUP, *names, "paper_text", "paper_logs"])
