"""Policy lag, and fingerprints, of records with known content."""

import pytest

from analysis import lag, reproducibility
from analysis.importers.records import read_records


def test_summary_of_cleanba_is_a_lag_of_one(write_run):
    tables = read_records([write_run(updates=10)])
    row = lag.lag_summary(tables).iloc[0]
    assert row["rollouts"] == 10
    assert row["changes_max"] == 0
    # the writer's first rollout is used by the version that made it, all others one later
    assert row["lag_p50"] == row["lag_max"] == 1
    assert row["lag_mean"] == pytest.approx(0.9)


def test_shares_of_versions_sum_to_one(write_run):
    tables = read_records([write_run()])
    shares = lag.version_shares(tables.rollouts)
    assert shares.groupby("learner_version")["share"].sum().to_numpy() == pytest.approx(1)
    assert shares["steps"].sum() == tables.rollouts["steps"].sum()


def test_over_time_and_by_actor_keep_every_rollout(write_run):
    tables = read_records([write_run(updates=10)])
    over_time = lag.lag_over_time(tables, bins=4)
    assert over_time["rollouts"].sum() == 10
    assert len(over_time) == 4
    assert lag.lag_by_actor(tables)["rollouts"].sum() == 10
    assert lag.lag_distribution(tables)["share"].sum() == pytest.approx(1)


def test_fingerprints_identical_and_first_difference(write_run, tmp_path):
    write_run(setting="a0-l0-t1")
    write_run(setting="a0-l0-t4")
    other = write_run(setting="a0-l0,1-t1")
    path = other / "updates.jsonl"
    text = path.read_text()
    for version in range(7, 12):
        text = text.replace(f'"f{version}"', f'"g{version}"')
    path.write_text(text)
    table = reproducibility.fingerprint_table(read_records([tmp_path]))
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
    result = reproducibility.compare_fingerprints({1: "a"}, {2: "a"})
    assert result.identical is None
