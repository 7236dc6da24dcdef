"""A run that was killed and resumed ends like one that was never interrupted.

Kills at random moments are in tests/soak/test_random_kills.py.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from cleanba.record import read_run
from tests.killed_runs import KILLER, Runs, check_equal, resumed_at

from .conftest import SMALL

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The record of an uninterrupted run."""
    runs = Runs(tmp_path_factory.mktemp("straight"), "cleanba_impala.py", SMALL)
    runs("straight")
    return runs.path("straight")


@pytest.mark.parametrize(
    ("kill", "every", "at"),
    [
        pytest.param(("before-marker", "1"), 3, [], marks=pytest.mark.soak),
        (("before-marker", "3"), 3, [6]),
        pytest.param(("half-line", "8"), 3, [6], marks=pytest.mark.soak),
        pytest.param(("half-frame", "8"), 3, [6], marks=pytest.mark.soak),
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


@pytest.mark.soak
@pytest.mark.usefixtures("compiled_anew")
def test_ppo_killed_while_it_writes_resumes_on_another_layout(tmp_path):
    runs = Runs(tmp_path, "cleanba_ppo.py", SMALL)
    runs("straight")
    every = ("--checkpoint-every", "3")
    assert runs("killed", *every, kill=("half-line", "8")).returncode == -signal.SIGKILL
    runs("killed", *every, "--resume", "--learner-device-ids", "0", "1")
    check_equal(runs.path("straight"), runs.path("killed"))
    assert resumed_at(runs.path("killed")) == [6]


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
    marker.write_text(good.replace('"update":10', '"update":11'))
    assert "00000010 is damaged" in refused()
    marker.write_text(good[:100])
    assert "checkpoint.json is not readable" in refused()
    marker.write_text(good)
    arrays = marker.parent / "arrays.npz"
    kept = arrays.read_bytes()
    arrays.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    assert "has changed since it was written" in refused()
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
    error = runs("x", "--checkpoint-every", "5", "--resume", code=1).stderr
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


OVERTAKEN = """
from cleanba import cleanba_ppo
from cleanba.run.command_line import run_command_line
prepare, others = cleanba_ppo.prepare, []
def overtaken(args):
    setup = prepare(args)
    if not others:  # the same command completes the run before this one begins its log
        others.append(args)
        cleanba_ppo.main(args)
    return setup
cleanba_ppo.prepare = overtaken
run_command_line(cleanba_ppo.Args, cleanba_ppo.main, "")
"""


def test_a_run_that_another_process_has_completed_meanwhile_is_not_started_over(tmp_path):
    runs = Runs(tmp_path, "cleanba_ppo.py", SMALL)
    flags = [*runs.command[1:], "--setting", "x", "--resume", "--checkpoint-every", "8"]
    command = [sys.executable, "-c", OVERTAKEN, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "already holds a run" in done.stderr.splitlines()[-1]
    run = read_run(runs.path("x"))
    assert run.completed
    assert len(run.updates()) == 16


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("victim", [pytest.param(v, marks=pytest.mark.soak) for v in (0, 1)])
def test_the_death_of_one_of_two_processes_ends_the_other_and_both_resume(tmp_path, slurm, victim):
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
                    env=os.environ | slurm | {"SLURM_PROCID": str(process)},
                )
            )  # fmt: skip
        return processes

    both = start(kill_one=True)
    both[victim].communicate(timeout=120)
    assert both[victim].returncode == -signal.SIGKILL
    printed, _ = both[1 - victim].communicate(timeout=100)
    assert both[1 - victim].returncode not in (0, None)
    assert "process" in printed
    both = start(kill_one=False)
    for process in both:
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0, printed
    check_equal(runs.path("straight"), runs.path("two"))
    assert resumed_at(runs.path("two")) == [6]


DIE_LEARNING = """elif kind == "half-line":
    from cleanba.exact import groups
    def gather_bytes(self, payload, whole=groups.GroupExchange.gather_bytes, count=[0]):
        count[0] += 1
        if count[0] == moment:
            die()
        return whole(self, payload)
    groups.GroupExchange.gather_bytes = gather_bytes
elif False:"""
