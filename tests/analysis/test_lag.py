"""Policy lag, and fingerprints, of records with known content."""

import json

import numpy as np
import pytest

from analysis import fingerprints, lag
from analysis.importers.records import read_records
from analysis.tables import KEYS, RunKey, tables
from tests.sealing import rewrite

KEY = RunKey("r", "s", "h", "Breakout-v5", 1)


def test_summary_of_cleanba_is_a_lag_of_one(write_run):
    tables = read_records([write_run(updates=10)])
    row = lag.lag_summary(tables).iloc[0]
    assert row["rollouts"] == 10
    assert row["changes_max"] == 0
    # the writer's first rollout is used by the version that made it, all others one later
    assert row["lag_p50"] == row["lag_max"] == 1
    assert row["lag_mean"] == pytest.approx(0.9)


def test_the_recorded_versions_of_the_steps_make_the_shares():
    rollouts = {
        "learner_version": [5.0, 5.0],
        "versions": [[(1, 5), (3, 2), (4, 3)], [(3, 6), (4, 4)]],
        "version_first": [1.0, 3.0],
        "version_last": [4.0, 4.0],
        "steps": [10.0, 10.0],
    }
    shares = lag.all_version_shares(tables(rollouts=[(KEY, rollouts)]))
    columns = ["learner_version", "version", "steps", "share"]
    assert shares.columns.tolist() == [*KEYS, *columns]
    found = shares[columns].to_numpy().tolist()
    assert found == [[5, 1, 5, 0.25], [5, 3, 8, 0.4], [5, 4, 7, 0.35]]


def test_a_summary_has_the_mean_the_quantiles_and_the_largest():
    values = np.random.default_rng(1).permutation(np.arange(101.0))
    rollouts = {"wall_time": values, "changes": 2 * values, "lag": 3 * values}
    updates = {"version": values + 5, "gradient_version": np.full(101, 4.0)}
    row = lag.lag_summary(tables(rollouts=[(KEY, rollouts)], updates=[(KEY, updates)])).iloc[0]
    for name, unit in (("changes", 2), ("lag", 3), ("asynchrony", 1)):
        found = [row[f"{name}_{what}"] for what in ("mean", "p5", "p50", "p95", "max")]
        assert found == pytest.approx([unit * x for x in (50, 5, 50, 95, 100)]), name


def test_the_first_updates_which_compile_tell_nothing_of_the_changes_to_be_expected():
    updates = {
        "version": np.arange(2.0, 42.0),
        "wall_time": np.concatenate([100 * np.arange(1.0, 11.0), 1000 + 2 * np.arange(1.0, 31.0)]),
        "rollout_time": np.repeat([500.0, 6.0], [10, 30]),
    }
    runs = {"status": ["completed"], "completed": [True], "hyperparameters": [{}]}
    other = KEY._replace(run="another seed", seed=2)
    both = tables(updates=[(KEY, updates)], runs=[(KEY, runs), (other, runs)])
    itself, predicted = lag.predictions(both).itertuples()
    assert np.isnan(itself.changes_by_time)  # nothing is predicted from the run itself
    assert predicted.changes_by_time == pytest.approx(3)  # 6 s, and an update every 2 s


def test_without_the_learners_version_a_rollout_counts_for_the_one_that_it_ended_with():
    """As in the output of monobeast_study, which says the first and the last version alone."""
    rollouts = {"version_first": [2.0, 4.0], "version_last": [4.0, 5.0], "steps": [30.0, 10.0]}
    (shares,) = [
        lag.version_shares(group)
        for _, group in lag.split_runs(tables(rollouts=[(KEY, rollouts)]).rollouts)
    ]
    assert shares.to_numpy().tolist() == [
        [4, 2, 10, 1 / 3], [4, 3, 10, 1 / 3], [4, 4, 10, 1 / 3], [5, 4, 5, 0.5], [5, 5, 5, 0.5],
    ]  # fmt: skip


def test_lag_over_time_is_in_the_order_of_time_and_not_of_the_file():
    order = np.random.default_rng(0).permutation(40)
    columns = {"wall_time": order + 1.0, "lag": 2.0 * order, "changes": order % 10.0}
    over_time = lag.lag_over_time(tables(rollouts=[(KEY, columns)]), bins=4)
    assert over_time["bin"].tolist() == [0, 1, 2, 3]
    assert over_time["rollouts"].tolist() == [10] * 4
    assert over_time["wall_time"].tolist() == [5.5, 15.5, 25.5, 35.5]
    assert over_time["lag"].tolist() == [9, 29, 49, 69]
    assert over_time["changes"].tolist() == [4.5] * 4


def test_lag_by_actor_and_its_distribution_are_exact():
    columns = {
        "actor": [1.0, 0.0, 1.0, 1.0],
        "lag": [1.0, 4.0, 2.0, 6.0],
        "changes": [0, 2, 3, 0.0],
    }
    both = tables(rollouts=[(KEY, columns)])
    by_actor = lag.lag_by_actor(both)[["actor", "rollouts", "changes", "lag"]]
    assert by_actor.to_numpy().tolist() == [[0, 1, 2, 4], [1, 3, 1, 3]]
    changes = lag.lag_distribution(both, "changes")[["value", "rollouts", "share"]]
    assert changes.to_numpy().tolist() == [[0, 2, 0.5], [2, 1, 0.25], [3, 1, 0.25]]


def test_fingerprints_identical_and_first_difference(write_run, tmp_path):
    write_run(setting="a0-l0-t1")
    write_run(setting="a0-l0-t4")
    other = write_run(setting="a0-l0,1-t1")
    path = other / "updates.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["version"] >= 7:
            row["fingerprint"] = row["fingerprint"][::-1]
    rewrite(path, "".join(json.dumps(row) + "\n" for row in rows))
    table = fingerprints.pairs(read_records([tmp_path]))
    assert len(table) == 3
    by = {(row.setting_a, row.setting_b): row for row in table.itertuples()}
    same = by["a0-l0-t1", "a0-l0-t4"]
    assert same.identical is True
    assert same.compared == 10
    differs = by["a0-l0,1-t1", "a0-l0-t1"]
    assert differs.identical is False
    assert differs.last_same == 6
    assert differs.first_difference == 7


def test_nothing_in_common_is_no_verdict():
    result = fingerprints.compare_fingerprints({1: "a"}, {2: "a"})
    assert result.identical is None
