"""Forked processes that end with the program that started them, and that nobody waits for in vain."""

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

SECONDS_TO_STOP = 5.0  # for a process to end by itself before it is killed


class ProcessDied(RuntimeError):
    """A process ended while it was needed."""


class WorkerProcesses:
    """Processes forked from this one, by name."""

    def __init__(self) -> None:
        """Begin without any."""
        self._processes: list[Any] = []
        self._lifeline = IndexQueue()  # nothing is put into it: it ends with this process

    def fork(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        """Start a process that calls a function, and shares what is there now.

        To be called before any other thread exists or a GPU is touched.
        """
        context = multiprocessing.get_context("fork")
        with warnings.catch_warnings():
            # jax, which EnvPool imports, is idle
            warnings.filterwarnings("ignore", message="os.fork")
            process = context.Process(
                target=_run, args=(self._lifeline, function, arguments), name=name, daemon=True
            )
            process.start()
        self._processes.append(process)

    def wait_for(self, queue: IndexQueue, count: int) -> None:
        """Wait for as many indices in a queue.

        Raises:
          ProcessDied: if a process ends before; its name is in the message.
        """
        sentinels = [process.sentinel for process in self._processes]
        while count:
            if queue in multiprocessing.connection.wait([queue, *sentinels]):
                count -= len(queue.get_all(count))
            else:
                self.check()

    def check(self) -> None:
        """Look whether all are alive.

        Raises:
          ProcessDied: if one has ended; its name is in the message.
        """
        by_sentinel = {process.sentinel: process for process in self._processes}
        for sentinel in multiprocessing.connection.wait(list(by_sentinel), timeout=0):
            process = by_sentinel[sentinel]
            process.join()
            how = describe_exit(process.exitcode)
            raise ProcessDied(f"{process.name} (process {process.pid}) {how}")

    def end(self) -> None:
        """End them all."""
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
    """Call a function in a forked process, and end with it or with the process that forked it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for that process, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    lifeline.only_get()

    def end_with_it() -> None:
        with contextlib.suppress(EOFError):
            lifeline.get()
        os._exit(0)

    threading.Thread(target=end_with_it, name="lifeline", daemon=True).start()
    code = 0
    try:
        function(*arguments)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    os._exit(code)


def describe_exit(code: int) -> str:
    """Say how a process ended."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}; its own output says why" if code else "ended"
