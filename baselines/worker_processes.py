"""Forked worker processes: they exit with their parent, and their deaths are reported."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from baselines.shared_memory import IndexQueue
from cleanba.record.writer import now_utc

SECONDS_TO_STOP = 5.0  # for a process to exit after SIGTERM before it is killed


class Clock:
    """Seconds since the run started; the same in all processes forked from it.

    Attributes:
      started: that time, as `run.json` has it.
    """

    def __init__(self) -> None:
        self.started = now_utc()
        self._start = time.monotonic()

    def __call__(self) -> float:
        """Return the seconds."""
        return time.monotonic() - self._start


class ProcessDied(RuntimeError):
    """A worker process exited while it was needed."""


class WorkerProcesses:
    """Processes forked from this one; leaving the context terminates them all."""

    def __init__(self) -> None:
        """Begin without any."""
        self._processes: list[Any] = []
        # Nothing is put into it: the workers' reads end when this process does.
        self._lifeline = IndexQueue()

    def __enter__(self) -> "WorkerProcesses":
        """Return the processes themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """Terminate all processes."""
        self.end()

    def fork(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        """Start a process that calls a function; it shares the memory that exists now.

        Call it before any other thread exists or a GPU is initialized.

        Args:
          name: for error messages.
          function: what the process runs.
          *arguments: of the function.
        """
        context = multiprocessing.get_context("fork")
        with warnings.catch_warnings():
            # jax warns of forks; EnvPool imports it, and nothing uses it here
            warnings.filterwarnings("ignore", message="os.fork")
            process = context.Process(
                target=_run, args=(self._lifeline, function, arguments), name=name, daemon=True
            )
            process.start()
        self._processes.append(process)

    def wait_for(self, queue: IndexQueue, count: int) -> None:
        """Take a number of indices from a queue, waiting for them.

        Raises:
          ProcessDied: if a process exits meanwhile; the message names it.
        """
        sentinels = [process.sentinel for process in self._processes]
        while count:
            if queue in multiprocessing.connection.wait([queue, *sentinels]):
                count -= len(queue.get_all(count))
            else:
                self.check()

    def check(self) -> None:
        """Check that all processes are alive.

        Raises:
          ProcessDied: if one has exited; the message names it.
        """
        by_sentinel = {process.sentinel: process for process in self._processes}
        for sentinel in multiprocessing.connection.wait(list(by_sentinel), timeout=0):
            process = by_sentinel[sentinel]
            process.join()
            how = describe_exit(process.exitcode)
            raise ProcessDied(f"{process.name} (process {process.pid}) {how}")

    def end(self) -> None:
        """Terminate all processes, and kill those that do not exit in time."""
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + SECONDS_TO_STOP
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes.clear()
        self._lifeline.close()


def _run(lifeline: IndexQueue, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Call a function in a forked process, which exits when the function or the parent process does."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent handles them and terminates this one
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    lifeline.only_get()

    def exit_with_parent() -> None:
        with contextlib.suppress(EOFError):
            lifeline.get()
        os._exit(0)

    threading.Thread(target=exit_with_parent, name="lifeline", daemon=True).start()
    code = 0
    try:
        function(*arguments)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    os._exit(code)


def describe_exit(code: int) -> str:
    """Describe an exit code of a process in a few words."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}; its own output says why" if code else "ended"
