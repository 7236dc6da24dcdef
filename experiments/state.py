"""The state of a planned run, as found on disk; the launcher has no other memory.

A study can therefore be stopped in any way, moved, or completed by runs made by hand, and started again.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from cleanba import record
from experiments import attempts, systems
from experiments.attempts import History
from experiments.study import PlannedRun


class State(StrEnum):
    """The states of a planned run."""

    TO_DO = "to do"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    CHANGED = "changed"  # completed or begun by another command than the study's


class Status(NamedTuple):
    """The state of a run, and details.

    Attributes:
      state: of the run.
      note: one line about it.
      resumable: whether the launcher resumes the run: its program can, its record has a checkpoint interval,
        and it was killed or interrupted, or ended without recording its failure.
      problem: one line about a damaged file of attempts; '' if there is none.
    """

    state: State
    note: str = ""
    resumable: bool = False
    problem: str = ""


def study_dir(run: PlannedRun, runs_dir: Path) -> Path:
    """Return the folder of the records of a run's study."""
    return runs_dir / run.study


def run_dir(run: PlannedRun, runs_dir: Path) -> Path:
    """Return the folder of the record of a run."""
    return study_dir(run, runs_dir) / run.name


def log_file(run: PlannedRun, runs_dir: Path) -> Path:
    """Return the file for what a run prints; only the run itself writes into its record."""
    return study_dir(run, runs_dir) / "logs" / f"{run.name}.log"


def attempts_file(run: PlannedRun, runs_dir: Path) -> Path:
    """Return the file of the attempts that launchers made at a run (experiments/attempts.py)."""
    return study_dir(run, runs_dir) / "logs" / f"{run.name}.attempts.jsonl"


def keep_log(run: PlannedRun, runs_dir: Path) -> None:
    """Add a run's log to its record, if there is one: the same file under a second name.

    The log cannot be in the record from the start: a run creates the folder itself, and refuses one
    that holds something else.
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

    The lock belongs to the open file, so a process that inherits the descriptor holds it too. It is free
    once the launcher and all runs that it started have ended, including those that outlive a killed
    launcher.

    Yields:
      The descriptor to pass on to the runs, or None if another process holds the lock.
    """
    descriptor = os.open(directory / ".launch.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        yield descriptor if free else None
    finally:
        os.close(descriptor)


def is_locked(directory: Path) -> bool:
    """Whether a launcher, or a run that it started, is active in a study's folder."""
    if not (directory / ".launch.lock").exists():
        return False
    with study_lock(directory) as descriptor:
        return descriptor is None


def inspect(run: PlannedRun, runs_dir: Path, locked: bool = False) -> Status:
    """Return the status of a run.

    Args:
      run: the run.
      runs_dir: folder of all studies' records.
      locked: whether a launcher or its runs are active in the study's folder, so that a record with
        status `running` may be believed.
    """
    history = attempts.read(attempts_file(run, runs_dir))
    return _status(run, runs_dir, history, locked)._replace(problem=history.problem)


def _status(run: PlannedRun, runs_dir: Path, history: History, locked: bool) -> Status:
    folder = run_dir(run, runs_dir)
    try:
        info = record.read_run(folder).info
    except record.RecordError as error:
        if folder.is_dir() and any(folder.iterdir()):
            return Status(State.FAILED, str(error))
        if history.end is None or history.end.stopped:
            return Status(State.TO_DO)  # killed or stopped before it began its record
        if history.end.exit_code == 0:
            return Status(State.FAILED, "ended without an error, but its record is not there")
        return Status(State.FAILED, last_words(run, runs_dir, history))
    planned = record.redact_command(systems.command(run, runs_dir))
    changes = systems.changes(info.command, planned, run.program)
    same, by = not changes, f"with another command: {', '.join(changes)}"
    match info.status:
        case "completed":
            if not same:
                return Status(State.CHANGED, f"completed earlier, {by}")
            return Status(State.COMPLETED)
        case "failed" if not same:
            return Status(State.CHANGED, f"failed earlier, {by}")
        case "failed":
            return Status(State.FAILED, info.error or "no error was recorded")
        case "running" if locked:
            return Status(State.RUNNING)
        case "running":
            note = "killed before it could end its record"
        case _:
            note = info.error or ""
    if not (same and history.events):  # not the launcher's, so not deleted unasked
        return Status(State.CHANGED, f"interrupted earlier, {by if changes else 'by hand'}")
    resumable = bool(run.program.flags.resume and info.checkpoint_every)
    if history.end and history.end.is_error:  # it could not end its record, or not be resumed
        return Status(State.FAILED, last_words(run, runs_dir, history), resumable=resumable)
    return Status(State.INTERRUPTED, note, resumable=resumable)


def restart_flag(run: PlannedRun, status: Status) -> str:
    """Return the flag for the record of an earlier attempt (resume or overwrite); '' if there is none."""
    if status.state is State.TO_DO:
        return ""
    return run.program.flags.resume if status.resumable else run.program.flags.overwrite


def last_words(run: PlannedRun, runs_dir: Path, history: History | None = None) -> str:
    """Return the last line that the last attempt at a run printed.

    Args:
      run: the run.
      runs_dir: folder of all studies' records.
      history: its attempts; read if not given.
    """
    history = history or attempts.read(attempts_file(run, runs_dir))
    try:
        with open(log_file(run, runs_dir), "rb") as log:
            log.seek(history.log_bytes)
            lines = log.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"
    words = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return record.redact_text(words) or "ended without a record, and printed nothing"


def steps_done(run: PlannedRun, runs_dir: Path) -> int:
    """Return how many steps a run has learned from so far, according to its record."""
    try:
        update = record.read_run(run_dir(run, runs_dir)).last_update()
    except (record.RecordError, OSError):
        return 0
    return update.step if update else 0


def steps_left(run: PlannedRun, status: Status, runs_dir: Path) -> int:
    """Return how many steps a run still has to make: all, unless it is resumed."""
    done = steps_done(run, runs_dir) if status.resumable else 0
    return max(0, run.total_timesteps - done)
