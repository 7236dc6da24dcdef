"""Whether two hardware settings of a system give the same bits, or at least the same learning curves."""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from analysis import fingerprints
from analysis.tables import Tables


class Verdict(NamedTuple):
    """Comparison of two hardware settings of a system.

    Attributes:
      system: name of the system.
      settings: the two hardware settings.
      same: whether the settings are identical; None if there are no fingerprints to compare.
      pairs: number of pairs of environment and seed that the setting with fewer of them has.
      same_pairs: number of these pairs whose runs agree in every fingerprint and every episode.
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


def fingerprint_pairs(tables: Tables) -> pd.DataFrame:
    """Return `analysis.fingerprints.pairs` of runs with different settings."""
    pairs = fingerprints.pairs(tables)
    return pairs[pairs["setting_a"] != pairs["setting_b"]].reset_index(drop=True)


def verdicts(entries: Sequence[dict], pairs: pd.DataFrame) -> list[Verdict]:
    """Return one verdict for every system and every two of its settings.

    Args:
      entries: of `reproducibility.verdicts`.
      pairs: `fingerprint_pairs` of the same runs.
    """
    return [_verdict(entry, pairs) for entry in entries]


def _verdict(entry: dict, pairs: pd.DataFrame) -> Verdict:
    settings = (str(entry["setting_a"]), str(entry["setting_b"]))
    prints = entry["fingerprints"]
    identical = entry["verdict"] == "identical"
    return Verdict(
        str(entry["system"]),
        settings,
        identical if prints["pairs"] else None,
        prints["expected"] if prints["pairs"] else 0,
        prints["identical"],
        prints["versions_compared"],
        "" if identical else _first_difference(pairs, entry["system"], settings),
        entry["verdict"],
        entry["note"],
    )


def _first_difference(pairs: pd.DataFrame, system: str, settings: tuple[str, str]) -> str:
    here = fingerprints.between(pairs, system, *settings)
    here = here[here["identical"] == False].sort_values("first_difference", kind="stable")  # noqa: E712
    if here.empty:
        return ""
    first = here.iloc[0]
    return f"policy version {first['first_difference']} ({first['env_id']}, seed {first['seed']})"
