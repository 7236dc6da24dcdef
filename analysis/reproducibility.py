"""Whether a system gives the same result under another hardware setting: a verdict with evidence.

- *identical*: one setting has a partner for each run of the other, with the same fingerprints and episodes.
- *equivalent*: the levels differ by less than a margin in every environment.
- *different*: the levels differ in some environment.
- *undecided*: none of these.

The tests are those of `analysis.comparison`, corrected for the number of comparisons in a table.
docs/statistics.md has the definitions, and simulations of how often a verdict is wrong.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import aggregates, bootstrap, comparison, fingerprints
from analysis.comparison import ALPHA, FEWEST_RUNS, MARGIN, PERMUTATIONS, Comparison, Environment
from analysis.learning_curves import Curves, area_under_curve, normalized, run_curves
from analysis.references import reference
from analysis.scores import EPISODES, Rule, final_scores
from analysis.tables import KEYS, UNKNOWN, Tables

OUTCOMES = ("final", "area")
FLOOR = 0.1  # of the normalized score: the margin does not shrink below a share of this
POINTS = 50  # of a curve


class Measured(NamedTuple):
    """All runs on an environment.

    Attributes:
      curves: of the runs; a single point is a final score.
      normalized: whether the values are normalized scores.
    """

    curves: Curves
    normalized: bool


class Source(NamedTuple):
    """What verdicts on tables rest on, by environment.

    Attributes:
      curves: learning curves.
      scores: final scores, of all runs.
      scores_only: the pairs of system and setting with a run of which only the score is known.
      without_number: (system, setting, environment) -> returns that are no numbers, where there are any.
    """

    curves: dict[str, Measured]
    scores: dict[str, Measured]
    scores_only: set[tuple[str, str]]
    without_number: dict[tuple[str, str, str], int]


class Side(NamedTuple):
    """Runs of one side in one environment.

    Attributes:
      values: their curves, `[runs, P]`, NaN where a run has no episode; a single point is a final score.
      seeds: `[runs]`.
    """

    values: np.ndarray
    seeds: np.ndarray


def verdicts(
    tables: Tables,
    axis: str = "step",
    margin: float = MARGIN,
    alpha: float = ALPHA,
    points: int = POINTS,
    seed: int = 0,
    permutations: int = PERMUTATIONS,
    window: int = EPISODES,
    normalization: str = "human",
) -> list[dict]:
    """Return a verdict for every system and every two of its settings.

    Runs that share a seed are compared with each other. On each environment, curves are compared from
    where all runs have an episode to where the shortest run ends, on a separate grid; final scores alone,
    where a side has a run without a curve.

    Args:
      tables: the runs.
      axis: of the curves, `step` or `time`.
      margin: largest difference that counts as equivalent, as a share of the level.
      alpha: chance that a table without any difference has a verdict *different*.
      points: of a curve.
      seed: of permutations and bootstrap.
      permutations: of the sides among the runs.
      window: number of episodes that a point of a curve and a score average.
      normalization: of scores, see `references.reference`.

    Returns:
      One entry per pair: system, setting_a, setting_b, verdict, p_equivalent, p_different and p_distribution
      (corrected by Holm's method), drivers (environments in which the levels differ), starts, more_seeds,
      runs_a, runs_b, failing_a, failing_b, environments, final and area (pooled IQM, as a description),
      `fingerprints`, `by_environment` (rows of `comparison.Row`) and `note`.
    """
    source = _source(tables, axis, points, window, normalization)
    prints = fingerprints.pairs(tables)
    entries = []
    for (system, a), (other, b) in combinations(_sides(tables), 2):
        if system != other:
            continue
        entries.append(
            {
                "system": system,
                "setting_a": a,
                "setting_b": b,
                **_compared(
                    source, (system, a), (system, b), True, margin, alpha, seed, permutations
                ),
                "fingerprints": _fingerprint_summary(tables, prints, system, a, b),
            }
        )
    return _decide(entries, alpha)


def system_verdicts(
    tables: Tables,
    axis: str = "step",
    margin: float = MARGIN,
    alpha: float = ALPHA,
    points: int = POINTS,
    seed: int = 0,
    permutations: int = PERMUTATIONS,
    window: int = EPISODES,
    normalization: str = "human",
) -> list[dict]:
    """Return a verdict for every two systems under every setting that both have, or that is unknown of one.

    Like `verdicts`, but without fingerprints, because two systems have different parameters, and
    without pairing runs, because a seed means something else to each.

    Returns:
      One entry per pair and setting: system_a, system_b, setting, and the fields of `verdicts` except
      the fingerprints.
    """
    source = _source(tables, axis, points, window, normalization)
    entries = []
    for (a, setting), (b, other) in combinations(_sides(tables), 2):
        if a == b or (setting != other and UNKNOWN not in (setting, other)):
            continue
        entries.append(
            {
                "system_a": a,
                "system_b": b,
                "setting": setting if setting == other else f"{setting} and {other}",
                **_compared(
                    source, (a, setting), (b, other), False, margin, alpha, seed, permutations
                ),
            }
        )
    return _decide(entries, alpha)


def compare_sides(
    grids: Mapping[str, np.ndarray],
    first: Mapping[str, Side],
    second: Mapping[str, Side],
    normalized: Collection[str] = (),
    paired: bool = True,
    margin: float = MARGIN,
    alpha: float = ALPHA,
    seed: int = 0,
    permutations: int = PERMUTATIONS,
) -> tuple[Comparison, float]:
    """Compare two sides by the ends and the mean heights of their curves.

    Args:
      grids: points of each environment's curves, `[P]`.
      first: runs of the first side, by environment.
      second: runs of the second side on the same environments; both are finite at two points or more, or at
        the only one.
      normalized: environments whose values are normalized scores.
      paired: whether runs that share a seed are compared with each other.
      margin: as a share of the level.
      alpha: level of the tests, uncorrected.
      seed: of the permutations.
      permutations: of the sides among the runs.

    Returns:
      The comparison, and where the curves first differ.
    """
    environments, curves = [], []
    for name, grid in grids.items():
        whole = _overlap(first[name], second[name])
        a, b = first[name].values[:, whole], second[name].values[:, whole]
        outcomes = [_outcomes(grid[whole], c) for c in (a, b)]
        pairs = _pairs(first[name].seeds, second[name].seeds) if paired else np.empty((0, 2), int)
        largest = 1.0 if name in normalized else float(max(np.abs(a).max(), np.abs(b).max()))
        floor = FLOOR * largest
        environments.append(Environment(name, *outcomes, pairs, floor))
        curves.append((grid[whole], a, b))
    sides = comparison.permuted_sides(environments, permutations, seed)
    found = comparison.compare(environments, sides, margin, alpha)
    if found.p_different > alpha or any(len(grid) == 1 for grid in grids.values()):
        return found, np.nan
    return found, comparison.first_difference(*zip(*curves, strict=True), sides, alpha)


def _outcomes(grid: np.ndarray, curves: np.ndarray) -> np.ndarray:
    """Return the final score and the area of curves, `[outcomes, runs]`; of scores alone, these."""
    if len(grid) == 1:
        return curves.T
    return np.stack([curves[:, -1], area_under_curve(grid, curves)])


def _side(measured: Mapping[str, Measured], system: str, setting: str) -> dict[str, Side]:
    """Return environment -> the runs of one system and setting."""
    found = {}
    for env, (curves, _) in measured.items():
        runs = curves.runs
        rows = ((runs["system"] == system) & (runs["setting"] == setting)).to_numpy()
        if rows.any():
            found[env] = Side(curves.values[rows], runs["seed"].to_numpy()[rows])
    return found


def _sides(tables: Tables) -> list[tuple[str, str]]:
    """Return the pairs of system and setting that have runs, or scores of runs."""
    return sorted(
        {
            (str(run.system), str(run.setting))
            for frame in (tables.runs, tables.scores[tables.scores["seed"] >= 0])
            for run in frame[["system", "setting"]].drop_duplicates().itertuples()
        }
    )


def _source(tables: Tables, axis: str, points: int, window: int, normalization: str) -> Source:
    """Return curves and scores by environment, normalized where it has a reference.

    The curves of an environment have a grid of their own.
    """
    curves, scores = {}, {}
    for env in sorted(tables.curves["env_id"].astype(str).unique()):
        here = tables.curves[tables.curves["env_id"] == env]
        raw = run_curves(tables._replace(curves=here), axis, points, window)
        known = reference(env, normalization) is not None
        curves[env] = Measured(normalized(raw, normalization) if known else raw, known)
    of_runs = tables.scores[tables.scores["seed"] >= 0]  # others are means over runs
    scores_only = set(zip(of_runs["system"], of_runs["setting"], strict=True))
    if scores_only:
        every = final_scores(tables._replace(scores=of_runs), Rule(window), normalization)
        for env, rows in every.groupby("env_id", sort=True):
            known = bool(rows["normalized"].notna().any())
            values = rows[["normalized" if known else "score"]].to_numpy(float)
            runs = rows[KEYS].reset_index(drop=True)
            scores[str(env)] = Measured(
                Curves(axis, np.zeros(1), values, np.full_like(values, np.nan), runs), known
            )
    bad = tables.curves[~np.isfinite(tables.curves["return"])]
    counts = bad.groupby(["system", "setting", "env_id"], observed=True).size()
    return Source(curves, scores, scores_only, counts.to_dict())


def _overlap(first: Side, second: Side) -> np.ndarray:
    """Return the points at which the curves of all runs are finite, `[P]`."""
    return np.isfinite(first.values).all(axis=0) & np.isfinite(second.values).all(axis=0)


def _pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the positions of runs with the same seed, of seeds that each side has once, `[pairs, 2]`."""
    once = [np.unique(seeds, return_counts=True) for seeds in (first, second)]
    (a, b) = (seeds[counts == 1] for seeds, counts in once)
    shared = np.intersect1d(a, b)
    pairs = [(np.flatnonzero(first == s)[0], np.flatnonzero(second == s)[0]) for s in shared]
    return np.array(pairs, int).reshape(-1, 2)


def _is_copy(first: Side, second: Side) -> bool:
    """Whether both sides have the same seeds, each once, and the same curves."""
    pairs = _pairs(first.seeds, second.seeds)
    if not len(pairs) == len(first.seeds) == len(second.seeds):
        return False
    return np.array_equal(first.values[pairs[:, 0]], second.values[pairs[:, 1]], equal_nan=True)


def _fingerprint_summary(tables: Tables, prints: pd.DataFrame, system: str, a: str, b: str) -> dict:
    """Summarize the pairs of runs of two settings, a pair being an environment and a seed.

    Returns:
      expected: number of pairs of the setting with fewer; pairs: those of which both settings have
      fingerprints; identical: pairs that agree, to the last version and in all episodes; other_episodes:
      pairs with the same fingerprints and other episodes; without_partner: those that one setting alone has;
      versions_compared; first_difference.
    """
    runs = tables.runs[tables.runs["system"] == system]
    sides = [
        set(zip(here["env_id"], here["seed"], strict=True))
        for here in (runs[runs["setting"] == setting] for setting in (a, b))
    ]
    found = fingerprints.between(prints, system, a, b)
    agree = found["identical"].astype(bool)
    whole, same = found["to_the_end"].astype(bool), found["same_episodes"].astype(bool)
    different = found[~agree]
    # A setting may have several runs of a seed.
    of_pairs = (agree & whole & same).groupby([found["env_id"], found["seed"]]).all()
    return {
        "expected": min(map(len, sides)),
        "pairs": len(of_pairs),
        "identical": int(of_pairs.sum()),
        "other_episodes": int((agree & whole & ~same).sum()),
        "without_partner": len(sides[0] ^ sides[1]),
        "versions_compared": int(found["compared"].sum()) if len(found) else 0,
        "first_difference": int(different["first_difference"].min()) if len(different) else None,
    }


def _compared(
    source: Source,
    first_key: tuple[str, str],
    second_key: tuple[str, str],
    paired: bool,
    margin: float,
    alpha: float,
    seed: int,
    permutations: int,
) -> dict:
    """Return the part of an entry of `verdicts` that rests on scores; p-values are not corrected yet."""
    scores_alone = bool({first_key, second_key} & source.scores_only)
    measured = source.scores if scores_alone else source.curves
    first, second = _side(measured, *first_key), _side(measured, *second_key)
    both = sorted(first.keys() & second.keys())
    fewest_points = 1 if scores_alone else 2
    shared = [env for env in both if _overlap(first[env], second[env]).sum() >= fewest_points]
    notes = []
    if left_out := sorted(first.keys() ^ second.keys()):
        notes.append(f"excluded, because only one side has them: {', '.join(left_out)}")
    if missing := sorted(set(both) - set(shared)):
        why = (
            "not all scores are on one scale"
            if scores_alone
            else "the curves overlap in fewer than two points"
        )
        notes.append(f"excluded, because {why}: {', '.join(missing)}")
    if not shared:
        return {
            "environments": 0,
            "by_environment": [],
            "note": "; ".join([*notes, "no curves overlap"]),
        }
    if scores_alone and not {first_key, second_key} <= source.scores_only:
        notes.append("final scores alone: not all runs have a curve")
    grids = {env: measured[env].curves.grid for env in shared}
    known = [env for env in shared if measured[env].normalized]
    options = (paired, margin, alpha, seed, permutations)
    found, starts = compare_sides(grids, first, second, known, *options)
    fewest = min(len(side[env].seeds) for side in (first, second) for env in shared)
    if fewest < FEWEST_RUNS:
        notes.append(f"{fewest} run{'s' * (fewest != 1)} per environment on a side")
    if paired and all(_is_copy(first[env], second[env]) for env in shared):
        found = found._replace(p_equivalent=0.0)
        what = "scores" if scores_alone else "curves"
        notes.append(f"all {what} of one side are those of the other")
    # A run that has diverged may end where its returns are no longer numbers.
    bad = sum(
        source.without_number.get((*key, env), 0)
        for key in (first_key, second_key)
        for env in shared
    )
    if bad and not scores_alone:
        found = found._replace(p_equivalent=1.0)
        what = "returns are no numbers: points" if bad > 1 else "return is no number: points"
        notes.append(f"{bad:,} {what} that average {'them' if bad > 1 else 'it'} are left out")
    if any(found.failing):
        notes.append(f"failing runs: {found.failing[0]} and {found.failing[1]}")
    pooled = known or shared[: len(shared) == 1]
    if len(pooled) < len(shared):
        unknown = ", ".join(env for env in shared if env not in pooled)
        notes.append(f"not in the pooled difference, for want of a reference: {unknown}")
    same_seeds = paired and all(
        np.array_equal(np.sort(first[env].seeds), np.sort(second[env].seeds)) for env in shared
    )
    needed = comparison.runs_needed(found, alpha, margin, same_seeds)
    rows = [row._replace(outcome=OUTCOMES[row.outcome])._asdict() for row in found.rows]
    drivers = [row["env_id"] for row in rows if row["p_different"] <= alpha]
    return {
        "p_equivalent": found.p_equivalent,
        "p_different": found.p_different,
        "p_distribution": found.p_distribution,
        "drivers": list(dict.fromkeys(drivers)),
        "starts": starts,
        "more_seeds": max(needed - fewest, 1.0) if np.isfinite(needed) else np.nan,
        "runs_a": found.runs[0],
        "runs_b": found.runs[1],
        "failing_a": found.failing[0],
        "failing_b": found.failing[1],
        "environments": len(shared),
        **{
            name: _pooled([_outcome(index, grids[e], first[e], second[e]) for e in pooled], seed)
            for index, name in enumerate(OUTCOMES[: 1 if scores_alone else None])
        },
        "by_environment": rows,
        "note": "; ".join(notes),
    }


def _outcome(
    index: int, grid: np.ndarray, first: Side, second: Side
) -> tuple[np.ndarray, np.ndarray]:
    """Return one of the outcomes of both sides' runs."""
    whole = _overlap(first, second)
    return tuple(_outcomes(grid[whole], side.values[:, whole])[index] for side in (first, second))


def _pooled(outcomes: Sequence[tuple[np.ndarray, np.ndarray]], seed: int) -> dict[str, float]:
    """Return the IQM over runs and environments of both sides, and their difference with a 95% interval."""
    if not outcomes:
        return dict.fromkeys(("first", "second", "difference", "low", "high"), np.nan)
    a, b = map(list, zip(*outcomes, strict=True))
    sizes = [len(column) for column in (*a, *b)]
    split = sum(sizes[: len(a)])

    def difference(counts: np.ndarray | None) -> np.ndarray:
        if counts is None:
            return aggregates.iqm(b) - aggregates.iqm(a)
        return aggregates.iqm(b, counts[split:]) - aggregates.iqm(a, counts[:split])

    estimate = bootstrap.interval(difference, sizes, 2000, bootstrap.LEVEL, seed)
    return {
        "first": float(aggregates.iqm(a)),
        "second": float(aggregates.iqm(b)),
        "difference": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
    }


def _decide(entries: list[dict], alpha: float) -> list[dict]:
    """Correct the p-values of the entries for their number, and add the verdicts.

    Entries whose bits decide are not counted: no test decides them.
    """
    judged = [e for e in entries if e["environments"] and not _is_identical(e)]
    for name in ("p_equivalent", "p_different", "p_distribution"):
        for entry, p in zip(judged, comparison.holm([e[name] for e in judged]), strict=True):
            entry[name] = float(p)
    for entry in filter(_is_identical, entries):
        # Caveats about tests do not apply to a comparison of bits.
        alone = entry["fingerprints"]["without_partner"]
        entry["note"] = f"runs without a partner: {alone}" if alone else ""
    decided = []
    for entry in entries:
        verdict = _verdict(entry, alpha)
        if verdict != "undecided":
            entry["more_seeds"] = np.nan
        decided.append({**_names(entry), "verdict": verdict, **entry})
    return decided


def _names(entry: dict) -> dict:
    """Return the fields that name a pair, which come before its verdict."""
    return {k: v for k, v in entry.items() if k.startswith(("system", "setting"))}


def _verdict(entry: dict, alpha: float) -> str:
    if _is_identical(entry):
        return "identical"
    if not entry["environments"]:
        return "undecided"
    if entry["p_equivalent"] <= alpha:
        return "equivalent"
    return "different" if entry["p_different"] <= alpha else "undecided"


def _is_identical(entry: dict) -> bool:
    prints = entry.get("fingerprints", {"pairs": 0})
    return bool(prints["pairs"]) and prints["identical"] == prints["expected"]
