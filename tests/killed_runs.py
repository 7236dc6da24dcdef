"""Runs that kill themselves, and the comparison of their record with that of an uninterrupted run."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.cleanba.conftest import ROOT, lines, outcome

# Kills its own process a number of seconds after its first update, or in the middle of writing something.
KILLER = """
import os, runpy, signal, sys, threading
from cleanba.record import checkpoints
from cleanba import record
from cleanba.run import log
kind, moment = sys.argv[1], float(sys.argv[2])
def die():
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "timer":
    def write(self, *rows, whole=log.RunLog.write, begun=[]):
        if not begun:
            begun.append(threading.Timer(moment, die))
            begun[0].start()
        whole(self, *rows)
    log.RunLog.write = write
elif kind == "before-marker":  # the moment-th checkpoint has its arrays, but no marker
    write, count = checkpoints.replace_file, [0]
    def replace(path, text):
        count[0] += 1
        die() if count[0] == moment else write(path, text)
    checkpoints.replace_file = replace
elif kind == "half-line":  # of the moment-th update
    def write(self, *rows, whole=record.RunWriter.write):
        if type(rows[-1]) is record.Update and rows[-1].version == moment:
            whole(self, *rows[:-1])
            file = self._rows[record.Update]
            file.write(b'{"version": 12, "st')
            file.flush()
            die()
        whole(self, *rows)
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


class Runs:
    """Starts runs that record into one folder, and kills some."""

    def __init__(self, folder, script, options):
        self.folder = folder
        self.command = [
            str(ROOT / "cleanba" / script), *options, "--runs-dir", str(folder), "--log-frequency", "1"
        ]  # fmt: skip

    def path(self, setting):
        (path,) = (self.folder / "default").glob(f"*__{setting}__*")
        return path

    def __call__(self, setting, *more, kill=None, code=0, emulator=()):
        before = [sys.executable] if kill is None else [sys.executable, "-c", KILLER, *kill]
        done = subprocess.run(
            [*emulator, *before, *self.command, "--setting", setting, *map(str, more)],
            capture_output=True,
            text=True,
            timeout=600,
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
