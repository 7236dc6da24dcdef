"""The pool of processes: cores, GPUs, and commands that cannot be started."""

import os
import sys
import time

import pytest

from experiments import attempts, pool


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(pool, "POLL_SECONDS", 0.02)


def test_running_commands_have_cores_of_their_own(tmp_path):
    sleep = [sys.executable, "-c", "import time; time.sleep(0.2)"]
    jobs = [pool.Job(str(n), sleep, tmp_path / f"{n}.log", cores=n) for n in (1, 2, 1, 9)]
    cores = pool.available_cores()[:2]
    together, deadline = set(), time.monotonic() + 60
    for tick in pool.run_jobs(jobs, cores, at_once=9):
        assert time.monotonic() < deadline  # a job that asks for more cores than there are gets all
        given = [core for one in tick.active for core in one.cores]
        assert len(given) == len(set(given)) <= len(cores)
        for one in tick.active:
            assert os.sched_getaffinity(one.process.pid) == set(one.cores)
        together.add(len(tick.active))
    assert max(together) == len(cores)
    assert os.sched_getaffinity(0) >= set(cores)


def test_running_commands_have_gpus_of_their_own_and_see_no_others(tmp_path, monkeypatch):
    see = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(0.2)"
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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "left alone")  # if the pool has no GPUs
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
    assert [attempts.read(job.attempts).end is None for job in jobs] == [True, False]


def test_closing_the_pool_ends_what_runs_by_force_if_need_be(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "GRACE_SECONDS", 0.2)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('!', flush=True); time.sleep(60)"
    job = pool.Job("deaf", [sys.executable, "-c", deaf], tmp_path / "a.log", 1)
    ticks = pool.run_jobs([job], (0,), at_once=1)
    while not (job.log.exists() and "!" in job.log.read_text().splitlines()):
        (active,) = next(ticks).active
    ticks.close()
    assert active.process.returncode == -9
    end = attempts.read(job.attempts).end
    assert (end.stopped, end.exit_code, end.signal) == (True, None, "SIGKILL")
