"""How much of the variation in scores comes from the hardware setting."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

PERMUTATIONS = 200


def variation(scores: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Return how much of the variation in scores comes from the hardware setting, per system.

    A one-way random-effects analysis of variance per environment: runs differ by setting and, within
    a setting, by seed; the components follow from the mean squares between and within settings,
    (between - within) / runs per setting and within, a negative one counting as 0. The shares are
    averaged over environments. A share is more than 0 by chance alone: `share_by_chance` is its mean
    when the settings are permuted among the runs of each environment.

    Args:
      scores: as `scores.final_scores` returns them, any number of settings.
      seed: of the permutations.

    Returns:
      system, settings, environments, runs, setting_share, share_by_chance, p (of a share this large by
      chance), seed_share (NaN with one setting only or one run each), the systems with the largest share of
      the setting first.
    """
    rows = []
    for system, group in scores.groupby("system", sort=True, observed=True):
        environments = []
        for _, env in group.groupby("env_id", observed=True):
            sides = [
                s["score"].dropna().to_numpy() for _, s in env.groupby("setting", observed=True)
            ]
            sides = [s for s in sides if len(s)]
            if len(sides) > 1 and max(map(len, sides)) > 1:
                environments.append(sides)
        share, chance, p = _shares(environments, np.random.default_rng(seed))
        settings = group["setting"].nunique()
        rows.append((system, settings, len(environments), len(group), share, chance, p, 1 - share))
    names = ["system", "settings", "environments", "runs", "setting_share", "share_by_chance", "p"]
    frame = pd.DataFrame(rows, columns=[*names, "seed_share"])
    return frame.sort_values("setting_share", ascending=False, ignore_index=True)


def _shares(
    environments: Sequence[Sequence[np.ndarray]], rng: np.random.Generator
) -> tuple[float, float, float]:
    """Return the setting's share, its mean under permutations, and the p-value of the share."""
    if not environments:
        return np.nan, np.nan, np.nan
    share = _mean_share(environments)
    permuted = np.array(
        [_mean_share([_permuted(s, rng) for s in environments]) for _ in range(PERMUTATIONS)]
    )
    p = (1 + np.sum(permuted >= share - 1e-12)) / (1 + PERMUTATIONS)
    return share, float(permuted.mean()), float(p)


def _mean_share(environments: Sequence[Sequence[np.ndarray]]) -> float:
    parts = [variance_components(sides) for sides in environments]
    return float(np.mean([s / (s + w) if s + w > 0 else 0.0 for s, w in parts]))


def _permuted(sides: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    together = rng.permutation(np.concatenate(sides))
    return np.split(together, np.cumsum([len(side) for side in sides])[:-1])


def variance_components(sides: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the variance between and within groups (one-way random effects, unequal sizes).

    Args:
      sides: one array per setting; at least two, at least one with more than one run.

    Returns:
      Variance of the setting (0 if the estimate is negative) and of the seed.
    """
    sizes = np.array([len(s) for s in sides])
    total, groups = sizes.sum(), len(sizes)
    grand = np.concatenate(sides).mean()
    between = sum(n * (s.mean() - grand) ** 2 for n, s in zip(sizes, sides, strict=True))
    within = sum(((s - s.mean()) ** 2).sum() for s in sides) / (total - groups)
    size = (total - (sizes**2).sum() / total) / (groups - 1)
    return max(float((between / (groups - 1) - within) / size), 0.0), float(within)
