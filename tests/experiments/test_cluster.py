"""Studies on a cluster: submitit's local executor replaces Slurm where possible."""

import os
import sys
import time
from functools import partial

import pytest
import submitit

from experiments import attempts, cluster, launch, pool
from experiments.study import StudyError

SLURM = cluster.Cluster("slurm", {})
LOCAL = cluster.Cluster("local", {})
TWO_RANKS = "import os; print(os.environ['SUBMITIT_LOCAL_GLOBALID']); raise SystemExit({code})"


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(cluster, "POLL_SECONDS", 0.05)


def job(tmp_path, name, program, **more):
    log = tmp_path / "logs" / f"{name}.log"
    return pool.Job(name, [sys.executable, "-c", program], log, 1, **more)


def run(jobs, at_once=8):
    ended, most = {}, 0
    for tick in cluster.run_jobs(jobs, LOCAL, at_once):
        ended |= {one.job.name: one for one in tick.ended}
        most = max(most, len(tick.active))
    return ended, most


def test_jobs_end_with_their_exit_codes_and_leave_logs(tmp_path):
    jobs = [
        job(tmp_path, "good", "print('hello')"),
        job(tmp_path, "bad", "import sys; print('a word'); sys.exit(3)"),
        job(tmp_path, "killed", "import os; os.kill(os.getpid(), 9)"),
    ]
    ended, most = run(jobs, at_once=2)
    assert {name: one.exit_code for name, one in ended.items()} == {
        "good": 0,
        "bad": 3,
        "killed": -9,
    }
    assert most == 2
    begin, spoken = (tmp_path / "logs" / "bad.log").read_text().splitlines()
    assert begin.startswith("# 2")
    assert spoken == "a word"
    found = [attempts.read(one.attempts).end for one in jobs]
    assert [(end.exit_code, end.signal) for end in found] == [
        (0, None),
        (3, None),
        (None, "SIGKILL"),
    ]
    assert not list(tmp_path.rglob("*.job"))


def test_a_job_of_several_processes_is_as_many_tasks_with_one_log(tmp_path):
    program = TWO_RANKS.format(code="int(os.environ['SUBMITIT_LOCAL_GLOBALID']) * 5")
    two = job(tmp_path, "two", program, processes=2)
    ended, _ = run([two])
    assert ended["two"].exit_code == 5  # of either task
    assert len(attempts.read(two.attempts).events) == 2  # begun and ended, once
    lines = (tmp_path / "logs" / "two.log").read_text().splitlines()
    assert sorted(line for line in lines if not line.startswith("#")) == ["0", "1"]
    assert sum(line.startswith("# 2") for line in lines) == 1


def test_closing_cancels_what_is_in_the_queue(tmp_path):
    pid = tmp_path / "pid"
    program = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    long = job(tmp_path, "long", program)
    ticks = cluster.run_jobs([long], LOCAL, 1)
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()):
        next(ticks)
        assert time.monotonic() < deadline
    ticks.close()
    while True:
        try:
            os.kill(int(pid.read_text()), 0)
        except ProcessLookupError:
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert attempts.read(long.attempts).end.stopped


class Queued:
    """A job of Slurm that another launcher submitted; it ends after two looks at it."""

    def __init__(self, folder, job_id, tasks, state="PENDING"):
        self.job_id, self.tasks, self.state = job_id, tasks, state
        self.looks = 0

    def get_info(self, mode):
        return {"State": self.state}

    def done(self, force_check=False):
        self.looks += 1
        return self.looks > 1

    def results(self):
        return [0 for _ in self.tasks]


@pytest.mark.parametrize("state", ["UNKNOWN", "FAILED"])
def test_a_job_that_slurm_has_forgotten_or_ended_is_submitted_again(tmp_path, monkeypatch, state):
    monkeypatch.setattr(submitit, "SlurmJob", partial(Queued, state=state))
    monkeypatch.setattr(submitit, "AutoExecutor", Refusing)
    one = job(tmp_path, "old", "never")
    one.log.parent.mkdir()
    cluster.job_id_file(one).write_text("4711")
    ticks = list(cluster.run_jobs([one], SLURM, 1, cluster.in_queue([one], SLURM)))
    assert ticks[0].ended[0].error == "cannot be submitted: no such partition"


@pytest.mark.parametrize(
    ("sacct", "known"), [(None, False), ("echo down >&2; exit 1", False), ("exit 0", True)]
)
def test_a_job_is_taken_for_forgotten_only_where_slurm_answers(tmp_path, monkeypatch, sacct, known):
    """submitit returns nothing of a job, also if sacct fails."""
    monkeypatch.setattr(Queued, "get_info", lambda *_, **__: {})
    monkeypatch.setattr(submitit, "SlurmJob", Queued)
    monkeypatch.setenv("PATH", str(tmp_path))
    if sacct:
        (tmp_path / "sacct").write_text(f"#!/bin/sh\n{sacct}\n")
        (tmp_path / "sacct").chmod(0o755)
    one = job(tmp_path, "old", "never")
    one.log.parent.mkdir()
    cluster.job_id_file(one).write_text("4711")
    if known:
        assert launch.in_queue([one], SLURM) == {}
    else:
        with pytest.raises(StudyError, match="cannot tell what is in Slurm's queue: sacct"):
            launch.in_queue([one], SLURM)


def test_a_job_still_in_slurm_s_queue_is_waited_for_and_not_submitted_again(tmp_path, monkeypatch):
    monkeypatch.setattr(submitit, "SlurmJob", Queued)
    monkeypatch.setattr(submitit, "AutoExecutor", None)  # nothing may be submitted
    one = job(tmp_path, "queued", "never", processes=2)
    one.log.parent.mkdir()
    cluster.job_id_file(one).write_text("4711")
    ticks = list(cluster.run_jobs([one], SLURM, 1, cluster.in_queue([one], SLURM)))
    assert [tick.active[0].handle.job_id for tick in ticks if tick.active] == ["4711"]
    assert ticks[-1].ended[0].exit_code == 0
    assert not cluster.job_id_file(one).exists()


def test_runs_in_a_queue_are_not_started_here_besides(tmp_path):
    one = job(tmp_path, "queued", "never")
    one.log.parent.mkdir()
    cluster.job_id_file(one).write_text("4711")
    for where in (None, LOCAL):
        with pytest.raises(StudyError, match="queued was submitted to Slurm: use --cluster slurm"):
            launch.start([one], where, None, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster-option", "timeout_min=10"], "--cluster-option needs --cluster"),
        (["--cluster", "local", "--cluster-option", "timeout"], "must be NAME=VALUE"),
        (["--cluster", "slrum"], "--cluster"),
        (["--cluster", "local", "--cluster-option", "timeut_min=10"], "--cluster-option: "),
        (["--cluster", "local", "--cluster-option", "timeout_min=10h"], "--cluster-option: "),
        (["--cluster", "local", "--cluster-option", "nodes=2"], "--cluster-option: "),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2_before_anything_is_written(
    tmp_path, capsys, words, message
):
    assert launch.main(["learning", "--runs-dir", str(tmp_path / "runs"), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_slurm_needs_a_time_limit(tmp_path, monkeypatch, capsys):
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["learning", "--runs-dir", str(tmp_path / "runs"), "--cluster", "slurm"]
    assert launch.main(words) == 2
    assert "Slurm needs a time limit" in capsys.readouterr().err
    assert launch.main([*words, "--cluster-option", "timeout_min=60", "--dry-run"]) == 0


def test_without_slurm_nothing_is_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    words = ["learning", "--runs-dir", str(tmp_path), "--cluster", "slurm"]
    assert launch.main(words) == 2
    assert capsys.readouterr().err == "error: --cluster slurm: there is no srun on this machine\n"


class Refusing:
    """An executor whose cluster takes no job."""

    def __init__(self, folder, cluster):
        pass

    def update_parameters(self, **parameters):
        pass

    def submit(self, command):
        raise submitit.core.utils.FailedJobError("sbatch: error\nno such partition")


def test_a_job_that_is_refused_costs_itself_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(submitit, "AutoExecutor", Refusing)
    ended, _ = run([job(tmp_path, name, "1") for name in ("one", "two")])
    assert [one.exit_code for one in ended.values()] == [None, None]
    assert ended["one"].error == "cannot be submitted: no such partition"


def test_a_job_asks_for_what_its_setting_says(tmp_path, monkeypatch):
    asked = {}

    class Noting(Refusing):
        def update_parameters(self, **parameters):
            asked.update(parameters)

    monkeypatch.setattr(submitit, "AutoExecutor", Noting)
    one = pool.Job("big", ["x"], tmp_path / "logs" / "x.log", 92, processes=2, gpus=16, nodes=2)
    where = cluster.Cluster("slurm", {"slurm_partition": "gpu", "cpus_per_task": 8})
    list(cluster.run_jobs([one], where, 1))
    assert asked == {
        "name": "big", "nodes": 2, "tasks_per_node": 1, "gpus_per_node": 8, "cpus_per_task": 8,
        "slurm_partition": "gpu", "slurm_srun_args": ["--cpus-per-task=46"],
        "slurm_additional_parameters": {"no-requeue": True},
    }  # fmt: skip
