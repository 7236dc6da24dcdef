"""monobeast: twenty runs in one process leave nothing behind, and the paper's 80 actors fit."""

import json
import os
import shlex
import signal
import subprocess
import sys

import psutil
import pytest

from tests.baselines.test_monobeast import APPENDIX_G, ROOT, SCRIPT, record_in, wait_for_update

pytestmark = pytest.mark.soak

TWENTY_RUNS = """
import gc, os, pathlib, sys
from baselines import monobeast_study as study
from baselines.worker_processes import ProcessDied
from cleanba.run.command_line import parse
import psutil

runs_dir, total = sys.argv[1], 4000
def descriptors():
    return len(os.listdir("/proc/self/fd"))
def shared_mappings():
    gc.collect()
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[1].endswith("s") for line in lines)
def fail(*args):
    raise ValueError("planted")
take_batch, killed = study.take_batch, set()
def kill_actor_1_at_the_first_batch(*args):
    if n not in killed:
        killed.add(n)
        psutil.Process().children()[1].kill()
    return take_batch(*args)
plans = {"learner fails": fail, "actor is killed": kill_actor_1_at_the_first_batch}
for n in range(20):
    flags = ["--savedir", runs_dir, "--env", "CartPole-v1", "--num_actors", "3", "--batch_size", "4",
             "--unroll_length", "10", "--total_steps", str(total), "--seed", str(n), "--no-progress"]
    kind = ("completes", "learner fails", "actor is killed", "completes")[n % 4]
    study.take_batch = plans.get(kind, take_batch)
    flags += ["--actor_delay_seconds", "0.02"] if kind == "actor is killed" else []
    try:
        study.train(study.prepare(parse(study.Args, flags, "")))
        outcome = "completes"
    except ValueError as error:
        assert str(error) == "planted"
        outcome = "learner fails"
    except ProcessDied as error:
        assert "actor 1" in str(error), error
        outcome = "actor is killed"
    assert outcome == kind, (outcome, kind)
    assert psutil.Process().children() == []
    if n == 3:
        first, shared = descriptors(), shared_mappings()
    if n == 19:
        assert descriptors() <= first + 2, (first, descriptors())
        assert shared_mappings() <= shared, (shared, shared_mappings())
print("twenty")
"""


def test_after_20_runs_no_process_is_left_and_no_shared_memory(tmp_path):
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        [sys.executable, "-c", TWENTY_RUNS, str(tmp_path)], capture_output=True, text=True, timeout=600,
        cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("twenty\n")
    assert set(os.listdir("/dev/shm")) <= before
    statuses = [
        json.loads(path.read_text())["status"] for path in tmp_path.glob("default/*/run.json")
    ]
    assert sorted(statuses) == ["completed"] * 10 + ["failed"] * 10


def test_80_actors_start_and_fit_into_memory(tmp_path):
    line = shlex.split(APPENDIX_G[0])
    line[line.index("--unroll_length") + 1] = "2"  # the first update soon after the start
    words = [sys.executable, str(SCRIPT), *line, "--network", "nature", "--savedir", str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_update(tmp_path, process)
        children = psutil.Process(process.pid).children()
        assert len(children) == 80
        memory = sum(p.memory_full_info().pss for p in (psutil.Process(process.pid), *children))
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert memory < 12 * 2**30
    assert record_in(tmp_path).info.status == "interrupted"
