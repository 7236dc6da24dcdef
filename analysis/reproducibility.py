"""Whether a system gives the same result under another hardware setting."""

from itertools import combinations
from typing import NamedTuple

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
    """

    identical: bool | None
    compared: int
    last_same: int | None
    first_difference: int | None


def compare_fingerprints(a: dict[int, str], b: dict[int, str]) -> FingerprintComparison:
    """Compare two runs version by version.

    Args:
      a: version -> fingerprint of the parameters after the update that made it.
      b: the same of the other run.
    """
    both = sorted(a.keys() & b.keys())
    if not both:
        return FingerprintComparison(None, 0, None, None)
    different = [version for version in both if a[version] != b[version]]
    if not different:
        return FingerprintComparison(True, len(both), both[-1], None)
    same = [version for version in both if version < different[0]]
    return FingerprintComparison(False, len(both), same[-1] if same else None, different[0])


def run_fingerprints(updates: pd.DataFrame) -> dict[tuple, dict[int, str]]:
    """Return, per run (its keys), version -> fingerprint, of updates that have one."""
    present = updates[updates["fingerprint"].map(lambda value: isinstance(value, str))]
    return {
        key: dict(zip(group["version"].astype(int), group["fingerprint"], strict=True))
        for key, group in split_runs(present)
    }


def fingerprint_table(tables: Tables) -> pd.DataFrame:
    """Compare every two runs of one system, environment and seed.

    Returns:
      system, env_id, seed, setting_a, setting_b, run_a, run_b, identical, compared, last_same,
      first_difference; a run without fingerprints appears in no row.
    """
    prints = run_fingerprints(tables.updates)
    groups: dict[tuple, list[tuple]] = {}
    for key in prints:
        run, system, setting, env_id, seed = key
        groups.setdefault((system, env_id, seed), []).append((setting, run, key))
    rows = []
    for group, members in sorted(groups.items()):
        for (set_a, run_a, a), (set_b, run_b, b) in combinations(sorted(members), 2):
            result = compare_fingerprints(prints[a], prints[b])
            rows.append((*group, set_a, set_b, run_a, run_b, *result))
    names = ["system", "env_id", "seed", "setting_a", "setting_b", "run_a", "run_b"]
    return pd.DataFrame(rows, columns=[*names, *FingerprintComparison._fields], dtype=object)
