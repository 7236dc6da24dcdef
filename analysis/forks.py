"""Independent calls on several cores, in forks of this process."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import connection, get_context, parent_process
from typing import Any, TypeVar

T = TypeVar("T")

# Calls are sent in chunks, because a message to a fork and back costs as much as a short call.
MESSAGES_PER_FORK = 16

_calls: Sequence[Callable[[], Any]] = ()


def call_all(calls: Sequence[Callable[[], T]], cores: int) -> list[T]:
    """Call independent functions in parallel.

    Forks share the memory of this process, so tables of gigabytes are not copied to them. Only return
    values are copied back; other changes in memory are lost. With one core or one call, the calls run
    in this process.

    Args:
      calls: functions without arguments.
      cores: number of cores to use.

    Returns:
      The return values, in the order of the calls.

    Raises:
      Exception: the exception of the first call that failed.
      BrokenProcessPool: if a fork is killed, for example because memory is exhausted.
    """
    forks = min(len(calls), cores)
    if forks < 2:
        return [call() for call in calls]
    chunk = max(1, len(calls) // (forks * MESSAGES_PER_FORK))
    with ProcessPoolExecutor(forks, get_context("fork"), _take, (calls,)) as pool:
        return list(pool.map(_call, range(len(calls)), chunksize=chunk))


def _take(calls: Sequence[Callable[[], Any]]) -> None:
    global _calls
    _calls = calls
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent is killed, instead of waiting forever for the next call."""
    connection.wait([parent_process().sentinel])
    os._exit(1)


def _call(index: int) -> Any:
    return _calls[index]()
