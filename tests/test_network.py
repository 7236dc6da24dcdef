"""Runs of several processes on one machine listen on the loopback interface alone, and end on a signal."""

import ipaddress
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cleanba.record import find_runs, read_run

ROOT = Path(__file__).resolve().parents[1]
LONG = 10_000_000
RUNS = {
    "moolib": [
        "-m", "baselines.moolib_atari", "--env", "CartPole-v1", "--num-peers", 2, "--actor-batch-size", 8,
        "--batch-size", 8, "--virtual-batch-size", 8, "--total-steps", LONG,
    ],
    "worker_schemes": [
        "-m", "baselines.worker_schemes", "--env-id", "CartPole-v1", "--num-envs", 4, "--num-steps", 16,
        "--scheme", "dppo", "--total-timesteps", LONG,
    ],
    "distributed": [
        "-m", "cleanba.audit.local_processes", 2, ROOT / "cleanba" / "cleanba_ppo.py", "--distributed",
        "--env-id", "CartPole-v1", "--num-envs", 8, "--num-env-groups", 4, "--num-steps", 16,
        "--total-timesteps", LONG,
    ],
}  # fmt: skip


@pytest.fixture
def running(tmp_path):
    """Returns a run that is training, and ends it with the test."""
    started = []
    # Ray sets its mode here in a process that has used it before
    environment = {name: v for name, v in os.environ.items() if not name.startswith("RAY_AUTH")}

    def start(name):
        words = [
            sys.executable,
            *map(str, RUNS[name]),
            "--runs-dir",
            str(tmp_path),
            "--no-progress",
        ]
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started.append(process)
        deadline = time.monotonic() + 180
        while not any(read_run(f).last_update() for f in find_runs(tmp_path)):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return process

    yield start
    for process in started:
        family = (
            [process, *psutil.Process(process.pid).children(recursive=True)]
            if process.poll() is None
            else []
        )
        for one in family:
            one.kill()
        process.communicate()


def family_of(process):
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def listening(processes):
    """Return program and address of every socket that some processes listen on."""
    return {
        (" ".join(one.cmdline()[:3])[:80], c.laddr.ip, c.laddr.port)
        for one in processes
        for c in one.net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    }


def is_loopback(text):
    address = ipaddress.ip_address(text)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "number"),
    [
        *((name, signal.SIGTERM) for name in RUNS),
        ("distributed", signal.SIGINT),
        ("distributed", signal.SIGHUP),
    ],
)
def test_only_loopback_is_listened_on_and_a_signal_ends_the_run(running, tmp_path, name, number):
    process = running(name)
    family = family_of(process)
    sockets = listening(family)
    assert sockets
    open_to_others = {s for s in sockets if not is_loopback(s[1])}
    if name == "worker_schemes":
        # Ray listens on all interfaces; every request needs the run's token.
        (raylet,) = [one for one in family if one.name() == "raylet"]
        assert raylet.environ()["RAY_AUTH_MODE"] == "token"
        assert len(raylet.environ()["RAY_AUTH_TOKEN"]) == 64
        open_to_others = set()
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number, error
    (folder,) = find_runs(tmp_path)
    info = read_run(folder).info
    assert (info.status, info.error) == ("interrupted", f"interrupted by {number.name}")
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert not open_to_others
