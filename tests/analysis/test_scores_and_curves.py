"""Scores, references and curves against hand-made runs."""

from statistics import NormalDist

import numpy as np
import pytest

from analysis import learning_curves, references, scores
from analysis.importers.records import read_records
from analysis.tables import RunKey, tables


def test_57_games_and_their_values():
    assert len(references.ATARI) == 57
    # spot values of Wang et al. (arXiv 1511.06581)
    assert references.reference("Breakout-v5") == (1.7, 30.5)
    assert references.reference("ALE/Pong-v5") == (-20.7, 14.6)
    assert references.reference("MontezumaRevengeNoFrameskip-v4") == (0.0, 4753.3)
    assert references.reference("Breakout-v5", "record") == (1.7, 864.0)
    assert references.reference("Surround-v5", "record") is None
    assert references.reference("NoSuchGame-v5") is None
    assert references.reference("CartPole-v1")[1] == 475
    assert all(random < human for random, human, _ in references.ATARI.values())


def test_normalized_is_0_at_random_and_1_at_human():
    assert references.normalize(1.7, "Breakout-v5") == 0
    assert references.normalize(30.5, "Breakout-v5") == 1
    assert np.isnan(references.normalize(3, "Nowhere-v0"))


def test_trailing_mean_is_the_plain_one():
    returns = np.random.default_rng(0).normal(1e6, 1, 500)
    ours = scores.trailing_mean(returns, 100)
    plain = [returns[max(0, i - 99) : i + 1].mean() for i in range(500)]
    np.testing.assert_allclose(ours, plain, rtol=1e-12)


def test_trailing_mean_is_nan_only_where_a_nan_is_inside():
    returns = np.arange(10.0)
    returns[4] = np.nan
    missing = np.isnan(scores.trailing_mean(returns, 3))
    assert np.flatnonzero(missing).tolist() == [4, 5, 6]


def test_score_of_a_run():
    at = np.arange(1, 301)
    returns = np.concatenate([np.zeros(100), np.full(100, 9.0), np.full(100, 5.0)])
    assert scores.score_at_end(returns) == 5
    assert scores.score_at(at, returns, 200) == 9
    assert scores.score_at(at, returns, 150) == 4.5
    assert scores.best_score(returns) == 9
    assert np.isnan(scores.score_at(at, returns, 0))
    assert np.isnan(scores.score_at_end(np.empty(0)))


def test_the_best_score_takes_whole_windows_only():
    # a lucky first episode is no mean of 100
    assert scores.best_score(np.concatenate([[500.0], np.zeros(200)])) == 5
    assert scores.best_score(np.array([500.0, 0.0])) == 250  # of all, where there are fewer
    rng = np.random.default_rng(2)
    for window in (1, 7, 100):
        returns = rng.normal(size=150)
        oracle = max(returns[i : i + window].mean() for i in range(151 - window))
        assert scores.best_score(returns, window) == pytest.approx(oracle, abs=1e-12)
    # rows that average 4 episodes each: whole windows of 8 episodes are 2 rows
    averages, counts = np.array([500.0, 1.0, 3.0, 2.0]), np.full(4, 4.0)
    assert scores.best_score(averages, 8, counts) == 250.5
    assert scores.best_score(averages[1:], 8, counts[1:]) == 2.5


def test_counts_are_put_in_order_with_their_episodes():
    """Rows of a log that average 1, 10 and 100 episodes, written in another order than they ended."""
    steps, returns, counts = np.array([[30.0, 3.0, 100.0], [10.0, 1.0, 1.0], [20.0, 2.0, 10.0]]).T
    columns = {"step": steps, "wall_time": -steps, "return": returns, "episodes": counts}
    data = tables([(RunKey("r", "s", "h", "Nowhere-v0", 0), columns)])
    (run,) = [run for _, run in scores.split_runs(data.curves)]
    assert scores.ordered_episodes(run).counts.tolist() == [1, 10, 100]
    assert scores.ordered_episodes(run, "wall_time").counts.tolist() == [100, 10, 1]
    by_step = scores.final_scores(data, scores.Rule(window=200))["score"].item()
    assert by_step == pytest.approx((100 * 3 + 10 * 2 + 1 * 1) / 111)
    before_30 = scores.final_scores(data, scores.Rule(step=20))["score"].item()
    assert before_30 == pytest.approx((10 * 2 + 1 * 1) / 11)


def test_the_episodes_of_a_score_are_those_of_its_window(write_run):
    """Rows of 60 episodes, of which one fits into 100."""
    data = read_records([write_run(returns=np.arange(5.0))])
    data = data._replace(curves=data.curves.assign(episodes=60.0))
    row = scores.final_scores(data).iloc[0]
    assert (row["score"], row["episodes"]) == (4.0, 60)


def test_required_time_is_when_the_running_mean_reaches_the_target():
    times = np.arange(1.0, 301.0)
    returns = np.concatenate([np.zeros(100), np.full(200, 10.0)])
    # after k episodes of 10 the mean of the last 100 is k / 10
    assert scores.time_to_reach(times, returns, 5.0) == 150
    assert scores.time_to_reach(times, returns, 10.0) == 200
    assert scores.time_to_reach(times, returns, 10.1) == np.inf
    # a lucky first episode is no running mean of 100
    assert scores.time_to_reach(times, np.concatenate([[500.0], returns[1:]]), 5.0) == 100


def test_hts_metrics_use_the_fastest_run_as_time_limit(write_run, tmp_path):
    write_run(seed=1, returns=np.arange(200.0), total_steps=2000)
    write_run(seed=2, returns=np.arange(200.0), total_steps=1000)
    table = scores.hts_metrics(read_records([tmp_path]), targets=[100.0])
    slow, fast = (table[table["seed"] == seed].iloc[0] for seed in (1, 2))
    # the fast run ends 5 s after its last episode
    assert slow["time_limit"] == fast["time_limit"] == 15
    assert slow["final_metric"] == fast["final_metric"] == fast["final_time_metric"] == 149.5
    assert slow["final_time_metric"] == 99.5  # 150 of its 200 episodes, the last 100 of them
    assert slow["required_time_100"] == pytest.approx(2 * fast["required_time_100"])


def test_the_time_limit_is_that_of_the_fastest_run_on_the_same_environment(write_run, tmp_path):
    for env_id, totals in (("Breakout-v5", (2000, 1000)), ("Pong-v5", (300, 600))):
        for seed, total in enumerate(totals):
            write_run(env_id=env_id, seed=seed, returns=np.arange(20.0), total_steps=total)
    table = scores.hts_metrics(read_records([tmp_path]), targets=[])
    limits = table.groupby("env_id", observed=True)["time_limit"].unique()
    assert limits["Breakout-v5"] == [15]  # 100 steps a second, after 5 s of compilation
    assert limits["Pong-v5"] == [8]


def test_the_final_metric_does_not_depend_on_when_an_episode_was_written_down(write_run):
    tables = read_records([write_run(returns=np.arange(200.0))])
    backwards = tables.curves.assign(wall_time=tables.curves["wall_time"].to_numpy()[::-1])
    other = scores.hts_metrics(tables._replace(curves=backwards), targets=[])
    assert other["final_metric"].item() == scores.final_scores(tables)["score"].item() == 149.5


def test_final_scores_by_rule(write_run):
    tables = read_records([write_run(returns=np.append(np.arange(150.0), np.zeros(50)))])
    by = {
        rule: scores.final_scores(tables, rule)["score"].item()
        for rule in (
            scores.Rule(),
            scores.Rule(step=500),
            scores.Rule(time=5),
            scores.Rule(window=10),
            scores.Rule(best=True),
        )
    }
    assert list(by.values()) == [62.25, 49.5, 49.5, 0, 99.5]


@pytest.mark.parametrize(
    ("episodes", "window", "behind"), [(200, 100, 100), (200, 10, 10), (30, 100, 30)]
)
def test_a_score_says_how_many_episodes_are_behind_it(write_run, episodes, window, behind):
    tables = read_records([write_run(returns=np.arange(float(episodes)))])
    found = scores.final_scores(tables, scores.Rule(window=window))
    assert found["episodes"].item() == behind
    assert found["score"].item() == np.arange(episodes)[-behind:].mean()


def test_episodes_after_a_step_are_not_behind_its_score(write_run):
    tables = read_records([write_run(returns=np.arange(200.0))])
    at = np.sort(tables.curves["step"])[29]
    found = scores.final_scores(tables, scores.Rule(step=at))
    assert found["episodes"].item() == 30
    assert found["score"].item() == np.arange(30).mean()


def test_a_row_that_averages_episodes_counts_them_all(write_run):
    tables = read_records([write_run(returns=np.arange(5.0))])
    for each, behind in ((8.0, 40), (50.0, 100)):
        rows = tables._replace(curves=tables.curves.assign(episodes=each))
        assert scores.final_scores(rows)["episodes"].item() == behind


def test_a_curve_is_the_mean_of_the_last_episodes_and_is_never_drawn_on():
    at = np.array([10, 20, 30])
    returns = np.array([1.0, 2.0, 6.0])
    smooth = learning_curves.smooth(at, returns, np.array([5, 10, 25, 30, 99]), window=2)
    np.testing.assert_array_equal(smooth, [np.nan, 1, 1.5, 4, 4])


def test_runs_of_unequal_length_share_a_grid(write_run, tmp_path):
    write_run(seed=1, total_steps=1000)
    write_run(seed=2, total_steps=500)
    result = learning_curves.run_curves(read_records([tmp_path]), points=10)
    assert result.grid[-1] == 1000
    assert np.isfinite(result.values[0]).all()
    assert np.isfinite(result.values[1]).tolist() == [True] * 5 + [False] * 5
    table = learning_curves.curve_table(result)
    assert table["value"].notna().tolist() == [True] * 5 + [False] * 5
    assert (table["runs"] == 2).all()


@pytest.mark.parametrize("axis", ["step", "time"])
def test_a_curve_ends_with_the_run_and_not_with_its_last_episode(axis):
    """The last episode of a run of 1,000 steps and 100 s ends at step 500, the next would be too late."""
    at = np.array([100.0, 500.0])
    episodes = {"step": at, "wall_time": at / 10, "return": [1.0, 3.0]}
    key = RunKey("r", "s", "h", "Nowhere-v0", 0)
    whole = {"status": ["completed"], "completed": [True], "steps": [1000.0], "seconds": [100.0]}
    result = learning_curves.run_curves(
        tables([(key, episodes)], runs=[(key, whole)]), axis, points=10
    )
    assert result.grid[-1] == (1000 if axis == "step" else 100)
    assert result.values.tolist() == [[1, 1, 1, 1, *[2] * 6]]
    # without a row in the table of runs, the last episode is all that is known
    assert learning_curves.run_curves(tables([(key, episodes)]), points=5).grid[-1] == 500


def test_runs_that_stop_a_few_steps_apart_have_a_last_point(write_run, tmp_path):
    write_run(seed=1, total_steps=1000)
    write_run(seed=2, total_steps=990)
    write_run(seed=3, total_steps=970)
    result = learning_curves.run_curves(read_records([tmp_path]), points=10)
    assert np.isfinite(result.values[:, -1]).tolist() == [True, True, False]


def test_bands_hold_the_curve_and_narrow_with_runs():
    rng = np.random.default_rng(1)

    def width(runs):
        values = rng.normal(size=(runs, 1)) + np.linspace(0, 1, 20)
        value, low, high = learning_curves.band([values], learning_curves.aggregates.mean, 2000)
        np.testing.assert_allclose(value, values.mean(axis=0))
        assert (low <= value).all()
        assert (value <= high).all()
        return np.mean(high - low)

    assert width(80) < 0.5 * width(8)


def test_a_band_has_the_level_asked_for():
    """Of the mean of many normal values, at every point: the normal quantiles are the oracle."""
    values = np.random.default_rng(3).normal(size=(200, 3)) * [1, 2, 3]
    error = values.std(axis=0) / np.sqrt(len(values))
    for level in (0.5, 0.8, 0.95):
        _, low, high = learning_curves.band([values], learning_curves.aggregates.mean, 5000, level)
        width = 2 * NormalDist().inv_cdf((1 + level) / 2) * error
        np.testing.assert_allclose(high - low, width, rtol=0.07)


def test_aggregate_curves_are_in_normalized_scores(write_run, tmp_path):
    for seed in (1, 2, 3):
        for env_id in ("Breakout-v5", "Pong-v5"):
            random, human = references.reference(env_id)
            write_run(seed=seed, env_id=env_id, returns=np.full(50, (random + human) / 2))
    measured = learning_curves.run_curves(read_records([tmp_path]), points=5)
    normalized = learning_curves.normalized(measured)
    table = learning_curves.aggregate_curve_table(normalized, repetitions=100)
    assert len(table) == 10
    assert table["value"].to_numpy() == pytest.approx(0.5)
    assert set(table["runs"]) == {6}
    assert set(table["environments"]) == {2}


def test_area_under_a_straight_line():
    grid = np.linspace(0, 2, 11)
    area = learning_curves.area_under_curve(grid, np.stack([grid, 3 * grid]))
    np.testing.assert_allclose(area, [1, 3])


def test_a_column_of_the_updates_is_averaged_between_points_of_the_grid(write_run):
    # 10 updates of 100 steps, with losses 1, 1/2, ..., 1/10; two seeds alike
    tables = read_records([write_run(seed=1), write_run(seed=2)])
    table = learning_curves.update_curve_table(tables, "loss", points=5)
    assert table["step"].tolist() == [200, 400, 600, 800, 1000]
    expected = [(1 / n + 1 / (n + 1)) / 2 for n in (1, 3, 5, 7, 9)]
    np.testing.assert_allclose(table["value"], expected)
    np.testing.assert_allclose(table["low"], expected)
    assert set(table["runs"]) == {2}
    assert learning_curves.update_curve_table(tables, "no_such_column").empty
