"""Formulas against simulations, predictions against published values, and measured lag against theory."""

import numpy as np
import pytest
import scipy.stats

from analysis import lag, queueing, scaling
from analysis.importers.records import read_records
from cleanba.record.layout import Layout
from tests.sealing import rewrite


def test_claim_1_fits_simulation():
    rng = np.random.default_rng(0)
    for shape, rate, interval in ((1.0, 1.0, 4), (1.0, 2.0, 64), (2.0, 1.0, 8), (0.5, 3.0, 16)):
        given = (400_000, 16, interval, shape, rate, 0.01)
        ratio = queueing.simulated_run_time(*given, rng) / queueing.expected_run_time(*given)
        assert ratio == pytest.approx(1, abs=0.03), (shape, rate, interval)


def test_claim_1_location_is_the_gamma_quantile():
    # without the Gumbel term the formula is rounds x quantile: check against SciPy's own
    n, interval, shape, rate = 16, 4, 1.5, 2.0
    law = scipy.stats.gamma(interval * shape, scale=1 / rate)
    location, end = law.ppf(1 - 1 / n), law.ppf(1 - 1 / (n * np.e))
    expected = 100 * (location + np.euler_gamma * (end - location))
    ours = queueing.expected_run_time(100 * n * interval, n, interval, shape, rate, 0.0)
    assert ours == pytest.approx(expected)


def test_claim_1_actors_take_their_time_in_every_step():
    for interval in (1, 4, 64):
        given = (10_000, 16, interval, 1.0, 2.0)
        added = queueing.expected_run_time(*given, 0.5) - queueing.expected_run_time(*given, 0.0)
        assert added == pytest.approx(0.5 * 10_000 / 16)  # c for each of K / n steps


def test_claim_1_shapes_of_figure_4():
    variance = queueing.figure_4a()
    interval = queueing.figure_4b()
    for rows, sign in ((variance, 1), (interval, -1)):
        assert (np.diff([row["formula"] for row in rows]) * sign > 0).all()
        for row in rows:
            assert row["simulated"] == pytest.approx(row["formula"], rel=0.08)
    # for an infinite interval only the mean step time is left: states / n / rate
    endless = queueing.expected_run_time(10_000, 16, 10**6, 1.0, 2.0, 0.0)
    assert endless == pytest.approx(10_000 / 16 / 2, rel=0.01)


def test_claim_2_fits_simulation():
    rng = np.random.default_rng(1)
    for actors in (1, 10, 20, 30):
        formula = queueing.expected_latency(actors, 1.0, 40.0)
        assert formula == pytest.approx(actors / (40 - actors))
        simulated = queueing.simulated_latency(actors, 1.0, 40.0, rng)
        assert simulated == pytest.approx(formula, rel=0.05)
    assert queueing.expected_latency(40, 1.0, 40.0) == np.inf


def test_readme_layouts_that_the_model_has_not_seen():
    table = scaling.compare_readme()
    used = table["calibrated_on"]
    assert table["error"][used].abs().max() < 1e-9
    assert (~used).sum() == 5
    assert table["error"][~used].abs().max() < 0.06


def test_iteration_time_by_hand():
    times = scaling.Times(rollout=4, inference=1, gradient=6, fixed=1, transfer=2)
    layout = Layout.parse
    assert scaling.iteration_time(times, layout("a0-l1-d1")) == 1 + 6
    assert scaling.iteration_time(times, layout("a0-l1,2-d1")) == 1 + 4
    assert scaling.iteration_time(times, layout("a0-l0-d1")) == 1 + 6 + 1
    assert scaling.iteration_time(times, layout("a0-l1-d2")) == 7 / 2 + 2


def record_with_times(write_run):
    run = write_run(updates=20, total_steps=2000)
    lines = (run / "updates.jsonl").read_text().splitlines()
    times = '"rollout_time":0.9,"inference_time":0.3,"training_time":0.6,"loss"'
    lines = [line.replace('"loss"', times) for line in lines]
    lines[0] = lines[0].replace("0.6", "60")  # the first compiles
    rewrite(run / "updates.jsonl", "\n".join(lines) + "\n")
    return run


def predicted_for_another_seed(write_run, run):
    """What the record of seed 1 predicts for a run without times of its own."""
    other = run.with_name("other")
    if not other.exists():
        write_run(seed=2, updates=1, folder=other)
    return lag.predictions(read_records([run, other])).iloc[1]


def test_lag_predictions_of_a_record(write_run):
    row = predicted_for_another_seed(write_run, record_with_times(write_run))
    assert row["changes_by_time"] == pytest.approx(0.9)
    assert row["latency_mm1"] == pytest.approx(0.6 / 0.4)
    assert np.isnan(row["changes_by_actors"])


def test_where_actors_wait_for_room_whole_updates_count(write_run):
    run = record_with_times(write_run)  # an update per second
    text = (run / "updates.jsonl").read_text().replace('"rollout_time":0.9', '"rollout_time":2.7')
    rewrite(run / "updates.jsonl", text)
    predicted = predicted_for_another_seed(write_run, run)
    assert predicted["changes_by_time"] == pytest.approx(2.7)
    waiting = text.replace('"loss"', '"rollout_queue_put_time": 1.5, "loss"')
    rewrite(run / "updates.jsonl", waiting)
    assert predicted_for_another_seed(write_run, run)["changes_by_time"] == 2


def test_gradient_asynchrony(write_run):
    run = write_run(updates=3)
    lines = (run / "updates.jsonl").read_text().splitlines()
    # updates make versions 2, 3, 4 of gradients computed at 1, 1, 1
    lines = [line.replace('"loss"', '"gradient_version": 1, "loss"') for line in lines]
    rewrite(run / "updates.jsonl", "\n".join(lines) + "\n")
    row = lag.lag_summary(read_records([run])).iloc[0]
    assert row["asynchrony_mean"] == 1
    assert row["asynchrony_max"] == 2
