"""The launcher on studies whose runs write records without training, in this process."""

import errno
import shutil

import pytest
import submitit
from small_studies import NAMES, STUDY, statuses

from cleanba import record
from experiments import attempts, launch, pool

LONGER = STUDY.replace("2048", "4096")
ONE_RUN = STUDY.replace("[1, 2]", "[1]").replace('["cleanba_ppo", ', "[")


def records(folder):
    """Return the files of all records, and their contents."""
    return {path: path.read_bytes() for path in folder.glob("*__*/*.json*")}


def history(folder, name):
    return attempts.read(folder / "logs" / f"{name}.attempts.jsonl")


def test_every_run_of_a_study_is_run_and_leaves_record_log_and_attempt(study, outcome):
    printed = study.after("complete")
    assert statuses(study.folder) == dict.fromkeys(NAMES, "completed")
    for name in NAMES:
        log = (study.folder / "logs" / f"{name}.log").read_text()
        assert log.startswith("# ")
        assert "cores [" in log
        assert (study.folder / name / "log.txt").read_text() == log
        begun, ended = history(study.folder, name).events
        assert log[begun.log_bytes :].startswith("cores [")
        assert (ended.exit_code, ended.signal, ended.stopped) == (0, None, False)
    assert "4 of 4 runs completed" in printed
    assert "[4/4]" in printed  # readable if stdout is not a terminal
    assert "\x1b" not in printed


def test_the_same_file_runs_on_a_cluster(study, capsys):
    assert study("--cluster", "local", "--cluster-option", "timeout_min=10") == 0
    assert statuses(study.folder) == dict.fromkeys(NAMES, "completed")
    assert "4 of 4 runs completed" in capsys.readouterr().out
    assert {history(study.folder, name).end.exit_code for name in NAMES} == {0}


@pytest.mark.parametrize("where", [(), ("--cluster", "local")])
def test_no_more_runs_than_asked_for_are_active_at_once(study, monkeypatch, where):
    active, start = [], launch.start

    def watched(*args):
        for tick in start(*args):
            active.append(len(tick.active))
            yield tick

    monkeypatch.setattr(launch, "start", watched)
    assert study("--jobs", "1", *where) == 0
    assert max(active) == 1


def test_a_run_that_leaves_slurm_s_queue_completed_is_not_run_again(study, monkeypatch, capsys):
    study.after("complete")
    header = study.folder / NAMES[0] / "run.json"
    whole = header.read_bytes()
    header.write_bytes(whole.replace(b'"completed"', b'"running"'))
    events = study.folder / "logs" / f"{NAMES[0]}.attempts.jsonl"
    events.write_text(events.read_text().splitlines(keepends=True)[0])
    (study.folder / "logs" / f"{NAMES[0]}.job").write_text("4711")  # an earlier launcher's

    class Ending:
        """A job that completes its record at the moment when its state is queried."""

        def __init__(self, folder, job_id, tasks):
            assert job_id == "4711"

        def get_info(self, mode):
            header.write_bytes(whole)
            return {"State": "COMPLETED"}

    monkeypatch.setattr(submitit, "SlurmJob", Ending)
    monkeypatch.setattr(submitit, "AutoExecutor", None)  # nothing may be submitted
    slurm = launch.Cluster("slurm", {"timeout_min": 10})
    monkeypatch.setattr(launch, "find_cluster", lambda options: slurm)
    assert study("--cluster", "slurm") == 0
    assert "to run now: 0 runs" in capsys.readouterr().out


@pytest.mark.soak
def test_a_run_of_several_processes_is_trained_into_one_record(tmp_path):
    path = tmp_path / "two.toml"
    text = ONE_RUN.replace("cores = 1", "cores = 2\nprocesses = 2").replace("2048", "512")
    path.write_text(
        text.replace("num_envs = 8", "num_envs = 8\nnum_env_groups = 2\nnum_steps = 32")
    )
    assert launch.main([str(path), "--runs-dir", str(tmp_path / "runs")]) == 0
    (found,) = record.find_runs(tmp_path / "runs")
    run = record.read_run(found)
    assert run.completed
    assert run.info.hardware["num_processes"] == 2


def test_completed_runs_are_kept_and_skipped(study):
    study.after("complete")
    before = {path: path.stat().st_mtime_ns for path in study.folder.glob("*__*/*")}
    assert study() == 0
    assert study("--retry") == 0
    assert {path: path.stat().st_mtime_ns for path in study.folder.glob("*__*/*")} == before


def test_a_deleted_run_alone_is_run_again(study, capsys):
    study.after("complete")
    shutil.rmtree(study.folder / NAMES[0])
    for path in (study.folder / "logs").glob(f"{NAMES[0]}.*"):
        path.unlink()
    assert study() == 0
    assert "to run now: 1 runs" in capsys.readouterr().out
    assert statuses(study.folder) == dict.fromkeys(NAMES, "completed")


def test_a_dry_run_shows_the_plan_and_writes_nothing(study, capsys):
    assert study("--dry-run") == 0
    assert not study.folder.parent.exists()
    out = capsys.readouterr().out
    assert "4 runs, 8,192 steps" in out
    assert out.count("--total-timesteps 2048") == 4


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [
        ("", "its file does not give its duration"),
        ("minutes = 8", "about 8:00 on two cores"),
        ("minutes = 14_400", "about 10 days on two cores"),
    ],
)
def test_the_plan_says_how_long_it_takes(study, capsys, minutes, expected):
    text = STUDY.replace("[settings.one]", f"{minutes}\n[settings.one]", 1)
    assert study("--dry-run", text=text) == 0
    assert expected in capsys.readouterr().out


def test_the_plan_says_how_long_the_runs_that_are_left_take(study, capsys):
    study.after("complete")
    shutil.rmtree(study.folder / NAMES[0])
    (study.folder / f"logs/{NAMES[0]}.attempts.jsonl").unlink()
    text = STUDY.replace("[settings.one]", "minutes = 8\n[settings.one]", 1)
    assert study("--dry-run", text=text) == 0
    assert "about 2:00 on two cores" in capsys.readouterr().out  # one of four runs


def test_the_time_left_is_estimated_by_steps_and_not_by_runs(study, capsys):
    """Two runs of 2,048 steps are done, one of 10,240 is left of a study of 24 minutes: 10/14 of them."""
    study.after("complete")
    block = STUDY[STUDY.index("[[runs]]") :].replace('"cleanba_ppo", ', "")
    longer = block.replace("[1, 2]", "[3]").replace("2048", "10_240")
    text = STUDY[: STUDY.index("[[runs]]")].replace("[settings", "minutes = 24\n[settings", 1)
    assert study("--dry-run", text=text + block + longer) == 0
    out = capsys.readouterr().out
    assert "to run now: 1 runs, 10,240 steps" in out
    assert "about 17:09 on two cores" in out


def test_one_failing_run_does_not_stop_the_study_and_is_reported(study):
    printed = study.after("fail", fail_seed=1)
    found = statuses(study.folder)
    assert sorted(found.values()) == ["completed", "completed", "failed", "failed"]
    assert f"failed: {NAMES[0]}: ValueError: the actor [bold]thread[/bold] died" in printed
    assert "2 of 4 runs completed" in printed


def test_failed_runs_are_tried_again_only_on_request(study, capsys):
    study.after("fail", fail_seed=1)
    before = records(study.folder)
    assert study(behaviour="fail", fail_seed=1) == 1
    assert "to run now: 0 runs" in capsys.readouterr().out
    assert records(study.folder) == before
    assert study("--retry") == 0
    assert statuses(study.folder) == dict.fromkeys(NAMES, "completed")
    log = study.folder / "logs" / f"{NAMES[0]}.log"
    assert log.read_text().count("cores [") == 2  # the log of the first attempt is kept
    codes = [e.exit_code for e in history(study.folder, NAMES[0]).events[1::2]]
    assert codes == [1, 0]


def test_a_run_that_ends_without_a_record_is_reported_with_its_last_line(study, capsys):
    assert study(behaviour="refuse", text=ONE_RUN) == 1
    assert "error: there is no environment 'Nothing-v0'" in capsys.readouterr().out
    assert study(behaviour="refuse", text=ONE_RUN) == 1
    assert "to run now: 0 runs" in capsys.readouterr().out
    assert study("--retry", text=ONE_RUN) == 0


def test_a_killed_run_is_not_taken_for_a_completed_one(study, capsys):
    printed = study.after("killed")
    assert f"interrupted: {NAMES[1]}: killed before it could end its record" in printed
    assert "0 of 4 runs completed" in printed
    assert history(study.folder, NAMES[1]).end.signal == "SIGKILL"
    assert study(behaviour="killed", fail_seed=2) == 1  # runs both again, and one is killed again
    assert sorted(statuses(study.folder).values()) == [
        "completed",
        "completed",
        "running",
        "running",
    ]
    assert study() == 0


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("killed", "interrupted earlier, with another command: --total-timesteps "),
        ("fail", "failed earlier, with another command: --total-timesteps "),
        ("complete", "completed earlier, with another command: --total-timesteps "),
    ],
)
def test_the_records_of_another_command_are_neither_counted_nor_deleted(
    study, capsys, behaviour, message
):
    study.after(behaviour)
    before = records(study.folder)
    assert study("--retry", text=LONGER) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert message in out
    assert "0 of 4 runs completed" in out
    assert records(study.folder) == before


def test_a_completed_run_without_its_record_is_named_and_made_again_on_request(study, capsys):
    study.after("complete")
    shutil.rmtree(study.folder / NAMES[0])
    assert study() == 1
    assert f"failed: {NAMES[0]}: ended without an error, but its record is not there" in " ".join(
        capsys.readouterr().out.split()
    )
    assert study("--retry") == 0


def test_a_run_that_was_interrupted_by_hand_is_not_deleted(study, capsys):
    study.after("killed")
    (study.folder / "logs" / f"{NAMES[0]}.attempts.jsonl").unlink()  # no launcher started it
    before = records(study.folder / NAMES[0])
    assert study() == 1
    assert "by hand" in capsys.readouterr().out
    assert records(study.folder / NAMES[0]) == before
    assert list(statuses(study.folder).values()).count("completed") == 3


def test_a_damaged_file_of_attempts_is_named_and_stops_nothing(study, capsys):
    study.after("killed")
    torn, lost, half, whole = (study.folder / f"logs/{name}.attempts.jsonl" for name in NAMES)
    torn.write_bytes(torn.read_bytes()[:-9])  # as on a full disk
    lost.write_bytes(b"\xff\x00 not JSON\n")
    half.write_text("{}\n" + half.read_text())
    before = records(study.folder / NAMES[1])
    assert study() == 1
    out = capsys.readouterr().out
    assert f"warning: {NAMES[0]}: {torn}: damaged and ignored: line 2\n" in out
    assert f"warning: {NAMES[1]}: {lost}: damaged and ignored: line 1\n" in out
    assert f"warning: {NAMES[2]}: {half}: damaged and ignored: line 1\n" in out
    assert str(whole) not in out
    # Nothing says that a launcher started it, so it is not deleted.
    assert records(study.folder / NAMES[1]) == before
    completed = {name for name, status in statuses(study.folder).items() if status == "completed"}
    assert completed == {NAMES[0], *NAMES[2:]}
    assert len(history(study.folder, NAMES[0]).events) == 3  # begun; begun again, ended


def test_a_missing_module_costs_only_the_runs_that_need_it(study, capsys):
    assert study(behaviour="import", fail_seed=1) == 1
    assert statuses(study.folder) == dict.fromkeys(NAMES[1::2], "completed")
    out = capsys.readouterr().out
    assert "No module named 'a_module_that_is_not_installed'" in out
    assert "2 of 4 runs completed" in out


def test_a_full_disk_costs_only_the_run_that_met_it(study, monkeypatch, capsys):
    start = pool._start

    def fill(job, *rest, **others):
        if job.name == NAMES[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return start(job, *rest, **others)

    monkeypatch.setattr(pool, "_start", fill)
    assert study() == 1
    assert statuses(study.folder) == dict.fromkeys(NAMES[1:], "completed")
    assert "cannot be started: No space left on device" in capsys.readouterr().out


@pytest.mark.parametrize("attempts_too", [False, True])
def test_a_run_that_cannot_end_its_record_has_failed_and_is_tried_again_on_request(
    study, monkeypatch, capsys, attempts_too
):
    last_line = "OSError: [Errno 28] No space left on device"
    append = attempts.append

    def append_begin(path, event):
        if isinstance(event, attempts.Ended):
            raise OSError(errno.ENOSPC, "No space left on device")
        append(path, event)

    with monkeypatch.context() as patched:
        if attempts_too:  # the launcher cannot record how it ended, either
            patched.setattr(attempts, "append", append_begin)
        assert study(behaviour="full disk", text=ONE_RUN) == 1
    (name,) = statuses(study.folder)
    note = f"exit code 1: {last_line}" if attempts_too else last_line
    assert f"failed: {name}: {note}" in capsys.readouterr().out
    if attempts_too:
        return
    assert study(text=ONE_RUN) == 1
    out = capsys.readouterr().out
    assert "to run now: 0 runs" in out
    assert f"failed: {name}: {last_line}" in out
    assert study("--retry", text=ONE_RUN) == 0


def test_a_run_that_was_killed_before_its_record_began_is_begun_again(study):
    """Also if its folder exists already: nothing else is put into it."""
    (study.folder / NAMES[0]).mkdir(parents=True)
    attempts_file = study.folder / "logs" / f"{NAMES[0]}.attempts.jsonl"
    attempts_file.parent.mkdir()
    attempts.append(attempts_file, attempts.started(0))
    assert study(behaviour="import", fail_seed=1) == 1
    assert not list((study.folder / NAMES[0]).iterdir())
    assert len(history(study.folder, NAMES[0]).events) == 3
    assert study("--retry") == 0
    assert statuses(study.folder) == dict.fromkeys(NAMES, "completed")


def test_an_interrupted_run_that_cannot_be_resumed_has_failed(study, capsys):
    study.after("killed")
    assert study(behaviour="refuse") == 1  # as `--resume` does if versions differ
    assert f"failed: {NAMES[0]}: error: there is no environment" in capsys.readouterr().out
    assert study() == 1
    assert "to run now: 0 runs" in capsys.readouterr().out
    assert study("--retry") == 0


def test_records_of_another_study_of_the_same_name_are_left_alone(study, capsys):
    study.after("complete")
    before = (study.folder / "study.toml").read_bytes()
    assert study(text=STUDY.replace("A study", "Another")) == 2
    err = capsys.readouterr().err
    assert "holds the records of another study, 'A study': choose another --runs-dir" in err
    assert err.count("\n") == 1
    assert (study.folder / "study.toml").read_bytes() == before
    (study.folder / "study.toml").write_text("title = 'A study'")
    assert study() == 2
    err = capsys.readouterr().err
    assert "study.toml: Object missing required field `question`" in err
    assert err.count("\n") == 1
    assert (study.folder / "study.toml").read_text() == "title = 'A study'"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quickstrat"], "did you mean quickstart"),
        (["nothing.toml"], "no study file"),
        ([], "STUDY"),
        (["quickstart", "--jobs", "0"], "--jobs 0: must be 1 or more"),
        (["quickstart", "--retyr"], "--retry"),
        (["quickstart", "--preset", "huge"], "has no preset 'huge'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, words, message):
    assert launch.main(words) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_runs_dir_that_is_a_file_is_one_line_and_exit_code_2(study, capsys):
    study.folder.parent.write_text("")
    assert study() == 2
    assert capsys.readouterr().err.count("\n") == 1
