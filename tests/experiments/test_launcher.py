import contextlib
import errno
import fcntl
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import submitit
import synthetic_runs
from rich.console import Console
from rich.text import Text

from cleanba import record
from experiments import display, launch, pool, state, systems
from experiments.state import State, Status
from experiments.study import load_study

pytestmark = pytest.mark.usefixtures("compiled_once")

HERE = Path(__file__).parent

STUDY = """
title = "A study"
question = "Is it?"
[settings.one]
num_actor_threads = 1
actor_device_ids = [0]
learner_device_ids = [0]
host_devices = 1
cores = 1
[[runs]]
systems = ["cleanba_ppo", "cleanba_ppo-sync"]
settings = ["one"]
env_ids = ["CartPole-v1"]
seeds = [1, 2]
total_timesteps = 2048
[runs.hyperparameters]
num_envs = 8
"""
NAMES = [f"cleanba_ppo{a}__one__CartPole-v1__s{s}" for a in ("", "-sync") for s in (1, 2)]


@pytest.fixture
def synthetic(monkeypatch):
    """Both PPO systems are the program that writes records without training."""
    script = str(HERE / "synthetic_runs.py")
    for name in ("cleanba_ppo", "cleanba_ppo-sync"):
        entry = systems.System(name, script, systems.cleanba_arguments)
        monkeypatch.setitem(systems.SYSTEMS, name, entry)


@pytest.fixture
def study(tmp_path, synthetic, monkeypatch):
    """Writes the study file, and runs the launcher on it, with runs of some behaviour."""

    def run(*options, behaviour="complete", fail_seed="", text=STUDY):
        path = tmp_path / "small.toml"
        path.write_text(text)
        monkeypatch.setenv("SYNTHETIC_BEHAVIOUR", behaviour)
        monkeypatch.setenv("SYNTHETIC_FAIL_SEED", str(fail_seed))
        return launch.main([str(path), "--runs-dir", str(tmp_path / "runs"), *options])

    run.folder = tmp_path / "runs" / "small"
    return run


def statuses(folder):
    return {path.name: record.read_run(path).info["status"] for path in record.find_runs(folder)}


def test_every_run_of_a_study_is_run_and_leaves_record_and_log(study, capsys):
    assert study() == 0
    assert statuses(study.folder) == dict.fromkeys(NAMES, "completed")
    for name in NAMES:
        log = (study.folder / "logs" / f"{name}.log").read_text()
        assert log.startswith("# ")
        assert "cores [" in log
        assert (study.folder / name / "log.txt").read_text() == log
    out = capsys.readouterr().out
    assert "4 of 4 runs completed" in out
    assert "[4/4]" in out  # readable where stdout is no terminal
    assert "\x1b" not in out


def test_the_same_file_runs_on_a_cluster(study, capsys):
    assert study("--cluster", "local", "--cluster-option", "timeout_min=10") == 0
    assert statuses(study.folder) == dict.fromkeys(NAMES, "completed")
    assert "4 of 4 runs completed" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        study("--cluster", "local", "--cluster-option", "timeout")


def test_a_run_that_leaves_slurm_s_queue_completed_is_not_run_again(study, monkeypatch, capsys):
    assert study() == 0
    header = study.folder / NAMES[0] / "run.json"
    whole = header.read_bytes()
    header.write_bytes(whole.replace(b'"completed"', b'"running"'))
    log = study.folder / "logs" / f"{NAMES[0]}.log"
    log.write_text(log.read_text().rsplit("# ended", 1)[0])
    log.with_suffix(".job").write_text("4711")  # an earlier launcher's

    class Ending:
        """A job that completes its record just as somebody asks after it."""

        def __init__(self, folder, job_id, tasks):
            assert job_id == "4711"

        def get_info(self, mode):
            header.write_bytes(whole)
            return {"State": "COMPLETED"}

    monkeypatch.setattr(submitit, "SlurmJob", Ending)
    monkeypatch.setattr(submitit, "AutoExecutor", None)  # nothing may be submitted
    monkeypatch.setattr(launch, "check_cluster", lambda options: None)
    capsys.readouterr()
    assert study("--cluster", "slurm", "--cluster-option", "timeout_min=10") == 0
    assert "to run now: 0 runs" in capsys.readouterr().out


def test_a_run_of_several_processes_is_one_record_with_the_bits_of_one_process(tmp_path):
    two = STUDY.replace("settings.one", "settings.two").replace('["one"]', '["two"]')
    two = two.replace("cores = 1", "cores = 2\nprocesses = 2")
    prints = []
    for name, text in (("one", STUDY), ("two", two)):
        path = tmp_path / f"{name}.toml"
        text = text.replace("[1, 2]", "[1]").replace('["cleanba_ppo", ', "[")
        path.write_text(text.replace("num_envs = 8", "num_envs = 8\nnum_env_groups = 2"))
        assert launch.main([str(path), "--runs-dir", str(tmp_path / "runs")]) == 0
        (found,) = record.find_runs(tmp_path / "runs" / name)
        run = record.read_run(found)
        assert run.info["hardware"]["num_processes"] == (2 if name == "two" else 1)
        prints.append([row["fingerprint"] for row in run.lines("updates")])
    assert prints[0] == prints[1]
    assert any(prints[0])


def test_completed_runs_are_kept_and_skipped(study):
    assert study() == 0
    before = {path: path.stat().st_mtime_ns for path in study.folder.glob("*/*")}
    assert study() == 0
    assert study("--retry") == 0
    assert {path: path.stat().st_mtime_ns for path in study.folder.glob("*/*")} == before


def test_a_deleted_run_alone_is_run_again(study, capsys):
    study()
    shutil.rmtree(study.folder / NAMES[0])
    (study.folder / "logs" / f"{NAMES[0]}.log").unlink()
    capsys.readouterr()
    assert study() == 0
    assert "to run now: 1 runs" in capsys.readouterr().out


def test_a_dry_run_shows_the_plan_and_writes_nothing(study, capsys):
    assert study("--dry-run") == 0
    assert not study.folder.parent.exists()
    out = capsys.readouterr().out
    assert "4 runs, 8,192 steps" in out
    assert out.count("--total-timesteps 2048") == 4


def test_the_plan_says_how_long_what_is_left_will_take(tmp_path, synthetic, capsys):
    path = tmp_path / "small.toml"
    words = [str(path), "--runs-dir", str(tmp_path / "runs"), "--dry-run"]
    path.write_text(STUDY)
    assert launch.main(words) == 0
    assert "its file does not say how long" in capsys.readouterr().out
    path.write_text(STUDY.replace("[settings.one]", "minutes = 8\n[settings.one]", 1))
    assert launch.main(words) == 0
    assert "about 8:00 on two cores" in capsys.readouterr().out
    path.write_text(STUDY.replace("[settings.one]", "minutes = 14_400\n[settings.one]", 1))
    assert launch.main(words) == 0
    assert "about 10 days on two cores" in capsys.readouterr().out
    path.write_text(STUDY.replace("[settings.one]", "minutes = 8\n[settings.one]", 1))
    assert launch.main(words[:-1]) == 0
    shutil.rmtree(tmp_path / "runs/small" / NAMES[0])
    (tmp_path / f"runs/small/logs/{NAMES[0]}.log").unlink()
    capsys.readouterr()
    assert launch.main(words) == 0
    assert "about 2:00 on two cores" in capsys.readouterr().out  # one of four runs


def test_one_failing_run_does_not_stop_the_study_and_is_reported(study, capsys):
    assert study(behaviour="fail", fail_seed=1) == 1
    found = statuses(study.folder)
    assert sorted(found.values()) == ["completed", "completed", "failed", "failed"]
    out = capsys.readouterr().out
    assert f"failed: {NAMES[0]}: ValueError: the actor [bold]thread[/bold] died" in out
    assert "2 of 4 runs completed" in out


def test_failed_runs_are_tried_again_only_on_request(study, capsys):
    study(behaviour="fail", fail_seed=1)
    first = record.read_run(study.folder / NAMES[0]).info["started"]
    capsys.readouterr()
    assert study(behaviour="fail", fail_seed=1) == 1
    assert "to run now: 0 runs" in capsys.readouterr().out
    assert record.read_run(study.folder / NAMES[0]).info["started"] == first
    assert study("--retry") == 0
    assert statuses(study.folder) == dict.fromkeys(NAMES, "completed")
    log = (study.folder / "logs" / f"{NAMES[0]}.log").read_text()
    assert log.count("# ended with exit code") == 2  # the log of the first try is kept


def test_a_run_that_ends_without_a_record_is_reported_with_its_last_words(study, capsys):
    assert study(behaviour="refuse") == 1
    assert "error: there is no environment 'Nothing-v0'" in capsys.readouterr().out
    assert study(behaviour="refuse") == 1
    assert "to run now: 0 runs" in capsys.readouterr().out
    assert study("--retry") == 0


def test_a_killed_run_is_not_taken_for_a_completed_one(study, capsys):
    assert study(behaviour="killed", fail_seed=2) == 1
    out = capsys.readouterr().out
    assert f"interrupted: {NAMES[1]}: killed before it could end its record" in out
    assert "2 of 4 runs completed" in out
    assert study(behaviour="killed", fail_seed=2) == 1  # it is tried again, and killed again
    assert study() == 0


def test_what_another_command_has_left_unfinished_is_not_deleted(study, capsys):
    assert study(behaviour="killed") == 1
    before = {path: path.read_bytes() for path in study.folder.glob("*/*.json*")}
    longer = STUDY.replace("2048", "4096")
    capsys.readouterr()
    assert study("--retry", text=longer) == 1
    assert "another command" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in study.folder.glob("*/*.json*")} == before


def test_a_completed_run_of_another_command_is_neither_counted_nor_deleted(study, capsys):
    assert study() == 0
    before = (study.folder / NAMES[0] / "run.json").read_bytes()
    longer = STUDY.replace("2048", "4096")
    assert study("--retry", text=longer) == 1
    assert "0 of 4 runs completed" in capsys.readouterr().out
    assert (study.folder / NAMES[0] / "run.json").read_bytes() == before


def test_a_missing_module_costs_the_runs_that_need_it_alone(study, capsys):
    assert study(behaviour="import", fail_seed=1) == 1
    assert statuses(study.folder) == dict.fromkeys(NAMES[1::2], "completed")
    out = capsys.readouterr().out
    assert "No module named 'a_module_that_is_not_installed'" in out
    assert "2 of 4 runs completed" in out


def test_a_full_disk_costs_the_run_that_met_it_alone(study, monkeypatch, capsys):
    start = pool._start

    def fill(job, *rest, **others):
        if job.name == NAMES[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return start(job, *rest, **others)

    monkeypatch.setattr(pool, "_start", fill)
    assert study() == 1
    assert statuses(study.folder) == dict.fromkeys(NAMES[1:], "completed")
    assert "cannot be started: No space left on device" in capsys.readouterr().out


@pytest.mark.parametrize("log_too", [False, True])
def test_a_run_that_cannot_end_its_record_has_failed_and_is_tried_again_on_request(
    study, monkeypatch, capsys, log_too
):
    said = "OSError: [Errno 28] No space left on device"
    with monkeypatch.context() as patched:
        if log_too:  # the launcher finds no room for a word about its end, either
            patched.setattr(pool, "_note", lambda *_: None)
        assert study(behaviour="full disk", fail_seed=1) == 1
    assert (
        f"failed: {NAMES[0]}: {'exit code 1: ' if log_too else ''}{said}" in capsys.readouterr().out
    )
    if log_too:
        return
    assert study() == 1
    out = capsys.readouterr().out
    assert "to run now: 0 runs" in out
    assert f"failed: {NAMES[0]}: {said}" in out
    assert study("--retry") == 0


@pytest.mark.parametrize(("code", "how"), [(1, "--resume"), (2, "--overwrite"), (-9, "--resume")])
def test_what_failed_for_want_of_room_goes_on_from_its_checkpoint(tmp_path, code, how):
    (tmp_path / "small.toml").write_text(STUDY)
    run = load_study(tmp_path / "small.toml").runs[0]
    folder, log = state.run_dir(run, tmp_path), state.log_file(run, tmp_path)
    command = systems.command(run, tmp_path)
    synthetic_runs.write_run(folder, status="running", steps=5_120, command=command)
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(info | {"checkpoint_every": 2}))
    log.parent.mkdir()
    log.write_text(f"# now\nerror: no room\n{pool.ENDED} with exit code {code}\n")
    status = state.inspect(run, tmp_path)
    assert status.state is (State.INTERRUPTED if code < 0 else State.FAILED)
    assert code < 0 or status.note == "error: no room"
    assert state.how_again(status) == how


def test_a_run_that_was_killed_before_its_record_began_is_begun_again(study):
    """Also where its folder is there already: nothing is put into it that is no record."""
    (study.folder / NAMES[0]).mkdir(parents=True)
    (study.folder / "logs").mkdir()
    (study.folder / "logs" / f"{NAMES[0]}.log").write_text("# now\n")
    assert study(behaviour="import", fail_seed=1) == 1
    assert not list((study.folder / NAMES[0]).iterdir())
    assert study("--retry") == 0
    assert statuses(study.folder) == dict.fromkeys(NAMES, "completed")


def test_records_of_another_study_of_the_same_name_are_left_alone(study, capsys):
    assert study() == 0
    before = (study.folder / "study.toml").read_bytes()
    capsys.readouterr()
    assert study(text=STUDY.replace("A study", "Another")) == 2
    err = capsys.readouterr().err
    assert "holds the records of another study, 'A study': choose another --runs-dir" in err
    assert err.count("\n") == 1
    assert (study.folder / "study.toml").read_bytes() == before
    (study.folder / "study.toml").write_text("title = 1")
    assert study() == 2
    assert "study.toml: the study lacks 'question'" in capsys.readouterr().err
    assert (study.folder / "study.toml").read_text() == "title = 1"


def test_progress_is_the_last_whole_line_of_a_long_record(tmp_path, synthetic):
    (tmp_path / "small.toml").write_text(STUDY)
    run = load_study(tmp_path / "small.toml").runs[0]
    folder = state.run_dir(run, tmp_path)
    assert state.steps_done(run, tmp_path) == 0
    synthetic_runs.write_run(
        folder, status="running", steps=2 * 512 * 1_000
    )  # several blocks of it
    assert (folder / "updates.jsonl").stat().st_size > 3 * record.TAIL_BYTES
    assert state.steps_done(run, tmp_path) == 512_000
    with (folder / "updates.jsonl").open("a") as file:
        file.write("9" * (record.TAIL_BYTES - 9))  # torn; the last line's end is in the last block
        file.flush()
        assert state.steps_done(run, tmp_path) == 512_000
        file.write("9" * 9)
    assert state.steps_done(run, tmp_path) == 512_000
    (folder / "updates.jsonl").write_text('{"step": 1}\n')
    assert state.steps_done(run, tmp_path) == 1
    for damaged in ('{"step": 1', "3\n", "}\n"):
        (folder / "updates.jsonl").write_text(damaged)
        assert state.steps_done(run, tmp_path) == 0


def test_on_a_terminal_a_table_shows_where_the_study_stands(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(STUDY)
    study = load_study(path)
    states = (State.COMPLETED, State.RUNNING, State.FAILED, State.TO_DO)
    found = {run.name: Status(one) for run, one in zip(study.runs, states, strict=True)}
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with display.open_display(console) as shown:
        assert shown.is_due()
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


def test_a_failed_run_of_another_command_is_not_deleted(study, capsys):
    assert study(behaviour="fail") == 1
    before = {path: path.read_bytes() for path in study.folder.glob("*/*.json*")}
    longer = STUDY.replace("2048", "4096")
    capsys.readouterr()
    assert study("--retry", text=longer) == 1
    assert "failed earlier, with another command" in " ".join(capsys.readouterr().out.split())
    assert {path: path.read_bytes() for path in study.folder.glob("*/*.json*")} == before


def test_what_was_interrupted_by_hand_is_not_deleted(study, capsys):
    assert study(behaviour="killed") == 1
    log = study.folder / "logs" / f"{NAMES[0]}.log"
    log.unlink()  # as if the launcher had not started it
    before = (study.folder / NAMES[0] / "updates.jsonl").read_bytes()
    capsys.readouterr()
    assert study() == 1
    assert "by hand" in capsys.readouterr().out
    assert (study.folder / NAMES[0] / "updates.jsonl").read_bytes() == before
    assert list(statuses(study.folder).values()).count("completed") == 3


def test_an_interrupted_run_that_cannot_go_on_has_failed(study, capsys):
    assert study(behaviour="killed") == 1
    assert study(behaviour="refuse") == 1  # as `--resume` does where versions differ
    assert f"failed: {NAMES[0]}: error: there is no environment" in capsys.readouterr().out
    assert study() == 1
    assert "to run now: 0 runs" in capsys.readouterr().out
    assert study("--retry") == 0


def test_runs_at_work_have_cores_of_their_own(tmp_path):
    sleep = [sys.executable, "-c", "import time; time.sleep(0.4)"]
    jobs = [pool.Job(str(n), sleep, tmp_path / f"{n}.log", cores=n) for n in (1, 2, 1, 9)]
    cores = pool.available_cores()[:2]
    together = set()
    for tick in pool.run_jobs(jobs, cores, at_once=9):
        given = [core for one in tick.active for core in one.cores]
        assert len(given) == len(set(given)) <= len(cores)
        for one in tick.active:
            assert os.sched_getaffinity(one.process.pid) == set(one.cores)
        together.add(len(tick.active))
    assert max(together) == len(cores)
    assert os.sched_getaffinity(0) >= set(cores)


def test_runs_at_work_have_gpus_of_their_own_and_see_no_others(tmp_path, monkeypatch):
    see = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(0.4)"
    command = [sys.executable, "-c", see]
    jobs = [
        pool.Job(str(n), command, tmp_path / f"{n}.log", cores=1, gpus=gpus)
        for n, gpus in enumerate((1, 2, 1, 0, 9))
    ]
    seen, together, refused = {}, set(), []
    for tick in pool.run_jobs(jobs, (0,) * 5, at_once=9, gpus=("3", "5")):
        refused += [one for one in tick.ended if one.exit_code is None]
        given = [gpu for one in tick.active for gpu in one.gpus]
        assert len(given) == len(set(given))
        together.add(frozenset(one.job.name for one in tick.active))
        seen |= {one.job.name: one.gpus for one in tick.active}
    assert [len(seen[job.name]) for job in jobs[:4]] == [1, 2, 1, 0]
    assert [(one.job, one.error) for one in refused] == [
        (jobs[4], "cannot be started: it needs 9 GPUs, and there are 2")
    ]
    assert frozenset("023") in together  # two with a GPU each, one with none
    for job in jobs[:4]:
        assert job.log.read_text().splitlines()[1] == ",".join(seen[job.name])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "left alone")  # where there is none to give
    list(pool.run_jobs(jobs[:1], (0,), at_once=1))
    assert "left alone" in jobs[0].log.read_text()


def test_the_gpus_of_this_machine_are_those_that_cuda_may_use(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert pool.available_gpus() == ()  # no driver
    driver = tmp_path / "nvidia-smi"
    driver.write_text(
        '#!/bin/sh\n[ "$*" = "--query-gpu=index --format=csv,noheader" ] && echo 0 && echo 1\n'
    )
    driver.chmod(0o755)
    assert pool.available_gpus() == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, GPU-8f")
    assert pool.available_gpus() == ("1", "GPU-8f")
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert pool.available_gpus() == ()


def test_a_command_that_cannot_be_started_costs_one_run(tmp_path):
    jobs = [
        pool.Job("missing", [str(tmp_path / "nothing")], tmp_path / "a.log", 1),
        pool.Job("present", [sys.executable, "-c", ""], tmp_path / "b.log", 1),
    ]
    ended = [end for tick in pool.run_jobs(jobs, (0,), at_once=1) for end in tick.ended]
    assert [(end.job.name, end.exit_code) for end in ended] == [("missing", None), ("present", 0)]


LAUNCH = """
import sys
from experiments import launch, systems
for name in ("cleanba_ppo", "cleanba_ppo-sync"):
    systems.SYSTEMS[name] = systems.System(name, {script!r}, systems.cleanba_arguments)
sys.exit(launch.main(sys.argv[1:]))
"""


def start_launcher(tmp_path, behaviour):
    path = tmp_path / "small.toml"
    path.write_text(STUDY)
    code = LAUNCH.format(script=str(HERE / "synthetic_runs.py"))
    words = [sys.executable, "-c", code, str(path), "--runs-dir", str(tmp_path / "runs")]
    environment = os.environ | {"SYNTHETIC_BEHAVIOUR": behaviour, "SYNTHETIC_FAIL_SEED": ""}
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1], env=environment
    )


def wait_for_running(folder):
    """Wait until the runs that a launcher has begun have written their few lines, and sleep."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        logs = [path.read_text() for path in folder.glob("logs/*.log")]
        if logs and all("asleep" in log for log in logs):
            return
        time.sleep(0.1)
    raise AssertionError("the runs did not start")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_launcher_ends_its_runs_and_can_be_started_again(tmp_path, study, number):
    launcher = start_launcher(tmp_path, "slow")
    wait_for_running(study.folder)
    launcher.send_signal(number)
    out, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number
    assert "stopped" in out
    assert set(statuses(study.folder).values()) == {"interrupted"}
    assert study() == 0  # runs what was not started, and again what was interrupted
    assert statuses(study.folder) == dict.fromkeys(NAMES, "completed")


def test_a_run_that_was_stopped_before_its_record_began_is_still_to_do(tmp_path, study, capsys):
    launcher = start_launcher(tmp_path, "late")
    deadline = time.monotonic() + 30
    while not list(study.folder.glob("logs/*.log")) and time.monotonic() < deadline:
        time.sleep(0.1)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=30)
    assert statuses(study.folder) == {}
    assert study() == 0
    assert "to run now: 4 runs" in capsys.readouterr().out


def test_a_run_that_was_killed_with_its_launcher_before_its_record_began_is_still_to_do(
    tmp_path, study, capsys
):
    launcher = start_launcher(tmp_path, "late")
    deadline = time.monotonic() + 30
    while not list(study.folder.glob("logs/*.log")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.3)
    runs = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    for run in runs:
        run.kill()
    launcher.communicate(timeout=30)
    assert statuses(study.folder) == {}
    assert study() == 0
    assert "to run now: 4 runs" in capsys.readouterr().out


def test_after_a_killed_launcher_the_next_one_waits_for_the_runs_it_left_behind(tmp_path, study):
    launcher = start_launcher(tmp_path, "slow")
    wait_for_running(study.folder)
    orphans = psutil.Process(launcher.pid).children()
    launcher.kill()
    launcher.communicate()
    with open(study.folder / ".launch.lock") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second = start_launcher(tmp_path, "slow")
    assert "waiting for them to end" in second.stdout.readline()
    begun = psutil.Process(second.pid).children
    time.sleep(1.0)  # several looks at the lock
    assert not begun()
    for orphan in orphans:
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()
    deadline = time.monotonic() + 30
    while not begun() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert begun()
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=30)
    assert study() == 0
    assert statuses(study.folder) == dict.fromkeys(NAMES, "completed")


@pytest.mark.parametrize(
    ("words", "message"),
    [(["quickstrat"], "did you mean quickstart"), (["nothing.toml"], "no study file")],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, words, message):
    assert launch.main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_runs_dir_that_is_a_file_is_one_line_and_exit_code_2(tmp_path, synthetic, capsys):
    (tmp_path / "small.toml").write_text(STUDY)
    (tmp_path / "file").write_text("")
    assert launch.main([str(tmp_path / "small.toml"), "--runs-dir", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


TRAINED = """
title = "Real training"
question = "Which runs are there in the end?"
[settings."a0-l0-t1"]
num_actor_threads = 1
actor_device_ids = [0]
learner_device_ids = [0]
host_devices = 1
cores = 1
[[runs]]
systems = ["cleanba_ppo", "cleanba_impala-sync"]
settings = ["a0-l0-t1"]
env_ids = ["CartPole-v1"]
seeds = [1, 2]
total_timesteps = 40_960
[runs.hyperparameters]
num_envs = 8
num_env_groups = 2
num_steps = 32
fingerprint_every = 1
"""


def test_a_launcher_that_is_killed_at_random_leaves_what_an_undisturbed_one_does(tmp_path):
    """Killed five times: alone, with its runs, or told to stop; what is interrupted goes on."""
    path = tmp_path / "trained.toml"
    path.write_text(TRAINED)
    rng = random.Random(6)

    def words(name):
        folder = tmp_path / name
        return [sys.executable, "-m", "experiments.launch", str(path), "--runs-dir", str(folder)]

    def saved_since(begin):
        for path in (tmp_path / "killed").glob("*/*/checkpoints/*"):
            with contextlib.suppress(FileNotFoundError):  # an old one, deleted just now
                yield path.stat().st_mtime > begin

    def prints(name):
        folders = record.find_runs(tmp_path / name)
        runs = {folder.name: record.read_run(folder) for folder in folders}
        assert all(run.completed for run in runs.values())
        return {n: [u["fingerprint"] for u in r.lines("updates")] for n, r in runs.items()}

    root = HERE.parents[1]
    done = subprocess.run(words("quiet"), cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    resumed = 0
    for kind in ("all", "told", "all", "all", "alone"):
        begin = time.time()
        launcher = subprocess.Popen(
            words("killed"), cwd=root, stdout=subprocess.DEVNULL, start_new_session=True
        )
        # most of the time is start-up: where the runs are killed too, one has made a checkpoint
        deadline = time.monotonic() + (60 if kind == "all" else rng.uniform(4.0, 9.0))
        while time.monotonic() < deadline and launcher.poll() is None:
            if kind == "all" and any(saved_since(begin)):
                break
            time.sleep(0.05)
        time.sleep(rng.uniform(0.0, 0.3))
        children = psutil.Process(launcher.pid).children(recursive=True) if kind == "all" else []
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGTERM if kind == "told" else signal.SIGKILL)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        launcher.wait(timeout=60)
    done = subprocess.run(words("killed"), cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert prints("killed") == prints("quiet")
    logs = list((tmp_path / "killed").glob("*/*/log.txt"))
    assert len(logs) == len(record.find_runs(tmp_path / "killed"))
    for folder in record.find_runs(tmp_path / "killed"):
        resumed += len(record.read_run(folder).info.get("resumed", []))
    assert resumed  # from a checkpoint, not from the start
