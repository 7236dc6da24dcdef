"""Speed of runs: by system and setting, by number of devices, by any option, relative to a baseline."""

import itertools
from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis.selection import GROUP
from analysis.tables import Tables


def speed_table(tables: Tables) -> pd.DataFrame:
    """Return the speed of each system, setting and environment, after compilation and with it.

    Returns:
      system, setting, env_id, sps (mean over runs, without the first updates, which compile),
      sps_overall, seconds (means), runs, each (sps of the runs).
    """
    rows = []
    for key, group in tables.runs.groupby(GROUP, observed=True, sort=True):
        each = tuple(group["sps"].dropna())
        means = [group[name].mean() for name in ("sps", "sps_overall", "seconds")]
        rows.append((*key, *means, len(each), each))
    columns = [*GROUP, "sps", "sps_overall", "seconds", "runs", "each"]
    return pd.DataFrame(rows, columns=columns).query("runs > 0").reset_index(drop=True)


def at_once(runs: pd.DataFrame) -> int:
    """Return the largest number of runs that were active at the same time.

    Args:
      runs: rows of `Tables.runs`; rows without start or end time do not count.
    """
    known = [
        (start, end)
        for start, end in zip(runs["started"], runs["ended"], strict=True)
        if isinstance(start, str) and isinstance(end, str)
    ]
    # At equal times, ends sort before starts: such runs did not overlap.
    moments = sorted([(end, -1) for _, end in known] + [(start, 1) for start, _ in known])
    most = max(itertools.accumulate(change for _, change in moments), default=0)
    return max(most, 1) if known else 0


def num_devices(hardware: object) -> float:
    """Return the number of devices of a run over all its processes; NaN if the record lacks it."""
    if not isinstance(hardware, Mapping):
        return np.nan
    ids = [hardware.get(name) for name in ("actor_device_ids", "learner_device_ids")]
    if not all(isinstance(one, list) for one in ids):
        return np.nan
    return len({*ids[0], *ids[1]}) * (hardware.get("num_processes") or 1)


def speed_by(tables: Tables, x: pd.Series) -> pd.DataFrame:
    """Return the mean speed of each system and environment by the value of `x`.

    Args:
      tables: completed runs.
      x: one value per row of `tables.runs`; rows with NaN are left out.

    Returns:
      system, env_id, x, sps (mean over runs, without the first updates, which compile), runs, each (sps
      of the runs).
    """
    runs = tables.runs.assign(x=x).dropna(subset=["x", "sps"])
    names = ["system", "env_id", "x"]
    rows = [
        (*key, group["sps"].mean(), len(group), tuple(group["sps"]))
        for key, group in runs.groupby(names, observed=True)
    ]
    return pd.DataFrame(rows, columns=[*names, "sps", "runs", "each"])


def speed_by_devices(tables: Tables) -> pd.DataFrame:
    """Return `speed_by` the number of devices.

    Returns:
      Its columns, and `ideal`: the speed at the smallest number of devices, scaled linearly.
    """
    frame = speed_by(tables, tables.runs["hardware"].map(num_devices))
    first = frame.groupby(["system", "env_id"], observed=True)[["x", "sps"]].transform("first")
    frame["ideal"] = first["sps"] * frame["x"] / first["x"]
    return frame


def speed_by_option(tables: Tables, name: str) -> pd.DataFrame:
    """Return `speed_by` an option of the runs, with the speedup over the baseline of the system.

    Args:
      tables: completed runs; the baseline of system `x` is `x-sync`.
      name: a hyperparameter or a field of the hardware; runs where it is 0 are left out.

    Returns:
      Its columns, and `speedup`: speed relative to the baseline's; NaN without one.
    """
    values = [
        {**_mapping(row.hardware), **_mapping(row.hyperparameters)}.get(name)
        for row in tables.runs.itertuples()
    ]
    # a system of others may have a list or a word there
    numbers = [value if isinstance(value, int | float) else np.nan for value in values]
    values = pd.Series(numbers, index=tables.runs.index, dtype=float)
    frame = speed_by(tables, values.where(values > 0))
    baseline = _baselines(frame)
    frame["speedup"] = [
        row.sps / baseline.get((str(row.system), row.env_id, row.x), np.nan)
        for row in frame.itertuples()
    ]
    return frame


def speedups(speeds: pd.DataFrame) -> pd.DataFrame:
    """Return the speed of each system relative to its baseline.

    Args:
      speeds: of `speed_by_option`.

    Returns:
      The rows of systems with a baseline; `sps` and `each` are ratios to its mean speed.
    """
    baseline = _baselines(speeds)
    rows = [
        row._replace(sps=row.sps / base, each=tuple(one / base for one in row.each))
        for row in speeds.itertuples(index=False)
        if (base := baseline.get((str(row.system), row.env_id, row.x)))
    ]
    return pd.DataFrame(rows, columns=speeds.columns)


def _baselines(speeds: pd.DataFrame) -> dict[tuple, float]:
    """Return the speed of the baseline of each (system, environment, x)."""
    return {
        (str(row.system).removesuffix("-sync"), row.env_id, row.x): row.sps
        for row in speeds.itertuples()
        if str(row.system).endswith("-sync")
    }


def _mapping(value: object) -> Mapping:
    return value if isinstance(value, Mapping) else {}
