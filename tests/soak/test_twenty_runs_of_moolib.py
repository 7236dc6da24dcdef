"""moolib: twenty runs in one process leave nothing behind."""

import json
import os
import subprocess
import sys

import pytest

from tests.baselines.test_moolib import ROOT, SMALL

pytestmark = pytest.mark.soak

TWENTY_RUNS = """
import contextlib, os, pathlib, signal, sys, threading, time
import psutil
from baselines.moolib_atari import __main__ as moolib
from baselines.moolib_atari.launch import PeerFailed
from cleanba.run.command_line import parse

runs_dir = pathlib.Path(sys.argv[1])
small = sys.argv[2:]
me = psutil.Process()
def descriptors():
    return len(os.listdir("/proc/self/fd"))
def peers():  # children of multiprocessing's fork server, which stays
    return sorted((p for child in me.children() for p in child.children()), key=lambda p: p.pid)
def once_it_learns(folder, act):
    path = folder / "updates.jsonl"
    while not (path.is_file() and path.stat().st_size):
        time.sleep(0.01)
    act()
acts = {"peer is killed": lambda: peers()[0].kill(),
        "all are killed": lambda: [peer.kill() for peer in peers()],
        "is interrupted": lambda: os.kill(me.pid, signal.SIGINT)}
kinds = ("completes", "fails", "peer is killed", "all are killed", "is interrupted")
for n in range(20):
    kind = kinds[n % 5]
    total = {"completes": 10_000, "peer is killed": 100_000}.get(kind, 10_000_000)
    flags = [*small, f"--runs-dir={runs_dir}", "--num-peers=2", f"--seed={n}", f"--total-steps={total}"]
    flags += ["--learning-rate=1e30"] if kind == "fails" else []
    folder = runs_dir / "default" / f"moolib__peers2-envs32__CartPole-v1__s{n}"
    if kind in acts:
        threading.Thread(target=once_it_learns, args=(folder, acts[kind]), daemon=True).start()
    try:
        moolib.main(parse(moolib.Args, flags, ""))
        outcome = ("completes", "peer is killed")
    except PeerFailed as error:
        outcome = ("fails",) if "has failed" in str(error) else ("all are killed",)
    except KeyboardInterrupt:
        outcome = ("is interrupted",)
    assert kind in outcome, (n, kind, outcome)
    _, alive = psutil.wait_procs(peers(), timeout=10)
    assert not alive, alive
    assert len(me.children()) <= 2  # the fork server, and multiprocessing's resource tracker
    if n == 4:
        first = descriptors()
    if n == 19:
        assert descriptors() <= first + 2, (first, descriptors())
print("twenty")
"""


def test_after_20_runs_no_process_is_left_and_no_shared_memory(tmp_path):
    before = set(os.listdir("/dev/shm"))
    words = [f"--{name}={value}" for name, value in SMALL.items()]
    done = subprocess.run(
        [sys.executable, "-c", TWENTY_RUNS, str(tmp_path), *words],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("twenty\n")
    assert done.stdout.count("was killed by SIGKILL") >= 8
    assert set(os.listdir("/dev/shm")) <= before
    statuses = [
        json.loads(path.read_text())["status"] for path in tmp_path.glob("default/*/run.json")
    ]
    assert sorted(statuses) == ["completed"] * 8 + ["failed"] * 8 + ["interrupted"] * 4
