"""Aggregates and intervals agree with rliable and with closed forms."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from rliable import library, metrics

from analysis import aggregates, bootstrap, summary

ORACLE = {
    "mean": metrics.aggregate_mean,
    "median": metrics.aggregate_median,
    "iqm": metrics.aggregate_iqm,
    "optimality_gap": metrics.aggregate_optimality_gap,
}


def columns(matrix):
    return list(matrix.T)


@pytest.mark.parametrize("shape", [(3, 57), (5, 26), (2, 1), (10, 4), (1, 7), (3, 100)])
@pytest.mark.parametrize("name", ORACLE)
def test_equal_to_rliable(name, shape):
    scores = np.random.default_rng(1).gamma(2, 1, shape)
    ours = aggregates.AGGREGATES[name](columns(scores))
    assert ours == pytest.approx(ORACLE[name](scores), abs=1e-12)


@pytest.mark.parametrize("name", ORACLE)
def test_a_replicate_is_the_aggregate_of_the_runs_drawn(name):
    rng = np.random.default_rng(2)
    scores = rng.normal(size=(4, 6))
    counts = bootstrap.draw_counts([4] * 6, 50, rng)
    ours = aggregates.AGGREGATES[name](columns(scores), counts)
    for r in range(50):
        drawn = [np.repeat(scores[:, e], counts[4 * e : 4 * e + 4, r]) for e in range(6)]
        assert ours[r] == pytest.approx(ORACLE[name](np.array(drawn).T), abs=1e-12)


def test_unequal_numbers_of_runs_give_every_environment_the_same_weight():
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=3), rng.normal(size=5)
    # Repeating runs until the numbers are equal must not change anything but where IQM is cut:
    # 30 runs cut 7 each side, 8 runs cut 2 of 8; so compare where both cut the same share.
    for name in ("mean", "median", "optimality_gap"):
        repeated = [np.tile(a, 5), np.tile(b, 3)]
        ours = aggregates.AGGREGATES[name]([a, b])
        assert ours == pytest.approx(aggregates.AGGREGATES[name](repeated), abs=1e-12)
    repeated = [np.tile(a, 20), np.tile(b, 12)]
    assert aggregates.iqm([a, b]) == pytest.approx(aggregates.iqm(repeated), abs=1e-12)


def test_profile_equals_rliable():
    scores = np.random.default_rng(4).gamma(2, 1, (5, 20))
    taus = np.linspace(0, 8, 41)
    ours = aggregates.profile(columns(scores), taus)
    np.testing.assert_allclose(ours, library.score_distributions(scores, taus), atol=1e-12)
    # a score at the threshold is not above it
    assert aggregates.profile([np.array([1.0, 2.0])], np.array([1.0, 2.0])).tolist() == [0.5, 0]


def test_profile_of_replicates_and_of_unequal_numbers():
    scores = [np.array([1.0, 2.0, 3.0]), np.array([0.0])]
    assert aggregates.profile(scores, np.array([1.5])) == pytest.approx([(2 / 3 + 0) / 2])
    counts = np.array([[3], [0], [0], [1]], dtype=np.uint8)  # the first run three times
    assert aggregates.profile(scores, np.array([0.5, 1.5]), counts)[:, 0].tolist() == [0.5, 0]


def test_probability_of_improvement_equals_rliable():
    rng = np.random.default_rng(5)
    x = rng.integers(0, 6, (5, 12)).astype(float)  # with ties
    y = rng.integers(0, 5, (3, 12)).astype(float)
    ours = aggregates.probability_of_improvement(columns(x), columns(y))
    assert ours == pytest.approx(metrics.probability_of_improvement(x, y), abs=1e-12)


def test_the_probability_of_improvement_draws_the_runs_of_each_system_by_themselves():
    """Of 4 runs against 9: SciPy's bootstrap of two samples is the oracle."""
    rng = np.random.default_rng(14)
    x, y = rng.normal(0.5, 1, 4), rng.normal(0, 1, 9)
    frame = pd.DataFrame(
        {
            "system": ["x"] * 4 + ["y"] * 9, "setting": "s", "env_id": "e", "seed": [*range(4), *range(9)],
            "normalized": np.concatenate([x, y]),
        }
    )  # fmt: skip
    (entry,) = summary.improvements(frame, repetitions=10_000)
    oracle = scipy.stats.bootstrap(
        (x, y),
        lambda a, b: float((a[:, None] > b).mean()),
        vectorized=False,
        n_resamples=5000,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert (entry["x"], entry["y"]) == ("x, s", "y, s")
    assert entry["value"] == pytest.approx((x[:, None] > y).mean())
    assert entry["low"] == pytest.approx(oracle.low, abs=0.03)
    assert entry["high"] == pytest.approx(oracle.high, abs=0.03)


def test_improvement_of_a_game_is_relative_to_the_reference_or_to_the_higher_other_side():
    """Equation 10 of the paper of dueling networks, on scores in points, is the oracle."""
    random, human = 100.0, 300.0
    points = {("a", "weak"): [200.0, 220.0], ("b", "weak"): [180.0, 140.0],
              ("a", "strong"): [900.0], ("b", "strong"): [500.0, 700.0],
              ("a", "alone"): [200.0]}  # fmt: skip
    rows = [
        (system, "s", env_id, seed, (score - random) / (human - random))
        for (system, env_id), scores in points.items()
        for seed, score in enumerate(scores)
    ]
    frame = pd.DataFrame(rows, columns=["system", "setting", "env_id", "seed", "normalized"])
    found = summary.game_improvements(frame, ("a", "s")).set_index("env_id")
    for env_id in ("weak", "strong"):
        agent, baseline = (np.mean(points[side, env_id]) for side in "ab")
        expected = (agent - baseline) / (max(human, baseline) - random)
        assert found.value[env_id] == pytest.approx(expected)
    assert found.index.tolist() == ["strong", "weak"]
    assert set(zip(found.system, found.setting, strict=True)) == {("b", "s")}
    assert found.runs.tolist() == [1, 2]
    assert found.low["weak"] == pytest.approx((200 - 180) / 200)
    assert found.high["weak"] == pytest.approx((220 - 140) / 200)


def test_nan_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        aggregates.iqm([np.array([1.0, np.nan])])
    with pytest.raises(ValueError, match="at least one run"):
        aggregates.mean([np.array([1.0]), np.array([])])


def test_draws_are_uniform_within_each_environment():
    many = bootstrap.draw_counts([300], 10, np.random.default_rng(6))
    assert (many.sum(axis=0) == 300).all()
    counts = bootstrap.draw_counts([3, 5, 1], 20_000, np.random.default_rng(6))
    assert (counts[:3].sum(axis=0) == 3).all()
    assert (counts[3:8].sum(axis=0) == 5).all()
    assert (counts[8] == 1).all()
    # of 3 draws from 3 runs, each run is drawn Binomial(3, 1/3) times
    for row in counts[:3]:
        seen = np.bincount(row, minlength=4)
        expected = scipy.stats.binom.pmf(range(4), 3, 1 / 3) * 20_000
        assert scipy.stats.chisquare(seen, expected).pvalue > 1e-4
    # and draws of different environments are independent
    assert abs(np.corrcoef(counts[0], counts[3])[0, 1]) < 0.03


def test_intervals_equal_rliable_within_monte_carlo_error():
    scores = np.random.default_rng(7).gamma(2, 1, (3, 20))
    repetitions = 4000

    def all_four(x):
        return np.array([ORACLE[name](x) for name in ORACLE])

    np.random.seed(0)  # rliable ignores its random_state
    _, oracle = library.get_interval_estimates({"a": scores}, all_four, reps=repetitions)
    for i, name in enumerate(ORACLE):
        statistic = aggregates.AGGREGATES[name]
        values = bootstrap.replicates(
            lambda c, s=statistic: s(columns(scores), c), [3] * 20, repetitions, seed=1
        )
        ours = bootstrap.percentile_interval(values)
        # standard error of a sample quantile: sqrt(q (1 - q) / R) / density; 4.5 errors of the
        # difference of two such quantiles
        for side, q in enumerate((0.025, 0.975)):
            near = np.quantile(values, [q - 0.01, q + 0.01])
            density = 0.02 / (near[1] - near[0])
            error = np.sqrt(2 * q * (1 - q) / repetitions) / density
            assert abs(ours[side] - oracle["a"][side, i]) < 4.5 * error, name


def test_the_same_seed_gives_the_same_bits():
    scores = columns(np.random.default_rng(8).normal(size=(3, 57)))
    sizes = [3] * 57

    def once(seed):
        return bootstrap.interval(lambda c: aggregates.iqm(scores, c), sizes, 6000, seed=seed)

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_no_block_of_replicates_repeats_another():
    """12 runs can be drawn in 1.35 million ways: of 3 blocks of replicates few are alike by chance."""
    repetitions = 3 * bootstrap.BLOCK
    labels = np.random.default_rng(11).normal(size=12)  # a sum of them tells the draw
    sums = bootstrap.replicates(lambda counts: labels @ counts, [12], repetitions, seed=1)
    assert sums.shape == (repetitions,)
    assert len(np.unique(sums)) > 0.8 * repetitions


def test_one_run_each_gives_no_interval():
    scores = [np.array([1.0]), np.array([2.0])]
    result = bootstrap.interval(lambda c: aggregates.mean(scores, c), [1, 1])
    assert result.value == 1.5
    assert np.isnan(result.low)
    assert np.isnan(result.high)


def test_bca_equals_scipy():
    sample = np.random.default_rng(9).exponential(size=30)
    oracle = scipy.stats.bootstrap(
        (sample,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(1)
    ).confidence_interval
    ours = bootstrap.interval(
        lambda c: aggregates.mean([sample], c), [30], 20_000, seed=1, method="bca"
    )
    plain = bootstrap.interval(lambda c: aggregates.mean([sample], c), [30], 20_000, seed=1)
    width = ours.high - ours.low
    assert ours.low == pytest.approx(oracle.low, abs=0.03 * width)
    assert ours.high == pytest.approx(oracle.high, abs=0.03 * width)
    # and BCa does something: on skewed data it moves the interval up
    assert ours.high - plain.high > 0.05 * width


def test_replicates_that_tie_with_the_estimate_give_bca_no_bias():
    """With symmetric replicates and influences there is nothing to correct, however many tie."""
    values = np.repeat([-2.0, -1.0, 0.0, 1.0, 2.0], [10, 20, 40, 20, 10])
    influence = np.array([-1.0, 0.0, 1.0])
    for level in (0.5, 0.7, 0.95):
        np.testing.assert_allclose(
            bootstrap.bca_interval(values, 0.0, influence, level),
            bootstrap.percentile_interval(values, level),
        )


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_an_interval_has_the_level_asked_for(method):
    """Of the mean of many normal values: the normal quantiles are the oracle."""
    sample = np.random.default_rng(13).normal(size=200)
    error = sample.std() / np.sqrt(len(sample))
    for level in (0.5, 0.8, 0.95):
        value, low, high = bootstrap.interval(
            lambda counts: aggregates.mean([sample], counts), [200], 5000, level, method=method
        )
        width = 2 * scipy.stats.norm.ppf((1 + level) / 2) * error
        assert high - low == pytest.approx(width, rel=0.07)
        assert low < value < high


def test_jackknife_influence_of_the_mean_is_known():
    sample = np.array([1.0, 2.0, 6.0])
    influence = bootstrap.jackknife_influence(lambda c: aggregates.mean([sample], c), [3])
    np.testing.assert_allclose(influence, (sample - 3) / 3)


@pytest.mark.parametrize("name", ORACLE)
def test_fractional_counts_are_weights(name):
    rng = np.random.default_rng(10)
    scores = columns(rng.normal(size=(4, 6)))
    counts = bootstrap.draw_counts([4] * 6, 50, rng)
    statistic = aggregates.AGGREGATES[name]
    np.testing.assert_allclose(
        statistic(scores, counts.astype(float)), statistic(scores, counts), atol=1e-12
    )
    halves = counts / 2 + 0.5  # whole numbers and halves
    assert np.isfinite(statistic(scores, halves)).all()
    assert (np.abs(statistic(scores, halves) - statistic(scores, counts)) > 1e-9).any()


def test_an_array_of_runs_by_tasks_is_refused_and_not_misread():
    """As rliable takes it; its rows would be taken for environments."""
    scores = np.random.default_rng(0).random((5, 3))
    for function in aggregates.AGGREGATES.values():
        with pytest.raises(ValueError, match="an array of runs per environment"):
            function(scores)
        with pytest.raises(ValueError, match="an array of runs per environment"):
            function([scores, scores])
    with pytest.raises(ValueError, match="an array of runs per environment"):
        aggregates.probability_of_improvement(scores, scores)
    assert aggregates.median(list(scores.T)) == np.median(scores.mean(axis=0))


@pytest.mark.parametrize("sizes", [[3] * 6, [2, 5, 1, 3]])
def test_all_aggregates_are_those_one_by_one(sizes):
    rng = np.random.default_rng(0)
    scores = [rng.lognormal(size=size) for size in sizes]
    counts = bootstrap.draw_counts(sizes, 500, rng)
    together = aggregates.all_aggregates(scores, counts)
    for row, alone in zip(together, aggregates.AGGREGATES.values(), strict=True):
        assert (row == alone(scores, counts)).all()
    for value, alone in zip(
        aggregates.all_aggregates(scores), aggregates.AGGREGATES.values(), strict=True
    ):
        assert value == alone(scores)
    for method in ("percentile", "bca"):
        found = bootstrap.intervals(
            lambda c: aggregates.all_aggregates(scores, c), sizes, 500, method=method
        )
        for one, alone in zip(found, aggregates.AGGREGATES.values(), strict=True):
            assert one == bootstrap.interval(
                lambda c, f=alone: f(scores, c), sizes, 500, method=method
            )
