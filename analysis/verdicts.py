"""Whether two hardware settings of a system give the same bits, or at least the same learning curves."""

from typing import NamedTuple

import pandas as pd

from analysis import reproducibility
from analysis.tables import Tables


class Verdict(NamedTuple):
    """Comparison of two hardware settings of a system.

    Attributes:
      system: name of the system.
      settings: the two hardware settings.
      same: whether all fingerprints agree; None if there are none to compare.
      pairs: number of pairs of runs that differ only in the setting.
      same_pairs: number of these pairs that agree in every fingerprint.
      compared: number of fingerprints compared over all pairs.
      difference: the first difference in words; '' if there is none.
      curves: verdict on the learning curves: identical, equivalent, different or undecided.
      note: caveats of that verdict.
    """

    system: str
    settings: tuple[str, str]
    same: bool | None
    pairs: int
    same_pairs: int
    compared: int
    difference: str
    curves: str
    note: str


def fingerprints(tables: Tables) -> pd.DataFrame:
    """Return `analysis.reproducibility.fingerprint_table` for pairs with different settings."""
    pairs = reproducibility.fingerprint_table(tables)
    return pairs[pairs["setting_a"] != pairs["setting_b"]].reset_index(drop=True)


def last_fingerprints(tables: Tables) -> dict[str, str]:
    """Return run -> its last fingerprint, of runs that have one."""
    updates = tables.updates
    present = updates[updates["fingerprint"].map(lambda value: isinstance(value, str))]
    return present.groupby("run", observed=True)["fingerprint"].last().to_dict()


def verdicts(tables: Tables, pairs: pd.DataFrame) -> list[Verdict]:
    """Return one verdict for every system and every two of its settings.

    Args:
      tables: completed runs.
      pairs: their `fingerprints`.
    """
    return [_verdict(entry, pairs) for entry in reproducibility.verdicts(tables)]


def _verdict(entry: dict, pairs: pd.DataFrame) -> Verdict:
    settings = (str(entry["setting_a"]), str(entry["setting_b"]))
    prints = entry["fingerprints"]
    same = prints["identical"] == prints["pairs"] if prints["pairs"] else None
    return Verdict(
        str(entry["system"]),
        settings,
        same,
        prints["pairs"],
        prints["identical"],
        prints["versions_compared"],
        _first_difference(pairs, entry["system"], settings) if same is False else "",
        entry["verdict"],
        # Caveats about the test of curves do not apply to a comparison of bits.
        "" if entry["verdict"] == "identical" else entry["note"],
    )


def _first_difference(pairs: pd.DataFrame, system: str, settings: tuple[str, str]) -> str:
    here = pairs[(pairs["system"] == system) & (pairs["identical"] == False)]  # noqa: E712
    here = here[here["setting_a"].isin(settings) & here["setting_b"].isin(settings)]
    first = here.sort_values("first_difference", kind="stable").iloc[0]
    return f"policy version {first['first_difference']} ({first['env_id']}, seed {first['seed']})"
