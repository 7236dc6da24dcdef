"""Run records become tables, and damage becomes one clear line."""

import json

import numpy as np
import pytest

from analysis.importers.records import read_records, steady_sps
from analysis.tables import KEYS, InputError
from tests.sealing import rewrite


def test_tables_hold_what_was_written(write_run, tmp_path):
    write_run(seed=1, episodes=50)
    write_run(seed=2, episodes=30, env_id="Pong-v5")
    tables = read_records([tmp_path])
    assert len(tables.curves) == 80
    assert set(tables.curves["env_id"]) == {"Breakout-v5", "Pong-v5"}
    pong = tables.curves[tables.curves["env_id"] == "Pong-v5"]
    assert pong["return"].tolist() == list(range(30))
    assert pong["step"].iloc[-1] == 1000
    assert pong["wall_time"].iloc[-1] == 10
    assert len(tables.rollouts) == len(tables.updates) == 20
    assert len(tables.runs) == 2
    assert tables.runs["completed"].all()
    assert tables.runs["hyperparameters"].iloc[0]["num_envs"] == 4
    assert tables.updates["loss"].max() == 1.0
    assert tables.quality.empty
    for frame in (tables.curves, tables.rollouts, tables.updates, tables.runs):
        assert list(frame.columns[:5]) == KEYS


def test_lag_and_changes(tmp_path, write_run):
    run = write_run(updates=1)
    row = {
        "actor": 3,
        "group": None,
        "rollout": 1,
        "steps": 10,
        "wall_time": 1.0,
        "version_first": 1,
        "version_last": 4,
        "versions": [[1, 5], [3, 2], [4, 3]],
        "learner_version": 6,
    }
    rewrite(run / "rollouts.jsonl", json.dumps(row) + "\n")
    rollouts = read_records([run]).rollouts
    assert rollouts["changes"].tolist() == [2]
    assert rollouts["lag"].tolist() == [6 - (1 * 5 + 3 * 2 + 4 * 3) / 10]


def test_speed_leaves_out_compilation():
    step = np.arange(1, 11) * 100.0
    time = np.concatenate([[30.0], 30 + np.arange(1, 10)])
    assert steady_sps(step, time) == pytest.approx(100)
    assert np.isnan(steady_sps(step[:3], time[:3]))


def test_speed_of_a_run(write_run):
    runs = read_records([write_run()]).runs
    assert runs["sps"].item() == pytest.approx(100)
    assert runs["sps_overall"].item() == pytest.approx(1000 / 15)


def test_a_run_that_did_not_complete_is_named_and_kept(write_run):
    run = write_run(status="failed")
    tables = read_records([run])
    assert len(tables.curves) == 50
    assert not tables.runs["completed"].item()
    assert "failed" in tables.quality["problem"].item()


def test_a_torn_line_is_named(write_run):
    run = write_run(status=None)
    with open(run / "episodes.jsonl", "a") as file:
        file.write('{"step": 3')
    problems = list(read_records([run]).quality["problem"])
    assert problems == [
        "status is 'running', not 'completed'",
        "episodes.jsonl: torn last line left out",
    ]


def test_nan_returns_are_named(write_run):
    tables = read_records([write_run(returns=[1.0, np.nan, 3.0])])
    assert tables.quality["problem"].item() == "1 episodes have no return (NaN)"
    assert tables.curves["return"].isna().sum() == 1


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("not json", "not JSON"),
        ("[1, 2]", "expected `object`, got `array`"),
        ('{"step": 1, "wall_time": 2, "env_index": 0, "length": 1}', "missing field `return`"),
        ('{"step": "1"}', "step: expected `int`, got `str`"),
        ('{"step": true}', "step: expected `int`, got `bool`"),
        ('{"step": -1}', "step: expected `int` >= 0"),
        ('{"step": 1' + "0" * 400 + "}", "step: expected `int` <= 9007199254740992"),
        ('{"step": 1e300}', "step: expected `int`, got `float`"),
        ('{"step": 1, "wall_time": 2, "return": 1e999}', "return: number out of range"),
        ('{"step": 1, "wall_time": NaN}', "not JSON"),
        ("", "not JSON"),
    ],
)
def test_damage_names_file_and_line(write_run, line, what):
    run = write_run()
    lines = (run / "episodes.jsonl").read_text().splitlines()
    lines[6] = line
    (run / "episodes.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError) as error:
        read_records([run])
    assert f"{run / 'episodes.jsonl'}, line 7" in str(error.value)
    assert what in str(error.value)
    assert "\n" not in str(error.value)


def test_nothing_to_read(tmp_path):
    with pytest.raises(InputError, match="no run record here"):
        read_records([tmp_path])
    with pytest.raises(InputError, match="no such file"):
        read_records([tmp_path / "none"])
