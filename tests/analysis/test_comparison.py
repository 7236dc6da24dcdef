"""Tests of two sides on arrays: against SciPy, against closed forms, and on simulated data of known truth."""

import math

import numpy as np
import pytest
from scipy import stats

from analysis import comparison
from analysis.comparison import Environment, compare, holm, permuted_sides
from experiments import verdict_rates

SIMULATIONS = 100


def environment(first, second, pairs=(), floor=0.0, name="e"):
    """An environment of one outcome."""
    pairs = np.array(pairs, int).reshape(-1, 2)
    return Environment(name, np.array([first], float), np.array([second], float), pairs, floor)


def row_of(one, **options):
    (row,) = compare([one], permuted_sides([one], 100), **options).rows
    return row


def same_seeds(runs):
    return [(i, i) for i in range(runs)]


def test_the_interval_is_that_of_welch_or_of_a_paired_test():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 0.1, 12), rng.normal(1.02, 0.3, 8)
    row = row_of(environment(a, b))
    oracle = stats.ttest_ind(b, a, equal_var=False).confidence_interval(0.9)
    assert (row.low, row.high) == pytest.approx((oracle.low, oracle.high))
    row = row_of(environment(a[:8], b, same_seeds(8)))
    oracle = stats.ttest_rel(b, a[:8]).confidence_interval(0.9)
    assert (row.low, row.high) == pytest.approx((oracle.low, oracle.high))


@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_a_row_is_equivalent_where_its_interval_is_within_the_margin(alpha):
    rng = np.random.default_rng(1)
    seen = set()
    for _ in range(200):
        one = environment(rng.normal(1, 0.05, 10), rng.normal(1.03, 0.05, 10))
        row = row_of(one, alpha=alpha)
        within = -row.margin < row.low and row.high < row.margin
        assert within == (row.p_equivalent < alpha)
        seen.add(within)
        assert row.margin == pytest.approx(0.1 * (one.first.mean() + one.second.mean()) / 2)
    assert seen == {True, False}


def test_some_shared_seeds_count_in_the_error_of_a_difference():
    """The variance of a difference of means, some of whose terms are correlated: by simulation."""
    rng = np.random.default_rng(2)
    differences, errors = [], []
    for _ in range(2000):
        shared = rng.normal(size=4)
        a = np.concatenate([shared, rng.normal(size=3)])
        b = np.concatenate([-0.9 * shared + 0.436 * rng.normal(size=4), rng.normal(size=2)])
        row = row_of(environment(a, b, same_seeds(4)))
        differences.append(row.difference)
        errors.append(row.error**2)
    assert np.mean(errors) == pytest.approx(np.var(differences), rel=0.1)


def test_where_there_are_few_permutations_p_is_of_all_of_them():
    rng = np.random.default_rng(3)
    a, b = rng.normal(0, 1, 5), rng.normal(2, 1, 5)
    one = environment(a, b)
    (sides,) = permuted_sides([one], 2000)
    assert sides.shape == (10, 252)
    assert len(np.unique(sides, axis=1).T) == 252
    oracle = stats.permutation_test(
        (a, b),
        lambda a, b: abs(stats.ttest_ind(a, b, equal_var=False).statistic),
        permutation_type="independent",
        alternative="greater",
        n_resamples=np.inf,
        vectorized=False,
    )
    permuted = np.abs(comparison._z(one, sides)[0])
    assert np.mean(permuted >= permuted[0] - 1e-9) == pytest.approx(oracle.pvalue)


def test_runs_that_share_a_seed_are_exchanged_with_each_other_alone():
    one = environment(np.arange(5.0), np.arange(6.0), [(0, 3), (2, 1)])
    for count in (100, 10_000):  # a sample, and all of them
        (sides,) = permuted_sides([one], count)
        assert (sides[0] != sides[5 + 3]).all()
        assert (sides[2] != sides[5 + 1]).all()
        assert (sides.sum(axis=0) == 5).all()
        assert sides[:5, 0].all()
        assert not sides[5:, 0].any()
        assert len(np.unique(sides, axis=1).T) == sides.shape[1] or count == 100
    assert sides.shape[1] == 2 * 2 * 35  # of 7 unpaired runs, 3 are first


def test_six_shared_seeds_are_the_fewest_that_show_a_difference_in_one_environment():
    for runs, least in ((5, 2 / 32), (6, 2 / 64)):
        one = environment(np.arange(runs), 100 + np.arange(runs) * 1.1, same_seeds(runs))
        assert compare([one], permuted_sides([one])).p_different == pytest.approx(least)


def test_the_environments_that_differ_have_small_p_values():
    rng = np.random.default_rng(4)
    environments = [
        environment(rng.normal(1, 0.1, 10), rng.normal(1 + 0.6 * (i == 3), 0.1, 10), name=str(i))
        for i in range(6)
    ]
    found = compare(environments, permuted_sides(environments))
    assert [row.env_id for row in found.rows if row.p_different < 0.05] == ["3"]
    assert found.p_different == min(row.p_different for row in found.rows)


def test_a_small_difference_everywhere_is_found_though_none_is_large():
    rng = np.random.default_rng(5)
    environments = [environment(rng.normal(1, 0.1, 6), rng.normal(1.1, 0.1, 6)) for _ in range(15)]
    found = compare(environments, permuted_sides(environments))
    assert found.p_different < 0.01
    assert min(row.p_different for row in found.rows) > 0.05


def test_unequal_spreads_are_a_difference_in_distribution_and_not_in_level():
    rng = np.random.default_rng(6)
    environments = [environment(rng.normal(1, 0.02, 10), rng.normal(1, 0.3, 10)) for _ in range(5)]
    found = compare(environments, permuted_sides(environments))
    assert found.p_distribution < 0.01
    assert found.p_different > 0.05


def test_a_bound_on_failing_runs_takes_29_runs_for_a_margin_of_10_percent():
    for runs, enough in ((28, False), (29, True)):
        one = environment(np.ones(runs), np.ones(runs))
        found = compare([one], permuted_sides([one], 10))
        assert (found.p_equivalent <= 0.05) == enough
        assert found.p_equivalent == pytest.approx(0.9**runs)
    half = environment(np.ones(60), [1.0] * 57 + [0.2] * 3)
    found = compare([half], permuted_sides([half], 10), margin=0.12)
    assert found.failing == (0, 3)
    assert found.p_equivalent == pytest.approx(stats.binom.cdf(3, 60, 0.12))


def test_fewer_than_five_runs_are_never_equivalent():
    environments = [environment(np.ones(4), np.ones(4)) for _ in range(50)]
    assert compare(environments, permuted_sides(environments, 10)).p_equivalent == 1.0


def test_the_margin_has_a_floor():
    assert row_of(environment(np.zeros(5), np.full(5, 0.4), floor=5.0)).margin == pytest.approx(0.5)


def test_one_run_a_side_is_a_description():
    row = row_of(environment([1.0], [2.0]))
    assert (row.difference, row.p_different, row.p_equivalent) == (1.0, 1.0, 1.0)
    assert np.isnan([row.error, row.low, row.high]).all()


def test_holm_is_the_closed_form():
    assert holm([0.01, 0.04, 0.03]).tolist() == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]).tolist() == [1.0, 1.0]
    assert holm([]).tolist() == []


def case(cases, name):
    (found,) = [one for one in cases if one.name.startswith(name)]
    return found


@pytest.mark.parametrize("one", verdict_rates.EQUAL, ids=lambda one: one.name)
def test_equal_levels_are_rarely_different(one):
    """The tables of docs/statistics.md, with few simulations: 6% and three standard errors."""
    for environments, runs in ((1, 10), (5, 5)):
        found = verdict_rates.rates(one, environments, runs, SIMULATIONS, permutations=200)
        assert found.different <= 0.06 + 3 * np.sqrt(0.06 * 0.94 / SIMULATIONS)


@pytest.mark.parametrize("one", verdict_rates.UNEQUAL, ids=lambda one: one.name)
def test_levels_that_differ_by_the_margin_are_rarely_equivalent(one):
    for environments, runs in ((1, 30), (20, 5), (20, 10)):
        if environments == 1 and one.name.startswith(("opposite", "a quarter")):
            continue
        found = verdict_rates.rates(one, environments, runs, SIMULATIONS, permutations=1)
        assert found.equivalent <= 0.06 + 3 * np.sqrt(0.06 * 0.94 / SIMULATIONS)


def test_opposite_effects_and_a_quarter_of_the_games_at_0_are_different_and_their_games_named():
    rng = np.random.default_rng(7)
    for name, drivers in (("opposite", {"0", "1", "2", "3"}), ("a quarter", {"0"})):
        one = case(verdict_rates.UNEQUAL, name)
        environments = [verdict_rates.environment(one, rng, 10, index) for index in range(4)]
        found = compare(environments, permuted_sides(environments))
        assert found.p_different < 0.05
        assert {row.env_id for row in found.rows if row.p_different < 0.05} == drivers


def test_equal_levels_are_equivalent_with_enough_runs():
    normal = verdict_rates.EQUAL[0]
    assert verdict_rates.rates(normal, 5, 50, 60, permutations=1).equivalent >= 0.9
    assert verdict_rates.rates(normal, 1, 30, 60, permutations=1).equivalent >= 0.8


def test_the_runs_needed_are_those_of_a_power_of_80_percent():
    """That many standard errors, of level and power, fit before the margin, or into the difference."""
    runs = 40
    noise = stats.norm.ppf((np.arange(runs) + 0.5) / runs)
    for shift, margin in ((0.1, 0.05), (0.5, 0.01)):
        one = environment(10 + noise, 10 + shift + noise)
        found = compare([one], permuted_sides([one], 200), margin)
        (row,) = found.rows
        if shift < row.margin:
            errors, room = stats.norm.ppf(0.95) + stats.norm.ppf(0.8), row.margin - shift
        else:
            errors, room = stats.norm.ppf(0.975) + stats.norm.ppf(0.8), shift
        expected = np.ceil(runs * (errors * row.error / room) ** 2)
        assert comparison.runs_needed(found, 0.05, margin) == expected


@pytest.mark.parametrize(("paired", "fewest"), [(True, 6), (False, 4)])
def test_the_runs_needed_are_enough_for_permutations_to_show_a_difference(paired, fewest):
    """2 / 2^6 and 2 / C(8, 4) are the first below 5%."""
    for runs in range(3, fewest + 1):
        noise = np.linspace(-1, 1, runs)
        one = environment(10 + noise, 200 + noise[::-1], same_seeds(runs) if paired else ())
        found = compare([one], permuted_sides([one]))
        assert (found.p_different < 0.05) == (runs >= fewest)
        assert comparison.runs_needed(found, 0.05, 0.1, paired) == fewest


def test_no_number_of_runs_is_known_to_be_enough_where_the_spread_is_unknown():
    rng = np.random.default_rng(0)
    measured = environment(10 + rng.normal(size=5), 10 + rng.normal(size=5))
    single = environment(np.array([10.0]), np.array([10.1]))
    for environments in ([single], [measured, single], [single, measured]):
        found = compare(environments, permuted_sides(environments, 20), 0.1)
        assert comparison.runs_needed(found, 0.05, 0.1) == math.inf
