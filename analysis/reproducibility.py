"""Whether a system gives the same result under another hardware setting: a verdict with evidence.

*identical*: all fingerprints agree. *equivalent*: the difference lies within a margin, by two
one-sided tests on the interquartile mean of the scores and on the area under the curve.
*different*: permuting the settings among the runs of each environment rarely gives a difference this
large. *undecided*: none of these; the verdict then estimates how many more seeds would decide.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t as student_t

from analysis import aggregates, bootstrap
from analysis.curves import Curves, area_under_curve, normalized, run_curves
from analysis.references import reference
from analysis.tables import Tables, split_runs

ALPHA = 0.05
POWER = 0.8
MARGIN = 0.1  # of the first setting's value
PERMUTATIONS = 2000


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
    printed = [isinstance(value, str) for value in updates["fingerprint"]]
    present = updates[np.array(printed, dtype=bool) & updates["version"].notna().to_numpy()]
    return {
        key: dict(zip(group["version"].astype(int), group["fingerprint"], strict=True))
        for key, group in split_runs(present)
    }


def fingerprint_table(tables: Tables) -> pd.DataFrame:
    """Compare every two runs of one system, environment and seed.

    Pairs of runs with different values of a hyperparameter are excluded: they are not meant to agree.

    Returns:
      system, env_id, seed, setting_a, setting_b, run_a, run_b, identical, compared, last_same,
      first_difference; a run without fingerprints appears in no row.
    """
    prints = run_fingerprints(tables.updates)
    hyperparameters = {}
    if "hyperparameters" in tables.runs:  # not every source has them
        hyperparameters = dict(zip(tables.runs["run"], tables.runs["hyperparameters"], strict=True))
    groups: dict[tuple, list[tuple]] = {}
    for key in prints:
        run, system, setting, env_id, seed = key
        groups.setdefault((system, env_id, seed), []).append((setting, run, key))
    rows = []
    for group, members in sorted(groups.items()):
        for (set_a, run_a, a), (set_b, run_b, b) in combinations(sorted(members), 2):
            if _contradict(hyperparameters.get(run_a), hyperparameters.get(run_b)):
                continue
            result = compare_fingerprints(prints[a], prints[b])
            rows.append((*group, set_a, set_b, run_a, run_b, *result))
    names = ["system", "env_id", "seed", "setting_a", "setting_b", "run_a", "run_b"]
    return pd.DataFrame(rows, columns=[*names, *FingerprintComparison._fields], dtype=object)


def _contradict(a: object, b: object) -> bool:
    """Whether two records have different values of a hyperparameter that both name."""
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return False
    return any(a[name] != b[name] for name in a.keys() & b.keys())


class Difference(NamedTuple):
    """One outcome under two settings.

    Attributes:
      first: the outcome under the first setting (IQM over runs and environments).
      difference: the outcome under the second setting, minus that.
      low: lower end of the interval that two one-sided tests at `ALPHA` use (90% by default).
      high: its upper end.
      p: p-value of the permutation test of this outcome alone.
      margin: largest difference that counts as equivalent, in the unit of the outcome.
      more_seeds: estimated number of further runs per environment and setting needed to decide; NaN if one
        setting has a single run per environment.
    """

    first: float
    difference: float
    low: float
    high: float
    p: float
    margin: float
    more_seeds: float


class Verdict(NamedTuple):
    """Comparison of one system under two settings.

    Attributes:
      verdict: identical, equivalent, different or undecided.
      p: p-value of the permutation test on all outcomes (their largest standardised difference).
      outcomes: `final` (score at the end) and `area` (mean height of the curve).
      starts: where along the axis the curves first differ more than chance allows anywhere on
        them; NaN if nowhere.
      runs: number of runs of the first and of the second setting.
      environments: number of environments that both settings have.
    """

    verdict: str
    p: float
    outcomes: dict[str, Difference]
    starts: float
    runs: tuple[int, int]
    environments: int


def compare_curves(
    grid: np.ndarray,
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
    margin: float = MARGIN,
    alpha: float = ALPHA,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> Verdict:
    """Compare the curves of one system under two settings.

    Args:
      grid: `[P]`, steps or seconds; `[environments, P]` where environments have grids of their own.
      first: per environment, curves under the first setting `[runs, P]`. An environment is compared
        where all its runs, under both settings, are finite; at least two points.
      second: the same under the second, environments in the same order.
      margin: as a share of the first setting's value.
      alpha: level of both tests.
      permutations: number of permutations of settings among the runs of each environment (all of them if
        there are no more), and of bootstrap replicates.
      seed: seed of both.
    """
    grids = np.broadcast_to(grid, (len(first), np.shape(grid)[-1]))
    stretches = [_stretch(a, b) for a, b in zip(first, second, strict=True)]
    grids = [x[whole] for x, whole in zip(grids, stretches, strict=True)]
    first, second = (
        [curves[:, whole] for curves, whole in zip(side, stretches, strict=True)]
        for side in (first, second)
    )
    outcomes = {
        "final": tuple([c[:, -1] for c in side] for side in (first, second)),
        "area": tuple(
            [area_under_curve(x, c) for x, c in zip(grids, side, strict=True)]
            for side in (first, second)
        ),
    }
    rng = np.random.default_rng(seed)
    pooled_sizes = [len(a) + len(b) for a, b in zip(first, second, strict=True)]
    sizes = [len(a) for a in first]
    labels = _permute(pooled_sizes, sizes, permutations, rng)
    nulls, observed = [], []
    for a, b in outcomes.values():
        values = _permuted_difference(a, b, labels)
        observed.append(values[0])
        nulls.append(values)
    nulls = np.array(nulls)
    spread = nulls.std(axis=1, keepdims=True)
    standard = np.abs(nulls) / np.where(spread > 0, spread, 1.0)
    # The identity is among the permutations, so p is never 0, and the test is exact.
    together = standard.max(axis=0)
    p = float(np.mean(together >= together[0] - 1e-9))
    details = {}
    for row, (name, (a, b)) in enumerate(outcomes.items()):
        alone = float(np.mean(np.abs(nulls[row]) >= abs(nulls[row][0]) - 1e-12))
        details[name] = _difference(a, b, alone, margin, alpha, permutations, seed)
    equivalent = all(-d.margin < d.low and d.high < d.margin for d in details.values())
    verdict = "equivalent" if equivalent else "different" if p < alpha else "undecided"
    starts = _first_difference(grids, first, second, labels, alpha) if p < alpha else np.nan
    runs = (sum(map(len, first)), sum(map(len, second)))
    return Verdict(verdict, p, details, starts, runs, len(first))


def _stretch(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return where the curves of both sides, `[runs, P]`, are all finite, `[P]`."""
    return np.isfinite(a).all(axis=0) & np.isfinite(b).all(axis=0)


def _permute(
    pooled: Sequence[int], sizes: Sequence[int], permutations: int, rng: np.random.Generator
) -> np.ndarray:
    """Return labels of runs, 1 for the first setting and 0 for the second, `[N, permutations]`.

    The first column has the true labels. If there are no more permutations than asked for, all are used:
    with a sample, p could be smaller than the smallest possible value.
    """
    ways = [math.comb(total, size) for total, size in zip(pooled, sizes, strict=True)]
    if math.prod(ways) <= permutations:
        return _all_ways(pooled, sizes)
    rows = []
    for total, size in zip(pooled, sizes, strict=True):
        ranks = rng.random((total, permutations)).argsort(axis=0).argsort(axis=0)
        label = (ranks < size).astype(np.float64)
        label[:, 0] = np.arange(total) < size
        rows.append(label)
    return np.concatenate(rows)


def _all_ways(pooled: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """Return all labellings of runs, as `_permute`, `[N, ways]`; the first has the true labels."""
    labels = []
    for total, size in zip(pooled, sizes, strict=True):
        chosen = np.array(list(combinations(range(total), size)))
        label = np.zeros((total, len(chosen)))
        label[chosen.T, np.arange(len(chosen))] = 1.0
        labels.append(label)
    which = np.indices([label.shape[1] for label in labels]).reshape(len(labels), -1)
    return np.concatenate([label[:, one] for label, one in zip(labels, which, strict=True)])


def _permuted_difference(
    a: Sequence[np.ndarray], b: Sequence[np.ndarray], labels: np.ndarray
) -> np.ndarray:
    """Return the IQM of the runs labelled 0 minus that of those labelled 1, `[permutations]`."""
    pooled = [np.concatenate(pair) for pair in zip(a, b, strict=True)]
    total = np.repeat([len(c) for c in pooled], [len(c) for c in pooled])[:, None]
    of_a = np.repeat([len(c) for c in a], [len(c) for c in pooled])[:, None]
    first = aggregates.iqm(pooled, labels * total / of_a)
    return aggregates.iqm(pooled, (1 - labels) * total / (total - of_a)) - first


def _difference(
    a: Sequence[np.ndarray],
    b: Sequence[np.ndarray],
    p: float,
    margin: float,
    alpha: float,
    repetitions: int,
    seed: int,
) -> Difference:
    first, second = float(aggregates.iqm(a)), float(aggregates.iqm(b))
    difference, wide = second - first, margin * abs(first)
    freedom = sum(len(c) - 1 for c in (*a, *b))
    if min(map(len, (*a, *b))) < 2:
        return Difference(first, difference, np.nan, np.nan, p, wide, np.nan)
    sizes_a, sizes_b = [len(c) for c in a], [len(c) for c in b]
    drawn = bootstrap.replicates(
        lambda counts: aggregates.iqm(b, counts), sizes_b, repetitions, seed
    ) - bootstrap.replicates(
        lambda counts: aggregates.iqm(a, counts), sizes_a, repetitions, seed + 1
    )
    low, high = np.quantile(drawn, [alpha, 1 - alpha]) - difference
    # A bootstrap of n runs is too narrow by sqrt((n - 1) / n), and ignores that few runs give a poor
    # estimate of the spread. Widen it for both; Student's t gives the second factor.
    runs = len(sizes_a + sizes_b)
    mean_size = (sum(sizes_a) + sum(sizes_b)) / runs
    normal = NormalDist().inv_cdf(1 - alpha)
    stretch = np.sqrt(mean_size / (mean_size - 1)) * student_t.ppf(1 - alpha, freedom) / normal
    error = float(drawn.std() * np.sqrt(mean_size / (mean_size - 1)))
    return Difference(
        first,
        difference,
        float(difference + stretch * low),
        float(difference + stretch * high),
        p,
        wide,
        _more_seeds(difference, error, wide, mean_size, alpha),
    )


def _more_seeds(difference: float, error: float, margin: float, runs: float, alpha: float) -> float:
    """Estimate how many more runs per environment and setting would decide, with power `POWER`.

    The error shrinks with the root of the number of runs. For `equivalent`, (z_alpha + z_power)
    errors must fit between the difference and the margin; for `different`, (z_alpha/2 + z_power)
    errors into the difference. The smaller number is returned, assuming that the estimated
    difference is the true one.
    """
    normal = NormalDist()
    room = margin - abs(difference)
    needed = []
    if room > 0:
        needed.append(
            runs * ((normal.inv_cdf(1 - alpha) + normal.inv_cdf(POWER)) * error / room) ** 2
        )
    if difference:
        z = normal.inv_cdf(1 - alpha / 2) + normal.inv_cdf(POWER)
        needed.append(runs * (z * error / abs(difference)) ** 2)
    return float(np.ceil(max(min(needed) - runs, 1))) if needed else np.nan


def _first_difference(
    grids: Sequence[np.ndarray],
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
    labels: np.ndarray,
    alpha: float,
) -> float:
    """Return where the mean curves first differ by more than chance allows anywhere (max-T).

    The mean differences of all environments are summed; outside its own range of the axis an
    environment does not contribute.
    """
    axis = np.unique(np.concatenate(grids))
    most = 2 * max(map(len, grids))  # the union of many grids would take minutes
    if len(axis) > most:
        axis = axis[np.linspace(0, len(axis) - 1, most).round().astype(int)]
    difference = np.zeros((len(axis), labels.shape[1]))
    row = 0
    for grid, a, b in zip(grids, first, second, strict=True):
        both = np.concatenate([a, b])
        label = labels[row : row + len(both)]
        row += len(both)
        here = (axis >= grid[0]) & (axis <= grid[-1])
        latest = np.searchsorted(grid, axis[here], side="right") - 1
        difference[here] += both[:, latest].T @ ((1 - label) / len(b) - label / len(a))
    spread = difference.std(axis=1, keepdims=True)
    standard = np.abs(difference) / np.where(spread > 0, spread, np.inf)
    limit = np.quantile(standard.max(axis=0), 1 - alpha)
    beyond = np.flatnonzero(standard[:, 0] > limit)
    return float(axis[beyond[0]]) if len(beyond) else np.nan


def setting_curves(
    curves: Mapping[str, Curves], system: str, setting: str
) -> dict[str, np.ndarray]:
    """Return environment -> curves `[runs, P]` of one system and setting, NaN included."""
    found = {}
    for env, (_, _, values, runs) in curves.items():
        rows = ((runs["system"] == system) & (runs["setting"] == setting)).to_numpy()
        if rows.any():
            found[env] = values[rows]
    return found


def verdicts(
    tables: Tables,
    axis: str = "step",
    margin: float = MARGIN,
    alpha: float = ALPHA,
    points: int = 50,
    seed: int = 0,
) -> list[dict]:
    """Return a verdict for every system and every two of its settings.

    Curves are normalised where every environment has a reference. On each environment they are
    compared from where all runs have an episode to where the shortest run ends, on a separate grid.

    Returns:
      One entry per pair: system, setting_a, setting_b, verdict, p, starts, runs_a, runs_b,
      environments, final and area (each with the fields of `Difference`), `fingerprints` (pairs of
      runs: identical, different, first_difference) and `note`.
    """
    curves, known = _comparable_curves(tables, axis, points)
    prints = fingerprint_table(tables)
    entries = []
    for (system, a), (other, b) in combinations(_sides(tables), 2):
        if system != other:
            continue
        entry = {"system": system, "setting_a": a, "setting_b": b}
        entry["fingerprints"] = _fingerprint_summary(prints, system, a, b)
        first, second = (setting_curves(curves, system, setting) for setting in (a, b))
        options = {"margin": margin, "alpha": alpha, "seed": seed, "known": known}
        entries.append(entry | _judge(entry["fingerprints"], curves, first, second, options))
    return entries


def system_verdicts(
    tables: Tables,
    axis: str = "step",
    margin: float = MARGIN,
    alpha: float = ALPHA,
    points: int = 50,
    seed: int = 0,
) -> list[dict]:
    """Return a verdict for every two systems under every setting that both have.

    Like `verdicts`, but without fingerprints, because two systems have different parameters.

    Returns:
      One entry per pair and setting: system_a, system_b, setting, and the fields of `verdicts` except
      the fingerprints.
    """
    curves, known = _comparable_curves(tables, axis, points)
    options = {"margin": margin, "alpha": alpha, "seed": seed, "known": known}
    entries = []
    for (a, setting), (b, other) in combinations(_sides(tables), 2):
        if setting == other:
            entry = {"system_a": a, "system_b": b, "setting": setting}
            first, second = (setting_curves(curves, system, setting) for system in (a, b))
            entries.append(entry | _judge({"pairs": 0}, curves, first, second, options))
    return entries


def _sides(tables: Tables) -> list[tuple[str, str]]:
    """Return the pairs of system and setting that have runs."""
    return sorted({(run.system, run.setting) for run in tables.runs.itertuples()})


def _comparable_curves(tables: Tables, axis: str, points: int) -> tuple[dict[str, Curves], bool]:
    """Return the curves of each environment, on separate grids, and whether they are normalised.

    They are normalised if every environment has a reference.
    """
    environments = sorted(tables.curves["env_id"].astype(str).unique())
    known = all(reference(env) is not None for env in environments)
    found = {}
    for env in environments:
        here = tables.curves[tables.curves["env_id"] == env]
        raw = run_curves(tables._replace(curves=here), axis, points)
        found[env] = normalized(raw) if known else raw
    return found, known


def _fingerprint_summary(prints: pd.DataFrame, system: str, a: str, b: str) -> dict:
    pairs = prints[
        (prints["system"] == system)
        & prints["setting_a"].isin([a, b])
        & prints["setting_b"].isin([a, b])
        & (prints["setting_a"] != prints["setting_b"])
        & prints["identical"].notna()
    ]
    different = pairs[pairs["identical"] == False]  # noqa: E712
    return {
        "pairs": len(pairs),
        "identical": len(pairs) - len(different),
        "versions_compared": int(pairs["compared"].sum()) if len(pairs) else 0,
        "first_difference": int(different["first_difference"].min()) if len(different) else None,
    }


def _judge(
    prints: dict,
    curves: Mapping[str, Curves],
    first: dict[str, np.ndarray],
    second: dict[str, np.ndarray],
    options: dict,
) -> dict:
    """Return the part of an entry of `verdicts` that rests on fingerprints and curves."""
    both = sorted(first.keys() & second.keys())
    shared = [env for env in both if _stretch(first[env], second[env]).sum() > 1]
    notes = []
    left_out = sorted(first.keys() ^ second.keys())
    if left_out:
        notes.append(f"excluded, because only one side has them: {', '.join(left_out)}")
    if not options["known"]:
        notes.append("raw returns: an environment has no reference")
    identical = prints["pairs"] > 0 and prints["identical"] == prints["pairs"]
    entry: dict = {
        "verdict": "identical" if identical else "undecided",
        "environments": len(shared),
    }
    if not shared:
        notes.append("the curves of the runs do not overlap")
        return entry | {"note": "; ".join(notes)}
    if len(shared) < len(both):
        missing = ", ".join(sorted(set(both) - set(shared)))
        notes.append(f"excluded, because the curves overlap in fewer than two points: {missing}")
    result = compare_curves(
        np.stack([curves[env].grid for env in shared]),
        [first[env] for env in shared],
        [second[env] for env in shared],
        options["margin"],
        options["alpha"],
        seed=options["seed"],
    )
    fewest = min(len(side[env]) for side in (first, second) for env in shared)
    if fewest < bootstrap.FEW_RUNS:
        notes.append(f"{fewest} run{'s' * (fewest != 1)} per environment on a side")
    return {
        "verdict": "identical" if identical else result.verdict,
        "p": result.p,
        "starts": result.starts,
        "runs_a": result.runs[0],
        "runs_b": result.runs[1],
        "environments": result.environments,
        **{name: d._asdict() for name, d in result.outcomes.items()},
        "note": "; ".join(notes),
    }


def variation(scores: pd.DataFrame, column: str = "score") -> pd.DataFrame:
    """Return how much of the variation in scores comes from the hardware setting, per system.

    A one-way random-effects analysis of variance per environment: runs differ by setting and, within
    a setting, by seed; the components follow from the mean squares between and within settings,
    (between - within) / runs per setting and within, a negative one counting as 0. The shares are
    averaged over environments.

    Args:
      scores: as `scores.final_scores` returns them, any number of settings.
      column: `score` or `normalized`.

    Returns:
      system, settings, environments, runs, setting_share, seed_share (NaN with one setting only or
      one run each), the systems with the largest share of the setting first.
    """
    rows = []
    for system, group in scores.groupby("system", sort=True, observed=True):
        parts = []
        for _, env in group.groupby("env_id", observed=True):
            sides = [
                s[column].dropna().to_numpy() for _, s in env.groupby("setting", observed=True)
            ]
            sides = [s for s in sides if len(s)]
            if len(sides) > 1 and max(map(len, sides)) > 1:
                parts.append(variance_components(sides))
        shares = [s / (s + w) if s + w > 0 else 0.0 for s, w in parts]
        share = float(np.mean(shares)) if shares else np.nan
        settings = group["setting"].nunique()
        rows.append((system, settings, len(parts), len(group), share, 1 - share))
    names = ["system", "settings", "environments", "runs", "setting_share", "seed_share"]
    frame = pd.DataFrame(rows, columns=names)
    return frame.sort_values("setting_share", ascending=False, ignore_index=True)


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
