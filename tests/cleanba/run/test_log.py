"""One log for every system: what it writes, how it ends, and how it is resumed."""

import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cleanba.record import Episode, Rollout, Update, read_run
from cleanba.run import log as log_module
from cleanba.run.command_line import BadInput
from cleanba.run.log import ResumePoint, RunLog, run_info, run_lengths
from cleanba.run.options import RunId, RunOptions, TrackingOptions, check_run, run_id


def make_log(folder, **options):
    run = RunId("mine", "cpu", "Catch-v0", 1, "test", str(folder))
    info = run_info(
        run, program="mine", hyperparameters={"rate": 0.1}, hardware={}, packages=("numpy",)
    )
    return RunLog(run, info, **({"total_steps": 100} | options))


def rows(number, returns=(), waits=(0.0, 0.0)):
    """Update `number` of 10 steps, its rollout, which is one policy behind, and its episodes."""
    update = Update(
        version=number + 1, step=10 * number, wall_time=float(number), update_seconds=1.0,
        learning_rate=0.1, loss=0.5, rollout_queue_get_time=waits[0], params_queue_get_time=waits[1],
    )  # fmt: skip
    first = max(1, number - 1)
    rollout = Rollout(
        actor=0, group=None, rollout=number, steps=10, wall_time=float(number), version_first=first,
        version_last=first, versions=[(first, 10)], learner_version=number,
    )  # fmt: skip
    episodes = [
        Episode(step=10 * number, wall_time=1.0, env_index=i, episode_return=r, length=7)
        for i, r in enumerate(returns)
    ]
    return update, [rollout], episodes


def scalars(folder):
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_a_failed_upload_leaves_no_record_that_looks_as_if_it_were_running(tmp_path, monkeypatch):
    class Tracker:
        def log(self, scalars, step):
            pass

        def finish(self, exit_code):
            raise OSError("no network")

    monkeypatch.setattr(log_module, "_start_wandb", lambda *_: Tracker())
    with (
        pytest.raises(OSError, match="no network"),
        make_log(tmp_path, tracking=TrackingOptions(track=True)) as log,
    ):
        log.write(*rows(1))
    assert read_run(log.directory).completed


def test_tracking_without_wandb_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        BadInput, match=r"--track: wandb is not installed \(pip install \.\[track\]\)"
    ):
        make_log(tmp_path, tracking=TrackingOptions(track=True))
    assert not list(tmp_path.rglob("run.json"))


def test_the_record_and_tensorboard_hold_what_was_written(tmp_path, capsys):
    with make_log(tmp_path, log_frequency=4) as log:
        for number in range(1, 11):
            log.write(*rows(number, returns=(float(number), float(number + 1))))
    run = read_run(log.directory)
    assert run.completed
    assert (len(run.updates()), len(run.rollouts()), len(run.episodes())) == (10, 10, 20)
    assert run.info.versions.keys() == {"python", "cleanba", "glibc", "numpy"}
    found = scalars(log.directory)
    steps = [40, 80, 100]  # every fourth update, and the last
    assert [step for step, _ in found["charts/SPS"]] == steps
    means = [np.mean([[n, n + 1] for n in range(1, last + 1)]) for last in (4, 8, 10)]
    np.testing.assert_allclose([v for _, v in found["charts/avg_episodic_return"]], means)
    assert [v for _, v in found["charts/avg_episodic_length"]] == [7] * 3
    assert capsys.readouterr().out == f"completed: {log.directory}\n"


def test_an_exception_ends_the_record_as_failed(tmp_path, capsys):
    with pytest.raises(ValueError, match="planted"), make_log(tmp_path) as log:
        raise ValueError("planted")
    info = read_run(log.directory).info
    assert (info.status, info.error) == ("failed", "ValueError: planted")
    assert "completed" not in capsys.readouterr().out


def test_a_resumed_log_goes_on_where_it_was_and_remembers_returns(tmp_path):
    log = make_log(tmp_path)
    log.write(*rows(1, returns=(10.0,)))
    sizes = log.sizes()
    log.write(*rows(2, returns=(99.0,)))
    log.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert "run.json" not in sizes
    with make_log(tmp_path, resume=ResumePoint(sizes, step=10, update=1)) as log:
        log.write(*rows(2, returns=(20.0,)))
    run = read_run(log.directory)
    assert [u.step for u in run.updates()] == [10, 20]
    assert [e.episode_return for e in run.episodes()] == [10.0, 20.0]
    assert [note.update for note in run.info.resumed] == [1]
    assert scalars(log.directory)["charts/avg_episodic_return"] == [(10, 10.0), (20, 15.0)]


def test_the_bar_names_return_lag_and_the_side_that_waits(tmp_path, capsys):
    with make_log(tmp_path, progress="bar") as log:
        log.write(*rows(3, returns=(2.0, 4.0), waits=(0.5, 0.1)))
    printed = capsys.readouterr().err
    assert "return 3.0, lag 1, waiting: learner" in printed
    assert "30.0/100" in printed


def test_lines_of_progress_come_at_intervals_and_need_no_reader(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(log_module, "SECONDS_BETWEEN_LINES", 3600.0)
    with make_log(tmp_path, progress="lines") as log:
        log.write(*rows(1, returns=(2.0,)))
        assert capsys.readouterr().out == ""
        monkeypatch.setattr(log_module, "SECONDS_BETWEEN_LINES", 0.0)
        log.write(*rows(2, returns=(4.0,)))
        line = capsys.readouterr().out
        assert line.startswith("Steps 20 of 100 @ ")
        assert line.endswith(" SPS. Loss 0.5. Return 3.0.\n")
        monkeypatch.setattr(sys, "stdout", Closed())
        log.write(*rows(3))
        monkeypatch.undo()
    assert len(read_run(log.directory).updates()) == 3


class Closed:
    def write(self, text):
        raise BrokenPipeError

    def flush(self):
        raise BrokenPipeError


def test_run_lengths_of_versions():
    assert run_lengths(np.array([3, 3, 4, 3, 3, 3])) == [(3, 2), (4, 1), (3, 3)]
    assert run_lengths(np.array([7])) == [(7, 1)]


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/a", "..\\b"])
@pytest.mark.parametrize("which", ["study", "setting"])
def test_names_that_lead_to_another_folder_are_refused(tmp_path, which, name):
    options = RunOptions(runs_dir=str(tmp_path), **{which: name})
    run = run_id("mine", "CartPole-v1", 1, options, "cpu")
    with pytest.raises(ValueError, match=f"^--{which} "):
        check_run(run, 1, overwrite=False)


def test_a_run_is_named_by_its_options(tmp_path):
    options = RunOptions(runs_dir=str(tmp_path), study="s")
    run = run_id("mine", "gym/Env-v1", 2, options, "cpu")
    assert run.directory == Path(tmp_path) / "s" / "mine__cpu__gym-Env-v1__s2"
    named = run_id("mine", "gym/Env-v1", 2, RunOptions(setting="gpu", exp_name="other"), "cpu")
    assert (named.system, named.setting) == ("other", "gpu")
