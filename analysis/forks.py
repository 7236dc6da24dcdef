"""Independent calls on several cores, in forks of this process."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import connection, get_context, parent_process
from typing import Any, TypeVar

T = TypeVar("T")

# A message to a fork and back costs as much as a short call.
MESSAGES_PER_FORK = 16

_calls: Sequence[Callable[[], Any]] = ()


def call_all(calls: Sequence[Callable[[], T]], cores: int) -> list[T]:
    """Call functions that do not depend on each other, several at once.

    A fork has all that this process has read, so that tables of gigabytes are not copied to it; what
    a call returns is, and what else it changes in memory is lost. With one core, or for one call, they
    run here.

    Args:
      calls: functions without arguments.
      cores: how many to use.

    Returns:
      What they return, in their order.

    Raises:
      Whatever the first of them raises.
      BrokenProcessPool: if a fork is killed, as by a machine that is out of memory.
    """
    forks = min(len(calls), cores)
    if forks < 2 or not hasattr(os, "fork"):
        return [call() for call in calls]
    chunk = max(1, len(calls) // (forks * MESSAGES_PER_FORK))
    with ProcessPoolExecutor(forks, get_context("fork"), _take, (calls,)) as pool:
        return list(pool.map(_call, range(len(calls)), chunksize=chunk))


def _take(calls: Sequence[Callable[[], Any]]) -> None:
    global _calls
    _calls = calls
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End a fork whose parent was killed: it would wait for its next call for ever."""
    connection.wait([parent_process().sentinel])
    os._exit(1)


def _call(index: int) -> Any:
    return _calls[index]()
