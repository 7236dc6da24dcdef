"""What the disk says of a planned run: the only memory that the launcher has.

A study can thus be stopped in any way, moved, or joined by runs made by hand, and started again.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from cleanba import record
from experiments import pool, systems
from experiments.study import PlannedRun

SIGNALLED = 128  # exit codes of a shell, and of our programs, above this are signals


class State(StrEnum):
    """Where a planned run stands."""

    TO_DO = "to do"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    CHANGED = "changed"  # completed or begun by a command that is not the study's (any more)


class Status(NamedTuple):
    """A state, and what there is to say of it in one line."""

    state: State
    note: str = ""
    seconds: float | None = None  # from start to end, of a completed run
    resumable: bool = False  # it made checkpoints, and its record is not at its end


def study_dir(run: PlannedRun, runs_dir: Path) -> Path:
    """Return the folder of the records of a run's study."""
    return runs_dir / run.study


def run_dir(run: PlannedRun, runs_dir: Path) -> Path:
    """Return the folder of the record of a run."""
    return study_dir(run, runs_dir) / run.name


def log_file(run: PlannedRun, runs_dir: Path) -> Path:
    """Return the file that takes what a run prints; its record is written by the run alone."""
    return study_dir(run, runs_dir) / "logs" / f"{run.name}.log"


def keep_log(run: PlannedRun, runs_dir: Path) -> None:
    """Put what a run has printed beside its record, if there is one: the same file, under a second name.

    Before a run begins its record, there is no folder that its log could be in; and one that holds a log
    alone would be in the way of the record.
    """
    log, folder = log_file(run, runs_dir), run_dir(run, runs_dir)
    beside = folder / "log.txt"
    if not (folder / "run.json").exists() or beside.exists():
        return
    try:
        os.link(log, beside)
    except OSError:  # a file system without links, or a full one
        with contextlib.suppress(OSError):
            shutil.copyfile(log, beside)


@contextlib.contextmanager
def study_lock(directory: Path) -> Iterator[int | None]:
    """Hold the lock of a study's folder, if it is free.

    The lock belongs to the open file, so a process that inherits the descriptor holds it too: it
    is free again when the launcher and all runs that it started, also those that it left behind
    when it was killed, have ended.

    Yields:
      The descriptor to pass on to the runs, or None if somebody else holds the lock.
    """
    descriptor = os.open(directory / ".launch.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    except BlockingIOError:
        yield None
    finally:
        os.close(descriptor)


def is_locked(directory: Path) -> bool:
    """Whether a launcher, or a run that it started, is at work in a study's folder."""
    if not (directory / ".launch.lock").exists():
        return False
    with study_lock(directory) as descriptor:
        return descriptor is None


def inspect(run: PlannedRun, runs_dir: Path, locked: bool = False) -> Status:
    """Find out where a run stands.

    Args:
      run: the run.
      runs_dir: folder of all studies' records.
      locked: whether somebody is at work in the study's folder, so that a record that says
        `running` may be believed.
    """
    folder = run_dir(run, runs_dir)
    try:
        info = record.read_run(folder).info
    except record.RecordError as error:
        if folder.is_dir() and any(folder.iterdir()):
            return Status(State.FAILED, str(error))
        log = log_file(run, runs_dir)
        if not log.exists() or _last_end(log) in ("", pool.STOPPED_LINE):
            return Status(State.TO_DO)  # without a record, nothing has happened
        return Status(State.FAILED, last_words(log))
    planned = record.redact_command(systems.command(run, runs_dir))
    script = systems.SYSTEMS[run.system].script
    same = systems.same_run(info.get("command") or [], planned, script)
    match info["status"]:
        case "completed":
            if not same:
                return Status(State.CHANGED, "completed earlier, with another command")
            return Status(State.COMPLETED, seconds=_seconds(info))
        case "failed" if not same:
            return Status(State.CHANGED, "failed earlier, with another command")
        case "failed":
            return Status(State.FAILED, str(info.get("error") or "no error was recorded"))
        case "running" if locked:
            return Status(State.RUNNING)
        case "running":
            note = "killed before it could end its record"
        case _:
            note = str(info.get("error") or "")
    log = log_file(run, runs_dir)
    if not (same and log.exists()):  # not the launcher's own: it is not to be deleted unasked
        return Status(State.CHANGED, "interrupted earlier, with another command or by hand")
    made_checkpoints = bool(info.get("checkpoint_every"))
    resumable = systems.SYSTEMS[run.system].checkpoints is not None and made_checkpoints
    code = _exit_code(log)
    if gave_up(code):  # it could not end its record, or (bad input) not go on
        return Status(State.FAILED, last_words(log), resumable=resumable and code != 2)
    return Status(State.INTERRUPTED, note, resumable=resumable)


def how_again(status: Status) -> str:
    """Return the flag that says what to do with what an earlier try of a run left, as in `command`."""
    if status.state is State.TO_DO:
        return ""
    return "--resume" if status.resumable else "--overwrite"


def last_words(log: Path) -> str:
    """Return the last line that a run printed; the launcher's own lines start with `#`."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"
    spoken = (line.strip() for line in reversed(lines) if not line.startswith(pool.ENDED))
    words = next((line for line in spoken if line), "#")
    return (
        "ended without a record or a word" if words.startswith("#") else record.redact_text(words)
    )


def gave_up(exit_code: int | None) -> bool:
    """Whether a run with this exit code ended itself: it was not told to, and no signal killed it."""
    return exit_code is not None and 0 < exit_code < SIGNALLED


def _exit_code(log: Path) -> int | None:
    """Return how a run's last try ended; None if the launcher did not see that."""
    _, _, code = _last_end(log).partition(f"{pool.ENDED} with exit code ")
    return int(code) if code.lstrip("-").isdecimal() else None


def _last_end(log: Path) -> str:
    """Return how the launcher saw a run's last try end; '' if it was killed before."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("# ")]
    return lines[-1] if lines and lines[-1].startswith(pool.ENDED) else ""


def steps_done(run: PlannedRun, runs_dir: Path) -> int:
    """Return how many steps a run has learned from so far, as its record says."""
    try:
        update = record.read_run(run_dir(run, runs_dir)).last("updates")
    except (record.RecordError, OSError):
        return 0
    return int(update.get("step") or 0) if update else 0


def _seconds(info: dict) -> float | None:
    try:
        ended, started = (datetime.fromisoformat(info[name]) for name in ("ended", "started"))
    except (KeyError, TypeError, ValueError):
        return None
    return (ended - started).total_seconds()
