"""The attempts of a run: when each began and how it ended, one JSON line for each of these events.

The launcher appends to `runs/<study>/logs/<run>.attempts.jsonl` and reads it when it is started again:

    {"event":"started","time":"2026-01-31T12:00:00+00:00","log_bytes":180}
    {"event":"ended","time":"2026-01-31T12:00:41+00:00","exit_code":1,"signal":null,"stopped":false}

A launcher that is killed leaves an attempt without its second line.
"""

import os
import signal
from pathlib import Path
from typing import NamedTuple

import msgspec

from cleanba.record import now_utc

SHELL_SIGNALLED = 128  # a program exits with 128 + the number of the signal that ended it


class Started(msgspec.Struct, frozen=True, tag_field="event", tag="started"):
    """An attempt began.

    Attributes:
      time: UTC, ISO 8601.
      log_bytes: size of the log at that time: what the attempt prints comes after.
    """

    time: str
    log_bytes: int


class Ended(msgspec.Struct, frozen=True, tag_field="event", tag="ended"):
    """An attempt ended.

    Attributes:
      time: UTC, ISO 8601.
      exit_code: of the command; None if a signal killed it or the code is unknown.
      signal: name of the signal that killed the command.
      stopped: whether the launcher stopped it.
    """

    time: str
    exit_code: int | None = None
    signal: str | None = None
    stopped: bool = False

    @property
    def is_error(self) -> bool:
        """Whether the command ended by itself with an error."""
        return not self.stopped and exited_with_error(self.exit_code)


class History(NamedTuple):
    """The events of a run in order, and what was wrong with their file in one line ('' if nothing)."""

    events: tuple[Started | Ended, ...] = ()
    problem: str = ""

    @property
    def end(self) -> Ended | None:
        """How the last attempt ended; None if there is none, or its end was not seen."""
        return self.events[-1] if self.events and isinstance(self.events[-1], Ended) else None

    @property
    def log_bytes(self) -> int:
        """Size of the log when the last attempt began."""
        return next((e.log_bytes for e in reversed(self.events) if isinstance(e, Started)), 0)


def exited_with_error(exit_code: int | None) -> bool:
    """Whether an exit code means an error, not success or a signal."""
    return exit_code is not None and 0 < exit_code < SHELL_SIGNALLED


def started(log_bytes: int) -> Started:
    """Return the event of an attempt that begins now."""
    return Started(now_utc(), log_bytes)


def ended(returncode: int | None, stopped: bool = False) -> Ended:
    """Return the event of an attempt that has just ended.

    Args:
      returncode: as `subprocess` has it: the exit code, or minus the number of a signal.
      stopped: whether the launcher stopped it.
    """
    if returncode is None or returncode >= 0:
        return Ended(now_utc(), exit_code=returncode, stopped=stopped)
    return Ended(now_utc(), signal=_signal_name(-returncode), stopped=stopped)


def append(path: Path, event: Started | Ended) -> None:
    """Append an event to a file of attempts.

    Raises:
      OSError: if it cannot be written.
    """
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"  # an earlier launcher was killed while it wrote
        else:
            torn = False
        file.write(b"\n" * torn + msgspec.json.encode(event) + b"\n")


def read(path: Path) -> History:
    """Read a file of attempts; damaged lines are left out and named in the result's `problem`."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return History()
    except OSError as error:
        return History(problem=f"{path}: {error.strerror}")
    events, damaged = [], []
    for number, line in enumerate(lines, 1):
        try:
            events.append(msgspec.json.decode(line, type=Started | Ended))
        except (msgspec.DecodeError, UnicodeDecodeError):
            damaged.append(str(number))
    if not damaged:
        return History(tuple(events))
    return History(tuple(events), f"{path}: damaged and ignored: line {', '.join(damaged)}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
