"""Several processes of one run: they know of each other, and end together."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from jax._src.clusters.slurm_cluster import SlurmCluster

from cleanba.audit import local_processes

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import os, pathlib, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["SLURM_PROCID"]
(folder / rank).write_text(f"{os.getpid()} {os.environ['SLURM_NTASKS']} {os.environ['SLURM_JOB_ID']}")
code = int(sys.argv[2]) if rank == "1" else 0
time.sleep(0 if code or sys.argv[3] == "go" else 60)
sys.exit(code)
"""


@pytest.fixture
def program(tmp_path):
    """Returns the words of a program: its second process ends with a code, the others sleep or go on."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    folder = tmp_path / "found"
    folder.mkdir()
    return lambda code, what: [str(script), str(folder), str(code), what]


def found(tmp_path, count):
    deadline = time.monotonic() + 60
    while len(texts := [p.read_text() for p in sorted((tmp_path / "found").iterdir())]) < count or (
        not all(texts)
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [tuple(map(int, text.split())) for text in texts]


def launched(words, count):
    command = [sys.executable, "-m", "cleanba.audit.local_processes", str(count), *words]
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True)


def test_each_process_has_a_rank_and_all_one_job(program, tmp_path):
    assert launched(program(0, "go"), 3).wait(timeout=60) == 0
    pids, counts, jobs = zip(*found(tmp_path, 3), strict=True)
    assert len(set(pids)) == 3
    assert counts == (3, 3, 3)
    assert len(set(jobs)) == 1


def port_of(job):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in local_processes.variables(0, 2, job).items():
            patch.setenv(name, value)
        address = SlurmCluster.get_coordinator_address(None, None)
    return int(address.rpartition(":")[2])


def test_runs_meet_at_ports_of_their_own_that_nobody_uses(monkeypatch):
    first = local_processes.find_job_id()
    assert port_of(first) != port_of(local_processes.find_job_id())
    monkeypatch.setattr(local_processes, "_job_ids", itertools.count(first))
    with socket.socket() as taken:
        taken.bind(("localhost", port_of(first)))
        assert local_processes.find_job_id() > first


def test_a_failure_is_the_run_s_and_ends_the_others(program):
    command = [sys.executable, *program(7, "stay")]
    processes = local_processes.start(command, 2)
    assert local_processes.wait(processes, grace=0.5) == 7
    assert processes[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_process(program, tmp_path, number):
    process = launched(program(0, "stay"), 2)
    pids = [pid for pid, _, _ in found(tmp_path, 2)]
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_no_process_outlives_the_one_that_started_them(program, tmp_path):
    process = launched(program(0, "stay"), 2)
    children = [psutil.Process(pid) for pid, _, _ in found(tmp_path, 2)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


@pytest.mark.parametrize("words", [[], ["2"], ["0", "x.py"], ["two", "x.py"]])
def test_bad_input_is_one_line_and_exit_code_2(words, capsys):
    assert local_processes.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
