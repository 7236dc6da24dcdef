"""Verdicts on simulated curves with known answers."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis import aggregates, reproducibility
from analysis.importers.records import read_records
from analysis.scores import final_scores
from analysis.tables import RunKey, tables
from experiments.statistics_checks import simulated_curves, verdict_rates


def test_false_different_is_at_most_5_percent():
    rates = verdict_rates(shift=0.0, runs=5, environments=4, simulations=400, permutations=200)
    # 5% and three standard errors of 400 simulations
    assert rates["different"] <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 400)


def test_a_known_shift_is_found():
    # a shift of 30% against seed noise of 15% in 4 games x 5 seeds: 30 / (15 x sqrt(2 / 20)) is
    # more than 6 standard errors
    rates = verdict_rates(shift=0.3, runs=5, environments=4, simulations=60, permutations=200)
    assert rates["different"] >= 0.95


def test_small_shifts_are_equivalent_with_many_runs_and_undecided_with_few():
    many = verdict_rates(shift=0.0, runs=20, environments=10, simulations=30, permutations=200)
    assert many["equivalent"] >= 0.9
    few = verdict_rates(shift=0.05, runs=3, environments=1, simulations=60, permutations=200)
    assert few["undecided"] >= 0.9


def test_p_values_are_uniform_without_a_difference():
    rng = np.random.default_rng(1)
    grid = np.arange(1.0, 21.0)
    values = [
        reproducibility.compare_curves(
            grid,
            simulated_curves(rng, 4, 3, 0.0),
            simulated_curves(rng, 4, 3, 0.0),
            permutations=200,
        ).p
        for _ in range(200)
    ]
    assert np.mean(values) == pytest.approx(0.5, abs=4 * np.sqrt(1 / 12 / 200))


def test_where_there_are_few_permutations_p_is_of_all_of_them():
    rng = np.random.default_rng(3)
    grid = np.arange(1.0, 6.0)
    first, second = rng.normal(0, 1, (4, 5)), rng.normal(1, 1, (4, 5))
    found = reproducibility.compare_curves(grid, [first], [second]).outcomes["final"]
    oracle = stats.permutation_test(
        (first[:, -1], second[:, -1]),
        lambda a, b: aggregates.iqm([b]) - aggregates.iqm([a]),
        permutation_type="independent",
        n_resamples=np.inf,
    )
    assert found.p == pytest.approx(oracle.pvalue)
    # two environments with three runs a side: 20 x 20 ways, and each has its mirror image
    apart = [np.zeros((3, 5)) + rng.normal(0, 0.01, (3, 1)) for _ in range(4)]
    far = reproducibility.compare_curves(grid, apart[:2], [one + 1.0 for one in apart[2:]])
    assert far.p == 2 / 400


@pytest.mark.parametrize(("runs", "alpha"), [(6, 0.05), (100, 0.05), (100, 0.01)])
def test_equivalence_is_judged_by_the_interval_of_two_one_sided_tests(runs, alpha):
    """At level alpha that is the interval of 1 - 2 alpha: SciPy's bootstrap of it is the oracle.

    It is widened by what a bootstrap of few runs lacks: sqrt(n / (n - 1)), and Student's t over the normal.
    """
    rng = np.random.default_rng(12)
    first, second = rng.normal(10, 1, runs), rng.normal(10.2, 2, runs)
    found = reproducibility.compare_curves(
        np.array([1.0, 2.0]),
        [np.stack([first, first], axis=1)],
        [np.stack([second, second], axis=1)],
        alpha=alpha,
        permutations=10_000,
    ).outcomes["final"]
    oracle = stats.bootstrap(
        (first, second),
        iqm_difference,
        n_resamples=10_000,
        confidence_level=1 - 2 * alpha,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    level, freedom = 1 - alpha, 2 * (runs - 1)
    wider = np.sqrt(runs / (runs - 1)) * stats.t.ppf(level, freedom) / stats.norm.ppf(level)
    # an interval of 1 - alpha would be wider by a tenth or more on each side
    below, above = found.difference - oracle.low, oracle.high - found.difference
    assert found.difference - found.low == pytest.approx(wider * below, rel=0.06)
    assert found.high - found.difference == pytest.approx(wider * above, rel=0.06)


def iqm_difference(first, second, axis=-1):
    return stats.trim_mean(second, 0.25, axis) - stats.trim_mean(first, 0.25, axis)


@pytest.mark.parametrize(("shift", "margin"), [(0.05, 0.02), (0.4, 0.02)])
def test_more_seeds_are_those_of_a_power_of_80_percent(shift, margin):
    """That many standard errors, of level and power, fit before the margin, or into the difference."""
    runs = 20
    first = stats.norm.ppf((np.arange(runs) + 0.5) / runs) + 10
    second = first + shift
    found = reproducibility.compare_curves(
        np.array([1.0, 2.0]),
        [np.stack([first, first], axis=1)],
        [np.stack([second, second], axis=1)],
        margin=margin,
        permutations=10_000,
    )
    assert found.verdict == "undecided"
    replicates = stats.bootstrap(
        (first, second), iqm_difference, n_resamples=10_000, method="percentile",
        rng=np.random.default_rng(1),
    )  # fmt: skip
    error = replicates.standard_error * np.sqrt(runs / (runs - 1))
    room = margin * 10 - shift
    if room > 0:
        errors, distance = stats.norm.ppf(0.95) + stats.norm.ppf(0.8), room
    else:
        errors, distance = stats.norm.ppf(0.975) + stats.norm.ppf(0.8), shift
    expected = runs * (errors * error / distance) ** 2 - runs
    assert found.outcomes["final"].more_seeds == pytest.approx(expected, rel=0.08)


def test_where_the_difference_starts():
    rng = np.random.default_rng(2)
    grid = np.arange(1.0, 21.0)

    def curves(shift_after_10):
        both = rng.normal(1, 0.02, (6, 20))
        both[:, 10:] += shift_after_10
        return [both]

    result = reproducibility.compare_curves(grid, curves(0.0), curves(0.5))
    assert result.verdict == "different"
    assert result.starts == 11
    final = result.outcomes["final"]
    assert final.difference == pytest.approx(0.5, abs=0.05)
    assert final.low < 0.5 < final.high
    assert np.isnan(reproducibility.compare_curves(grid, curves(0.0), curves(0.0)).starts)


@pytest.mark.parametrize("start", [0, 12])
def test_every_environment_is_compared_over_its_own_stretch(start):
    """One environment has 20 points of curve, the other 10; they differ from a point of the first on."""
    grid = np.arange(1.0, 21.0)
    long, short = np.tile(grid, (6, 1)), np.tile(grid, (6, 1))
    short[:, 10:] = np.nan
    short[0, 0] = np.nan
    shifted = long + np.where(np.arange(20) >= start, 4.0, 0.0)
    noise = np.random.default_rng(6).normal(0, 0.01, (6, 1))
    result = reproducibility.compare_curves(
        grid, [long + noise, short + noise], [shifted - noise, short - noise]
    )
    final, area = result.outcomes["final"], result.outcomes["area"]
    # the ends are 20 and 10, the mean heights those of 1 to 20 and of 2 to 10; one of two is shifted
    assert final.first == pytest.approx((20 + 10) / 2, abs=0.02)
    assert area.first == pytest.approx((10.5 + 6) / 2, abs=0.02)
    assert final.difference == pytest.approx(4 / 2, abs=0.02)
    assert result.starts == start + 1
    assert result.environments == 2


def test_a_short_environment_has_as_many_points_as_a_long_one(write_run, tmp_path):
    """50,000 steps of one environment, 1,000 of the other, where the systems differ at the very end."""
    rng = np.random.default_rng(8)
    for system, end in (("a", 0.0), ("b", 60.0)):
        for seed in range(6):
            words = {"system": system, "setting": "x", "seed": seed}
            write_run(**words, returns=rng.normal(10, 0.5, 500), total_steps=50_000)
            returns = rng.normal(10, 0.5, 200) + np.where(np.arange(200) >= 180, end, 0)
            write_run(**words, env_id="Pong-v5", returns=returns, total_steps=1_000)
    (entry,) = reproducibility.system_verdicts(read_records([tmp_path]))
    assert entry["environments"] == 2
    assert entry["verdict"] == "different"
    # 20 of the last 100 episodes have 60 points more: 12 of Pong's 14.6 + 20.7; the IQM halves it
    assert entry["final"]["difference"] == pytest.approx(12 / 35.3 / 2, rel=0.1)
    assert 900 <= entry["starts"] <= 1_000


def test_more_seeds_are_about_what_is_needed():
    """The number of further seeds that an undecided verdict names decides most of the time."""
    rng = np.random.default_rng(3)
    grid = np.arange(1.0, 21.0)
    decided, needed = [], []
    for _ in range(40):
        first, second = simulated_curves(rng, 5, 2, 0.0), simulated_curves(rng, 5, 2, 0.25)
        result = reproducibility.compare_curves(grid, first, second, permutations=200)
        if result.verdict != "undecided":
            continue
        more = int(max(d.more_seeds for d in result.outcomes.values()))
        needed.append(more)
        if more > 60:
            continue
        again = reproducibility.compare_curves(
            grid,
            simulated_curves(rng, 5 + more, 2, 0.0),
            simulated_curves(rng, 5 + more, 2, 0.25),
            permutations=200,
        )
        decided.append(again.verdict != "undecided")
    assert len(decided) >= 5
    assert np.mean(decided) >= 0.6
    assert min(needed) >= 1


def test_verdicts_of_records(write_run, tmp_path):
    rng = np.random.default_rng(4)
    for setting, level in (("a0-l0-t1", 10.0), ("a0-l0-t8", 20.0)):
        for seed in range(6):
            write_run(
                system="monobeast",
                setting=setting,
                seed=seed,
                returns=rng.normal(level, 1, 200),
                fingerprint=f"{setting}{seed}-",
            )
            write_run(setting=setting, seed=seed, returns=np.full(200, 5.0 + seed))
    tables = read_records([tmp_path])
    entries = {e["system"]: e for e in reproducibility.verdicts(tables)}
    assert entries["cleanba_ppo"]["verdict"] == "identical"
    assert entries["cleanba_ppo"]["fingerprints"]["pairs"] == 6
    other = entries["monobeast"]
    assert other["verdict"] == "different"
    assert other["fingerprints"]["identical"] == 0
    assert other["fingerprints"]["first_difference"] == 2
    # 10 points of Breakout are 10 / 28.8 of the human level
    assert other["final"]["difference"] == pytest.approx(10 / 28.8, rel=0.05)
    ranked = reproducibility.variation(final_scores(tables))
    assert ranked["system"].tolist() == ["monobeast", "cleanba_ppo"]
    assert ranked["setting_share"].iloc[0] > 0.95
    assert ranked["setting_share"].iloc[1] == 0


@pytest.mark.parametrize(
    ("others", "compared"),
    [({"num_envs": 4}, 1), ({}, 1), ({"num_envs": 8}, 0)],
)
def test_fingerprints_of_runs_with_other_hyperparameters_are_not_compared(
    write_run, tmp_path, others, compared
):
    write_run(setting="a")
    header = write_run(setting="b", fingerprint="other") / "run.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"hyperparameters": others}))
    tables = read_records([tmp_path])
    assert len(reproducibility.fingerprint_table(tables)) == compared
    (entry,) = reproducibility.verdicts(tables)
    assert entry["fingerprints"]["pairs"] == compared
    assert entry["fingerprints"]["identical"] == 0
    without = tables._replace(runs=tables.runs.drop(columns="hyperparameters"))
    assert len(reproducibility.fingerprint_table(without)) == 1


def test_the_first_difference_of_a_pair_of_settings_is_the_earliest_of_all_seeds():
    pieces = []
    for seed, version in ((1, 7), (2, 4), (3, 9)):
        for setting in ("a", "b"):
            prints = [f"{setting * (v >= version)}{v}" for v in range(2, 12)]
            columns = {"version": np.arange(2.0, 12), "fingerprint": prints}
            key = RunKey(f"{setting}{seed}", "s", setting, "Breakout-v5", seed)
            pieces.append((key, columns | {"step": columns["version"], "wall_time": np.zeros(10)}))
    episodes = {"step": [1.0, 2.0], "wall_time": [1.0, 2.0], "return": [1.0, 1.0]}
    data = tables(
        [(key, episodes) for key, _ in pieces],
        updates=pieces,
        runs=[(key, {"status": ["completed"], "completed": [True]}) for key, _ in pieces],
    )
    (entry,) = reproducibility.verdicts(data)
    assert entry["fingerprints"] == {
        "pairs": 3, "identical": 0, "versions_compared": 30, "first_difference": 4,
    }  # fmt: skip


def test_verdicts_between_systems_are_by_setting_and_by_curves_alone(write_run, tmp_path):
    rng = np.random.default_rng(5)
    for system, level in (("a", 10.0), ("b", 10.0), ("c", 20.0)):
        for seed in range(12):
            returns = rng.normal(level, 0.5, 200)
            write_run(system=system, setting="x", seed=seed, returns=returns, fingerprint="same-")
    for seed in range(3):
        write_run(system="c", setting="y", seed=seed, returns=np.full(200, 1.0))
    entries = reproducibility.system_verdicts(read_records([tmp_path]))
    found = {(e["system_a"], e["system_b"], e["setting"]): e["verdict"] for e in entries}
    assert found == {
        ("a", "b", "x"): "equivalent",  # not identical, whatever the fingerprints
        ("a", "c", "x"): "different",
        ("b", "c", "x"): "different",
    }
    only = next(e for e in entries if e["system_b"] == "c")
    assert only["final"]["difference"] == pytest.approx(10 / 28.8, rel=0.05)


def test_a_difference_late_in_the_longer_environment_is_found(write_run, tmp_path):
    rng = np.random.default_rng(7)
    for system, late in (("a", 10.0), ("b", 20.0)):
        for seed in range(6):
            early = rng.normal(10.0, 0.5, 200)
            words = {"system": system, "setting": "x", "seed": seed}
            write_run(**words, env_id="Pong-v5", returns=early, total_steps=1000)
            returns = np.concatenate([early, rng.normal(late, 0.5, 400)])
            write_run(**words, env_id="Breakout-v5", returns=returns, total_steps=3000)
    # one ends before the other has an episode
    write_run("a", "x", "Asterix-v5", returns=np.ones(5), total_steps=100)
    write_run("b", "x", "Asterix-v5", returns=np.ones(1), total_steps=3000)
    (entry,) = reproducibility.system_verdicts(read_records([tmp_path]))
    assert entry["verdict"] == "different"
    assert 1000 < entry["starts"] < 2000
    assert entry["environments"] == 2
    assert "fewer than two points: Asterix-v5" in entry["note"]


def test_variance_components_are_the_known_ones():
    rng = np.random.default_rng(5)
    found = np.mean(
        [
            reproducibility.variance_components(
                [rng.normal(rng.normal(0, 1), 2, 5) for _ in range(40)]
            )
            for _ in range(500)
        ],
        axis=0,
    )
    assert found[0] == pytest.approx(1, rel=0.1)
    assert found[1] == pytest.approx(4, rel=0.05)


def test_variation_needs_two_settings():
    frame = pd.DataFrame(
        {"system": ["a"] * 3, "setting": ["s"] * 3, "env_id": ["e"] * 3, "score": [1.0, 2.0, 3.0]}
    )
    assert np.isnan(reproducibility.variation(frame)["setting_share"].item())
