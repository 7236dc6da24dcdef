"""Runs, peers and launchers that are killed at random moments end like undisturbed ones."""

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from cleanba import record
from cleanba.record import read_run
from cleanba.record.checkpoints import newest
from tests.baselines.test_moolib import (
    assert_accounted,
    command,
    last_step,
    peers_of,
    record_in,
    wait_for,
)
from tests.cleanba.conftest import ROOT, SMALL, lines
from tests.killed_runs import Runs, check_equal, resumed_at

pytestmark = pytest.mark.soak

CARTPOLE = [*SMALL, "--total-timesteps", "8192"]
ATARI = [
    "--env-id", "Pong-v5", "--total-timesteps", "1280", "--num-envs", "4", "--num-env-groups", "2",
    "--num-steps", "16", "--num-minibatches", "2", "--network", "nature", "--channels", "8", "8", "8",
    "--hiddens", "32", "--no-progress", "--fingerprint-every", "1",
]  # fmt: skip

CASES = [
    ("cleanba_ppo.py", CARTPOLE, "--no-concurrency", 3),
    ("cleanba_impala.py", CARTPOLE, "--concurrency", 3),
    ("cleanba_ppo.py", ATARI, "--concurrency", 2),
    ("cleanba_impala.py", ATARI, "--no-concurrency", 2),
]


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize(("script", "options", "architecture", "kills"), CASES)
def test_a_run_killed_at_random_moments_ends_as_if_it_had_not_been(
    tmp_path, script, options, architecture, kills
):
    runs = Runs(tmp_path, script, [*options, architecture])
    runs("straight")
    times = [row["wall_time"] for row in lines(runs.path("straight"), "updates")]
    length = times[-1] - times[0]
    random_moment = random.Random(f"{script} {architecture} {options[1]}")
    for _ in range(kills):
        # the first one starts the run, which has no record yet; each gets through a part of it
        moment = str(random_moment.uniform(0.1, 1.0) * length / 2)
        runs("killed", "--resume", "--checkpoint-every", "4", kill=("timer", moment))
        if read_run(runs.path("killed")).completed:  # it was done before its time
            shutil.rmtree(runs.path("killed"))
            runs("killed", "--resume", "--checkpoint-every", "4", kill=("half-line", "12"))
    if newest(runs.path("killed")) is None:  # each time it was killed before its first checkpoint
        runs("killed", "--resume", "--checkpoint-every", "4", kill=("half-line", "12"))
    # Resumed for the last time on another layout: no setting of the hardware is in a checkpoint.
    runs("killed", "--resume", "--checkpoint-every", "4", "--learner-device-ids", "0", "1")
    check_equal(runs.path("straight"), runs.path("killed"))
    assert resumed_at(runs.path("killed"))[-1] >= 4


def test_a_peer_that_is_killed_as_the_others_finish_does_not_keep_the_run(tmp_path):
    """It is restarted, but there is nothing left to do; whichever of the two comes first."""
    for number in range(4):
        runs_dir = tmp_path / str(number)
        words = command(runs_dir, num_peers=3, total_steps=40_000, max_restarts=9)
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        share = (0.5, 0.8, 0.9, 0.97)[number]
        wait_for(process, lambda d=runs_dir, s=share: last_step(d) > s * 40_000)
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            peers_of(process)[0].kill()
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
        record = record_in(runs_dir)
        assert record.completed
        assert_accounted(record)
        assert record.updates()[-1].step >= 40_000


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
    """Killed five times: alone, with its runs, or told to stop; interrupted runs are resumed."""
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
        return {n: [u.fingerprint for u in r.updates()] for n, r in runs.items()}

    done = subprocess.run(words("quiet"), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    resumed = 0
    for kind in ("all", "told", "all", "all", "alone"):
        begin = time.time()
        launcher = subprocess.Popen(
            words("killed"), cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
        )
        # Most of the time is start-up; if the runs are killed too, one has made a checkpoint.
        deadline = time.monotonic() + (300 if kind == "all" else rng.uniform(4.0, 9.0))
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
    done = subprocess.run(words("killed"), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert prints("killed") == prints("quiet")
    kept = list((tmp_path / "killed").glob("*/*/log.txt"))
    assert len(kept) == len(record.find_runs(tmp_path / "killed"))
    for folder in record.find_runs(tmp_path / "killed"):
        resumed += len(record.read_run(folder).info.resumed or [])
    assert resumed  # from a checkpoint, not from the start
