"""openrlbenchmark draws the runs that we recorded: same runs, same scores."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_runs import study_folder, write_run

from analysis import importers
from analysis.scores import final_scores
from reports import rlops


@pytest.fixture
def study(tmp_path):
    folder = tmp_path / "runs" / "mine"
    study_folder(folder, seeds=(1, 2), steps=25_600)
    write_run(folder / "unfinished", seed=9, status="interrupted")
    return folder


def test_the_command_names_every_curve_and_environment_once(study, tmp_path, capsys):
    assert rlops.main([str(study), "--out", "x", "--dataset", str(tmp_path / "data")]) == 0
    text = capsys.readouterr().out
    for setting in ("a0-l0-t1", "a0-l0,1-t2"):
        for system in ("cleanba_ppo", "cleanba_ppo-sync"):
            assert text.count(f"'{system}__{setting}?cl=") == 1
    assert "--env-ids CartPole-v1 Catch-v0 --offline --scan-history" in text
    assert "we=cleanba&wpn=mine&cen=exp_name&ceik=env_id&metric=charts/episodic_return" in text


def test_environments_that_openrlbenchmark_cannot_draw_are_left_out_and_named(study, capsys):
    data = study.parent / "data"
    write_run(study / "more", env_id="Pong-v5", steps=5_120)
    assert rlops.main([str(study), "--out", "x", "--dataset", str(data)]) == 0
    printed = capsys.readouterr()
    assert "--env-ids CartPole-v1 Catch-v0 --offline" in printed.out
    assert printed.err.endswith("left out, without runs of every system and setting: Pong-v5\n")
    write_run(study / "other", "moolib", env_id="Breakout-v5", steps=5_120)
    assert rlops.main([str(study), "--out", "x", "--dataset", str(data)]) == 2
    message = f"error: {study}: no environment has runs of every system and setting\n"
    assert capsys.readouterr().err.endswith(message)


def test_the_database_is_read_back_as_the_records_were(study, tmp_path):
    for _ in range(2):  # filled again, it holds every run once
        assert rlops.main([str(study), "--out", "x", "--dataset", str(tmp_path / "data")]) == 0
    ours = importers.read([study])
    theirs = importers.read([tmp_path / "data" / "cleanba" / "mine"])
    assert len(theirs.runs) == 16  # not the one that was interrupted
    keys = ["env_id", "seed", "step", "return"]
    one = ours.curves[ours.curves["run"].astype(str).str.contains("cleanba_ppo__a0-l0-t1__")]
    same = theirs.curves[theirs.curves["system"] == "cleanba_ppo__a0-l0-t1"]
    left, right = (frame[keys].astype({"env_id": str}).sort_values(keys) for frame in (one, same))
    assert len(left) > 100
    assert (left.to_numpy() == right.to_numpy()).all()


@pytest.mark.slow
def test_openrlbenchmark_finds_our_scores(study, tmp_path, monkeypatch):
    """Its own program, on a copy of its package, whose folder it keeps its database in."""
    import openrlbenchmark

    package = tmp_path / "packages" / "openrlbenchmark"
    package.mkdir(parents=True)
    for file in Path(openrlbenchmark.__path__[0]).glob("*.py"):
        (package / file.name).write_bytes(file.read_bytes())
    write_run(study / "more", env_id="Pong-v5", steps=25_600)  # of no other system or setting
    runs = rlops.recorded_runs(importers.read([study]), "mine")
    rlops.fill(runs, package / "dataset")
    out = tmp_path / "out" / "compare"
    environments, left_out = rlops.drawable(runs)
    assert left_out == ["Pong-v5"]
    words = rlops.command(runs, environments, str(out))
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=package.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert out.with_suffix(".png").stat().st_size > 10_000
    table = list(csv.reader(out.with_suffix(".csv").open()))
    scores = final_scores(importers.read([study]))
    scores = scores[~scores["run"].astype(str).str.contains("unfinished")]
    for env_id, *cells in table[1:]:
        for name, cell in zip(table[0][1:], cells, strict=True):
            system, setting = name.split(", ")
            group = scores[
                (scores["system"] == system)
                & (scores["setting"] == setting)
                & (scores["env_id"] == env_id)
            ]["score"]
            mean, deviation = map(float, cell.split(" ± "))
            assert mean == pytest.approx(group.mean(), abs=0.006)
            assert deviation == pytest.approx(group.std(ddof=0), abs=0.006)


@pytest.mark.parametrize(("folder", "message"), [("nowhere", "no such folder"), ("empty", "empty")])
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, folder, message):
    (tmp_path / "empty").mkdir()
    assert rlops.main([str(tmp_path / folder), "--dataset", str(tmp_path / "data")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "data").exists()
