"""What the files of a study say about a run: attempts, status, progress, and the table that shows them."""

import io
import json

import msgspec
import pytest
import synthetic_runs
from rich.console import Console
from rich.text import Text
from small_studies import STUDY, end_early

from cleanba.record import reader
from experiments import attempts, display, state
from experiments.state import State, Status
from experiments.study import load_study


@pytest.fixture
def study(tmp_path):
    (tmp_path / "small.toml").write_text(STUDY)
    return load_study(tmp_path / "small.toml")


def test_attempts_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "x.attempts.jsonl"
    assert attempts.read(path) == ((), "")
    events = (
        attempts.started(17),
        attempts.ended(3),
        attempts.started(40),
        attempts.ended(-15, stopped=True),
    )
    for event in events:
        attempts.append(path, event)
    history = attempts.read(path)
    assert history == (events, "")
    assert (history.end.signal, history.end.is_error, history.log_bytes) == ("SIGTERM", False, 40)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert set().union(*lines) == {
        "event", "time", "log_bytes", "exit_code", "signal", "stopped",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("returncode", "stopped", "is_error"),
    [
        (0, False, False),
        (1, False, True),
        (143, False, False),
        (-9, False, False),
        (1, True, False),
    ],
)
def test_an_attempt_is_in_error_if_it_ended_by_itself_with_an_error(returncode, stopped, is_error):
    assert attempts.ended(returncode, stopped).is_error == is_error


def test_a_torn_line_does_not_take_the_next_one_with_it(tmp_path):
    path = tmp_path / "x.attempts.jsonl"
    attempts.append(path, attempts.started(0))
    path.write_bytes(path.read_bytes()[:-20])
    end = attempts.ended(1)
    attempts.append(path, end)
    assert attempts.read(path) == ((end,), f"{path}: damaged and ignored: line 1")
    path.write_bytes(msgspec.json.encode([1]) + b"\n" + path.read_bytes())
    assert attempts.read(path).problem.endswith("ignored: line 1, 2")


def test_an_error_while_the_lock_is_held_is_raised_and_frees_it(tmp_path):
    with state.study_lock(tmp_path) as lock, state.study_lock(tmp_path) as second:
        assert lock is not None
        assert second is None
    with pytest.raises(BlockingIOError), state.study_lock(tmp_path):
        raise BlockingIOError  # such as of a full pipe
    assert not state.is_locked(tmp_path)


@pytest.mark.parametrize("code", [1, 2, -9])
def test_a_run_that_ended_early_is_resumed(tmp_path, study, code):
    """Also after bad input: its reason may be gone, such as a GPU that was not there."""
    run = study.runs[0]
    end_early(run, tmp_path, code)
    status = state.inspect(run, tmp_path)
    assert status.state is (State.INTERRUPTED if code < 0 else State.FAILED)
    assert code < 0 or status.note == "error: no room"
    assert state.restart_flag(run, status) == "--resume"


def test_the_last_words_are_those_of_the_last_attempt(tmp_path, study):
    run = study.runs[0]
    log = state.log_file(run, tmp_path)
    assert "cannot be read" in state.last_words(run, tmp_path)
    log.parent.mkdir(parents=True)
    log.write_text("# now\nerror: an old one\n")
    attempts.append(state.attempts_file(run, tmp_path), attempts.started(log.stat().st_size))
    assert state.last_words(run, tmp_path) == "ended without a record, and printed nothing"
    log.write_text(log.read_text() + "# no comment\n\n")
    assert state.last_words(run, tmp_path) == "# no comment"


def test_progress_is_the_last_whole_line_of_a_long_record(tmp_path, study):
    run = study.runs[0]
    folder = state.run_dir(run, tmp_path)
    assert state.steps_done(run, tmp_path) == 0
    # several blocks of it
    synthetic_runs.write_run(folder, status="running", steps=2 * 512 * 1_000)
    assert (folder / "updates.jsonl").stat().st_size > 3 * reader.TAIL_BYTES
    assert state.steps_done(run, tmp_path) == 512_000
    with (folder / "updates.jsonl").open("a") as file:
        file.write("9" * (reader.TAIL_BYTES - 9))  # torn; the last line's end is in the last block
        file.flush()
        assert state.steps_done(run, tmp_path) == 512_000
        file.write("9" * 9)
    assert state.steps_done(run, tmp_path) == 512_000
    whole = {
        "version": 2,
        "step": 1,
        "wall_time": 1,
        "update_seconds": 1,
        "learning_rate": 1,
        "loss": 1,
    }
    (folder / "updates.jsonl").write_text(json.dumps(whole) + "\n")
    assert state.steps_done(run, tmp_path) == 1
    for damaged in ('{"step": 1', "3\n", "}\n"):
        (folder / "updates.jsonl").write_text(damaged)
        assert state.steps_done(run, tmp_path) == 0


def test_on_a_terminal_a_table_shows_the_state_of_the_study(study, monkeypatch):
    states = (State.COMPLETED, State.RUNNING, State.FAILED, State.TO_DO)
    found = {run.name: Status(one) for run, one in zip(study.runs, states, strict=True)}
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with display.open_display(console) as shown:
        assert shown.is_due()
        monkeypatch.setattr(display, "TABLE_SECONDS", 3_600.0)
        shown.update(display.Snapshot(study, found, {study.runs[1].name: 0.25}, 90.0, 30.0))
        assert not shown.is_due()
    lines = Text.from_ansi(console.file.getvalue()).plain.splitlines()
    first = next(line for line in lines if line.startswith("cleanba_ppo  "))
    assert first.split() == [
        "cleanba_ppo",
        "one",
        "CartPole-v1",
        "2,048",
        "1/2",
        "s2",
        "running",
        "25%",
    ]
    second = next(line for line in lines if line.startswith("cleanba_ppo-sync"))
    assert "0/2" in second
    assert "failed" in second
    assert any("1:30" in line for line in lines)
