"""Launchers that are stopped or killed, as separate processes."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from small_studies import NAMES, STUDY, statuses

from experiments import attempts

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

LAUNCH = """
import sys
from small_studies import PPO, synthetic_system
from experiments import launch, pool, systems
systems.SYSTEMS |= {name: synthetic_system(name) for name in PPO}
pool.POLL_SECONDS = 0.02
sys.exit(launch.main(sys.argv[1:]))
"""


def start_launcher(tmp_path, behaviour):
    path = tmp_path / "small.toml"
    path.write_text(STUDY)
    words = [sys.executable, "-c", LAUNCH, str(path), "--runs-dir", str(tmp_path / "runs")]
    search = os.pathsep.join([str(ROOT), str(HERE)])
    environment = os.environ | {"SYNTHETIC_BEHAVIOUR": behaviour, "SYNTHETIC_FAIL_SEED": ""}
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment | {"PYTHONPATH": search}
    )


def wait_until(condition, seconds=90.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def logs(folder):
    return [path.read_text() for path in folder.glob("logs/*.log")]


def are_asleep(folder):
    """Whether the runs that a launcher has begun have written their few lines, and sleep."""
    return logs(folder) and all("asleep" in log for log in logs(folder))


def ends(folder):
    return [attempts.read(path).end for path in folder.glob("logs/*.jsonl")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_launcher_ends_its_runs_and_can_be_started_again(tmp_path, study, number):
    launcher = start_launcher(tmp_path, "slow")
    wait_until(lambda: are_asleep(study.folder))
    launcher.send_signal(number)
    out, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number
    assert "stopped" in out
    assert set(statuses(study.folder).values()) == {"interrupted"}
    assert all(end.stopped for end in ends(study.folder))
    assert study() == 0  # starts the others, and the interrupted ones again
    assert statuses(study.folder) == dict.fromkeys(NAMES, "completed")


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_is_stopped_before_its_record_began_is_still_to_do(
    tmp_path, study, capsys, killed
):
    launcher = start_launcher(tmp_path, "late")
    wait_until(lambda: any("cores" in log for log in logs(study.folder)))
    runs = psutil.Process(launcher.pid).children(recursive=True)
    launcher.send_signal(signal.SIGKILL if killed else signal.SIGINT)
    for run in runs if killed else []:
        run.kill()
    launcher.communicate(timeout=30)
    assert {end and end.stopped for end in ends(study.folder)} == {None if killed else True}
    assert statuses(study.folder) == {}
    assert study("--dry-run") == 0
    assert "to run now: 4 runs" in capsys.readouterr().out


def test_after_a_killed_launcher_the_next_one_waits_for_the_runs_it_left_behind(tmp_path, study):
    launcher = start_launcher(tmp_path, "slow")
    wait_until(lambda: are_asleep(study.folder))
    orphans = psutil.Process(launcher.pid).children()
    launcher.kill()
    launcher.communicate()
    with open(study.folder / ".launch.lock") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second = start_launcher(tmp_path, "slow")
    assert "waiting for them to end" in second.stdout.readline()
    begun = psutil.Process(second.pid).children
    time.sleep(0.3)  # many looks at the lock
    assert not begun()
    for orphan in orphans:
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()
    wait_until(begun)
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=30)
    assert study() == 0
    assert statuses(study.folder) == dict.fromkeys(NAMES, "completed")
