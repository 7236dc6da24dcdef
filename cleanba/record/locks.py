"""The lock of a record: one process at a time writes it."""

import fcntl
import os
from pathlib import Path

from cleanba.record.folder import RecordError


def take_lock(directory: Path) -> int:
    """Lock a record, until the returned descriptor is closed or the process ends.

    Raises:
      RecordError: if another process holds the lock.
    """
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise RecordError(f"{directory} is being written by another process") from None
    except OSError:
        pass  # a file system without locks
    return lock


def check_idle(directory: Path) -> None:
    """Refuse a record that a process is writing.

    Raises:
      RecordError: with one line.
    """
    os.close(take_lock(directory))
