"""A run killed at any moment and resumed ends like one that was never interrupted."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cleanba.checkpoints import newest
from cleanba.record import read_run

from .conftest import ROOT, SLURM, SMALL, lines, outcome

pytestmark = pytest.mark.usefixtures("compiled_once")

# Kills its own process a number of seconds after the first update that it writes, or in the middle of
# something.
KILLER = """
import os, runpy, signal, sys, threading
from cleanba import checkpoints, record, run_log
kind, moment = sys.argv[1], float(sys.argv[2])
def die():
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "timer":
    def write(self, whole=run_log.RunLog.write_update, begun=[], **kwargs):
        if not begun:
            begun.append(threading.Timer(moment, die))
            begun[0].start()
        whole(self, **kwargs)
    run_log.RunLog.write_update = write
elif kind == "before-marker":  # the moment-th checkpoint has its arrays, but no marker
    write, count = checkpoints.replace_file, [0]
    def replace(path, text):
        count[0] += 1
        die() if count[0] == moment else write(path, text)
    checkpoints.replace_file = replace
elif kind == "half-line":  # of the moment-th update
    def write(self, kind, rows, whole=record.RunWriter.write):
        rows = list(rows)
        if kind == "updates" and rows[0]["version"] == moment:
            file = self._files[kind]
            file.write(b'{"version": 12, "st')
            file.flush()
            die()
        whole(self, kind, rows)
    record.RunWriter.write = write
elif kind == "half-frame":
    def write(self, frame, whole=record.RunWriter.write_actions, count=[0]):
        count[0] += 1
        if count[0] == moment:
            self._actions.write(frame[:7])
            self._actions.flush()
            die()
        whole(self, frame)
    record.RunWriter.write_actions = write
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

CARTPOLE = [*SMALL, "--total-timesteps", "8192"]
ATARI = [
    "--env-id", "Pong-v5", "--total-timesteps", "1280", "--num-envs", "4", "--num-env-groups", "2",
    "--num-steps", "16", "--num-minibatches", "2", "--network", "nature", "--channels", "8", "8", "8",
    "--hiddens", "32", "--no-progress", "--fingerprint-every", "1",
]  # fmt: skip


class Runs:
    """Starts runs that record into one folder, and kills some."""

    def __init__(self, folder, script, options):
        self.folder = folder
        self.command = [str(ROOT / "cleanba" / script), *options, "--runs-dir", str(folder)]

    def path(self, setting):
        (path,) = (self.folder / "default").glob(f"*__{setting}__*")
        return path

    def __call__(self, setting, *more, kill=None, code=0):
        before = [sys.executable] if kill is None else [sys.executable, "-c", KILLER, *kill]
        done = subprocess.run(
            [*before, *self.command, "--setting", setting, *map(str, more)],
            capture_output=True,
            text=True,
            timeout=300,
        )
        allowed = (code,) if kill is None else (0, -signal.SIGKILL)
        assert done.returncode in allowed, done.stdout + done.stderr
        return done


def check_equal(straight: Path, resumed: Path):
    """Compare everything of two records that does not depend on time, and that nothing is there twice."""
    assert outcome(resumed) == outcome(straight)
    actions = Path("actions/rollouts.bin")
    assert (resumed / actions).read_bytes() == (straight / actions).read_bytes()
    info = json.loads((resumed / "run.json").read_text())
    assert info["status"] == "completed"
    versions = [row["version"] for row in lines(resumed, "updates")]
    assert versions == list(range(2, len(versions) + 2))
    times = [row["wall_time"] for row in lines(resumed, "updates")]
    assert times == sorted(times)
    board = EventAccumulator(str(resumed / "tensorboard"))
    board.Reload()
    steps = [event.step for event in board.Scalars("losses/loss")]
    assert steps == [row["step"] for row in lines(resumed, "updates")]


def resumed_at(path):
    """The updates whose checkpoints a run was resumed from."""
    info = json.loads((path / "run.json").read_text())
    return [note["update"] for note in info.get("resumed", [])]


CASES = [
    ("cleanba_ppo.py", CARTPOLE, "--no-concurrency", 3),
    ("cleanba_ppo.py", CARTPOLE, "--concurrency", 2),
    ("cleanba_impala.py", CARTPOLE, "--no-concurrency", 2),
    ("cleanba_impala.py", CARTPOLE, "--concurrency", 3),
    ("cleanba_ppo.py", ATARI, "--no-concurrency", 2),
    ("cleanba_impala.py", ATARI, "--concurrency", 2),
]


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


@pytest.fixture(scope="module")
def straight(tmp_path_factory, compiled_once):
    """The record of a run that nobody kills."""
    runs = Runs(tmp_path_factory.mktemp("straight"), "cleanba_impala.py", SMALL)
    runs("straight")
    return runs.path("straight")


@pytest.mark.parametrize(
    ("kill", "every", "at"),
    [
        (("before-marker", "1"), 3, []),
        (("before-marker", "3"), 3, [6]),
        (("half-line", "8"), 3, [6]),
        (("half-frame", "8"), 3, [6]),
        # goes on with rollout 2, before which the Cleanba architecture does not fetch parameters
        (("half-line", "3"), 1, [1]),
    ],
)
def test_a_run_killed_in_the_middle_of_writing_resumes(tmp_path, straight, kill, every, at):
    runs = Runs(tmp_path, "cleanba_impala.py", SMALL)
    done = runs("killed", "--checkpoint-every", every, kill=kill)
    assert done.returncode == -signal.SIGKILL
    runs("killed", "--checkpoint-every", every, "--resume")
    check_equal(straight, runs.path("killed"))
    assert resumed_at(runs.path("killed")) == at


def test_what_cannot_be_resumed_is_refused_with_what_differs(tmp_path):
    runs = Runs(tmp_path, "cleanba_ppo.py", SMALL)
    every = ("--checkpoint-every", "5")
    assert runs("x", *every, kill=("half-line", "13")).returncode == -signal.SIGKILL
    path = runs.path("x")
    before = (path / "updates.jsonl").read_bytes()

    def refused(*more):
        error = runs("x", *every, "--resume", *more, code=2).stderr
        assert error.startswith("error: ")
        assert len(error.splitlines()) == 1
        return error

    error = refused("--learning-rate", "0.5", "--gamma", "0.9")
    assert "gamma 0.99 then, 0.9 now" in error
    assert "learning_rate 0.00025 then, 0.5 now" in error
    assert "give one" in refused("--overwrite")
    header = (path / "run.json").read_text()
    marker = path / "checkpoints" / "00000010" / "checkpoint.json"
    info = json.loads(header)
    info["versions"]["optax"] = "0.0.1"
    (path / "run.json").write_text(json.dumps(info))
    assert "optax '0.0.1' then" in refused()
    (path / "run.json").write_text(header)
    # the checkpoint itself: its marker, its arrays, a file of it missing
    good = marker.read_text()
    marker.write_text(good.replace('"update": 10', '"update": 11'))
    assert "00000010 is damaged" in refused()
    marker.write_text(good[:100])
    assert "checkpoint.json is not readable" in refused()
    marker.write_text(good)
    arrays = next(p for p in (marker.parent / "state").rglob("d/*") if p.is_file())
    kept = arrays.read_bytes()
    arrays.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    assert "is not as it was written" in refused()
    arrays.unlink()
    assert "is missing" in refused()
    arrays.write_bytes(kept)
    # the record: shorter than it was at the checkpoint
    (path / "updates.jsonl").write_bytes(before[:200])
    assert "updates.jsonl has 200 bytes" in refused()
    (path / "updates.jsonl").write_bytes(before)
    runs("x", *every, "--resume")
    assert "nothing to resume" in refused()


def test_actions_that_lead_elsewhere_end_a_resumed_run_loudly(tmp_path):
    runs = Runs(tmp_path, "cleanba_impala.py", SMALL)
    runs("x", "--checkpoint-every", "5", kill=("half-line", "8"))
    file = runs.path("x") / "actions" / "rollouts.bin"
    data = bytearray(file.read_bytes())
    data[0] ^= 0x80
    file.write_bytes(bytes(data))
    error = runs("x", "--checkpoint-every", "5", "--resume", code=2).stderr
    assert "the recorded actions do not lead environment group 0" in error
    assert json.loads((runs.path("x") / "run.json").read_text())["status"] == "failed"


def test_a_record_without_checkpoints_is_not_started_over_unasked(tmp_path):
    runs = Runs(tmp_path, "cleanba_ppo.py", SMALL)
    runs("x", kill=("half-line", "8"))
    before = (runs.path("x") / "updates.jsonl").read_bytes()
    error = runs("x", "--resume", code=2).stderr
    assert "was not run with --checkpoint-every" in error
    assert (runs.path("x") / "updates.jsonl").read_bytes() == before


def test_a_record_whose_checkpoints_are_gone_is_not_started_over_unasked(tmp_path):
    runs = Runs(tmp_path, "cleanba_ppo.py", SMALL)
    runs("x", "--checkpoint-every", "3", kill=("half-line", "8"))
    shutil.rmtree(runs.path("x") / "checkpoints")
    error = runs("x", "--resume", "--checkpoint-every", "3", code=2).stderr
    assert "has no checkpoint, and has 6 updates: --overwrite" in error


def test_a_run_that_is_being_written_is_neither_resumed_nor_deleted(tmp_path):
    runs = Runs(tmp_path, "cleanba_ppo.py", [*SMALL, "--total-timesteps", "10000000"])
    command = [sys.executable, *runs.command, "--setting", "x", "--checkpoint-every", "5"]
    live = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not list(tmp_path.glob("default/*/checkpoints/*/checkpoint.json")):
            assert live.poll() is None
            time.sleep(0.05)
        for flag in ("--resume", "--overwrite"):
            error = runs("x", "--checkpoint-every", "5", flag, code=2).stderr
            assert "is being written by another process" in error
        assert live.poll() is None
    finally:
        live.kill()
        live.wait()


@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_one_of_two_processes_ends_the_other_and_both_resume(tmp_path, victim):
    runs = Runs(tmp_path, "cleanba_impala.py", [*SMALL, "--num-actor-threads", "1"])
    runs("straight")

    def start(kill_one):
        processes = []
        for process in range(2):
            killer = ["-c", KILLER, "half-line", "8"] if kill_one and process == victim else []
            if killer and victim == 1:  # which writes no record: killed as it learns
                killer[1] = KILLER.replace('elif kind == "half-line":', DIE_LEARNING)
            processes.append(
                subprocess.Popen(
                    [sys.executable, *killer, *runs.command, "--setting", "two", "--distributed",
                     "--resume", "--checkpoint-every", "3"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=os.environ | SLURM | {"SLURM_PROCID": str(process)},
                )
            )  # fmt: skip
        return processes

    both = start(kill_one=True)
    both[victim].communicate(timeout=120)
    died = time.perf_counter()
    assert both[victim].returncode == -signal.SIGKILL
    printed, _ = both[1 - victim].communicate(timeout=100)
    assert time.perf_counter() - died < 60
    assert both[1 - victim].returncode not in (0, None)
    assert "process" in printed
    both = start(kill_one=False)
    for process in both:
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0, printed
    check_equal(runs.path("straight"), runs.path("two"))
    assert resumed_at(runs.path("two")) == [6]


DIE_LEARNING = """elif kind == "half-line":
    from cleanba import groupwise
    def gather_json(self, value, whole=groupwise.GroupExchange.gather_json, count=[0]):
        count[0] += 1
        if count[0] == moment:
            die()
        return whole(self, value)
    groupwise.GroupExchange.gather_json = gather_json
elif False:"""
