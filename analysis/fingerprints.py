"""Whether two runs have the same bits: fingerprints of their parameters, and their episodes."""

import hashlib
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.tables import Tables, split_runs


class FingerprintComparison(NamedTuple):
    """Two runs by their fingerprints.

    Attributes:
      identical: whether all fingerprints of versions that both runs recorded agree; None if there
        is no such version.
      compared: number of versions that both recorded.
      last_same: the last version up to which all agree; None if the first differs already.
      first_difference: the first version at which they differ; None if none does.
      to_the_end: whether the last version is the same in both, and recorded by both.
    """

    identical: bool | None
    compared: int
    last_same: int | None
    first_difference: int | None
    to_the_end: bool


def compare_fingerprints(a: dict[int, str], b: dict[int, str]) -> FingerprintComparison:
    """Compare two runs version by version.

    Args:
      a: version -> fingerprint of the parameters after the update that made it.
      b: the same of the other run.
    """
    both = sorted(a.keys() & b.keys())
    if not both:
        return FingerprintComparison(None, 0, None, None, False)
    to_the_end = max(a) == max(b)
    different = [version for version in both if a[version] != b[version]]
    if not different:
        return FingerprintComparison(True, len(both), both[-1], None, to_the_end)
    same = [version for version in both if version < different[0]]
    last_same = same[-1] if same else None
    return FingerprintComparison(False, len(both), last_same, different[0], to_the_end)


def run_fingerprints(updates: pd.DataFrame) -> dict[tuple, dict[int, str]]:
    """Return, per run (its keys), version -> fingerprint, of updates that have one."""
    printed = [isinstance(value, str) for value in updates["fingerprint"]]
    present = updates[np.array(printed, dtype=bool) & updates["version"].notna().to_numpy()]
    return {
        key: dict(zip(group["version"].astype(int), group["fingerprint"], strict=True))
        for key, group in split_runs(present)
    }


def last_fingerprints(tables: Tables) -> dict[str, str]:
    """Return run -> its last fingerprint, of runs that have one."""
    updates = tables.updates
    present = updates[updates["fingerprint"].map(lambda value: isinstance(value, str))]
    return present.groupby("run", observed=True)["fingerprint"].last().to_dict()


def episode_digests(curves: pd.DataFrame) -> dict[tuple, str]:
    """Return, per run (its keys), a digest of its episodes: steps, returns, lengths, in any order."""
    digests = {}
    for key, run in split_runs(curves):
        rows = run[["step", "return", "length"]].to_numpy(np.float64)
        rows = rows[np.lexsort(rows.T[::-1])] + 0.0  # not -0.0
        digests[key] = hashlib.sha256(rows.tobytes()).hexdigest()
    return digests


def pairs(tables: Tables) -> pd.DataFrame:
    """Compare every two runs of one system, environment and seed.

    Pairs of runs with different values of a hyperparameter are excluded: they are not meant to agree.

    Returns:
      system, env_id, seed, setting_a, setting_b, run_a, run_b, the fields of `FingerprintComparison`, and
      same_episodes; a run without fingerprints appears in no row.
    """
    prints = run_fingerprints(tables.updates)
    episodes = episode_digests(
        tables.curves[tables.curves["run"].isin([key.run for key in prints])]
    )
    hyperparameters = {}
    if "hyperparameters" in tables.runs:  # not every source has them
        hyperparameters = dict(zip(tables.runs["run"], tables.runs["hyperparameters"], strict=True))
    groups: dict[tuple, list[tuple]] = {}
    for key in prints:
        groups.setdefault((key.system, key.env_id, key.seed), []).append(
            (key.setting, key.run, key)
        )
    rows = []
    for group, members in sorted(groups.items()):
        for (set_a, run_a, a), (set_b, run_b, b) in combinations(sorted(members), 2):
            if _contradict(hyperparameters.get(run_a), hyperparameters.get(run_b)):
                continue
            result = compare_fingerprints(prints[a], prints[b])
            same = episodes.get(a) == episodes.get(b)
            rows.append((*group, set_a, set_b, run_a, run_b, *result, same))
    names = ["system", "env_id", "seed", "setting_a", "setting_b", "run_a", "run_b"]
    columns = [*names, *FingerprintComparison._fields, "same_episodes"]
    return pd.DataFrame(rows, columns=columns, dtype=object)


def _contradict(a: object, b: object) -> bool:
    """Whether two records have different values of a hyperparameter that both name."""
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return False
    return any(a[name] != b[name] for name in a.keys() & b.keys())


def between(table: pd.DataFrame, system: str, a: str, b: str) -> pd.DataFrame:
    """Return the rows of `pairs` that compare two settings of a system."""
    return table[
        (table["system"] == system)
        & table["setting_a"].isin([a, b])
        & table["setting_b"].isin([a, b])
        & (table["setting_a"] != table["setting_b"])
        & table["identical"].notna()
    ]
