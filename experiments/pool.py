"""A pool of processes on this machine: several commands at once, each on its own CPU cores and GPUs."""

import contextlib
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from cleanba import record
from cleanba.record import redaction
from experiments import attempts

POLL_SECONDS = 0.2
GRACE_SECONDS = 20.0
PRINTING_SECONDS = 5.0  # for the rest of a log to be written, once its run has ended


class Job(NamedTuple):
    """A command to run.

    Attributes:
      name: of the job.
      command: words of the command line.
      log: file for what the command prints; its attempts are recorded beside it.
      cores: CPU cores that it needs.
      processes: how many processes make the run together, each with this command.
      gpus: GPUs that it needs.
      nodes: machines of a cluster that the processes are spread over.
    """

    name: str
    command: list[str]
    log: Path
    cores: int
    processes: int = 1
    gpus: int = 0
    nodes: int = 1

    @property
    def attempts(self) -> Path:
        """The file of the run's attempts (experiments/attempts.py)."""
        return self.log.with_name(f"{self.name}.attempts.jsonl")


class Free(NamedTuple):
    """What is not in use: CPU cores, and GPUs as CUDA_VISIBLE_DEVICES names them."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...]


class Active(NamedTuple):
    """A command that is running."""

    job: Job
    process: subprocess.Popen
    printing: subprocess.Popen  # redacts what the command prints
    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    started: float


class Ended(NamedTuple):
    """A command that has ended; the exit code is None if it could not be started."""

    job: Job
    exit_code: int | None
    seconds: float
    error: str = ""


class Tick(NamedTuple):
    """The state of the pool: what is running, and what has ended since the last tick."""

    active: tuple[Active, ...]
    ended: tuple[Ended, ...]


def in_processes(command: list[str], count: int) -> list[str]:
    """Return the command that starts `count` processes of a Python command on this machine."""
    python, *words = command
    several = ["-m", "cleanba.audit.local_processes", str(count)] if count > 1 else []
    return [python, *several, *words]


def available_cores() -> tuple[int, ...]:
    """Return the CPU cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def available_gpus() -> tuple[str, ...]:
    """Return the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # the list ends at the first invalid name, such as -1
        names = (name.strip() for name in visible.split(","))
        return tuple(itertools.takewhile(lambda name: name and not name.startswith("-"), names))
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):  # no driver, no GPU
        return ()
    return tuple(answer.stdout.split())


def run_jobs(
    jobs: Sequence[Job],
    cores: Sequence[int],
    at_once: int,
    keep_open: Sequence[int] = (),
    gpus: Sequence[str] = (),
) -> Iterator[Tick]:
    """Run commands, each when as many cores and GPUs as it asks for are free.

    A job that asks for more cores than there are gets them all. If there are GPUs, a job sees only those
    that it was given, because JAX takes the memory of every GPU that it sees; a job that asks for more
    GPUs than there are is not started. Closing the iterator ends the running commands with SIGTERM, and
    with SIGKILL those that have not ended after GRACE_SECONDS.

    Args:
      jobs: the commands; each starts as soon as its cores and GPUs are free, the first in the list first.
      cores: the CPU cores to use.
      at_once: largest number of commands at once.
      keep_open: file descriptors that the commands inherit.
      gpus: the GPUs to use.

    Yields:
      The state of the pool, a few times a second and whenever something ended.
    """
    waiting = list(jobs)
    free = Free(tuple(cores), tuple(gpus))
    active: list[Active] = []
    try:
        while waiting or active:
            ended = []
            for one in [one for one in active if one.process.poll() is not None]:
                active.remove(one)
                free = Free(free.cores + one.cores, free.gpus + one.gpus)
                wait_until_printed(one.printing)
                _record_end(one.job, attempts.ended(one.process.returncode))
                seconds = time.monotonic() - one.started
                ended.append(Ended(one.job, one.process.returncode, seconds))
            for job in [job for job in waiting if gpus and job.gpus > len(gpus)]:
                waiting.remove(job)
                error = f"cannot be started: it needs {job.gpus} GPUs, and there are {len(gpus)}"
                ended.append(Ended(job, None, 0.0, error))
            while len(active) < at_once and (
                job := _first_that_fits(waiting, free, len(cores), bool(gpus))
            ):
                waiting.remove(job)
                given, rest = _share(free, min(job.cores, len(cores)), job.gpus)
                try:
                    active.append(_start(job, given, keep_open, sees_gpus=bool(gpus)))
                    free = rest
                except OSError as error:  # such as a full disk: this run fails, the others go on
                    ended.append(Ended(job, None, 0.0, f"cannot be started: {error.strerror}"))
            yield Tick(tuple(active), tuple(ended))
            if active and not ended:
                time.sleep(POLL_SECONDS)
    finally:
        _end(active)


def _first_that_fits(
    waiting: Sequence[Job], free: Free, all_cores: int, with_gpus: bool
) -> Job | None:
    fitting = (
        job
        for job in waiting
        if min(job.cores, all_cores) <= len(free.cores)
        and (job.gpus <= len(free.gpus) or not with_gpus)
    )
    return next(fitting, None)


def _share(free: Free, cores: int, gpus: int) -> tuple[Free, Free]:
    """Split what is free into the cores and GPUs of a job, and the rest."""
    free = Free(tuple(sorted(free.cores)), free.gpus)
    given = Free(free.cores[:cores], free.gpus[:gpus])
    return given, Free(free.cores[cores:], free.gpus[gpus:])


def _start(job: Job, given: Free, keep_open: Sequence[int], sees_gpus: bool) -> Active:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with open(job.log, "a") as log:
        command = in_processes(job.command, job.processes)
        begin_attempt(job.attempts, log, command)
        chosen = {"CUDA_VISIBLE_DEVICES": ",".join(given.gpus)} if sees_gpus else {}
        with redacted(log) as printing, _pinned_to(given.cores):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=printing.stdin,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the launcher, which then ends them
                pass_fds=keep_open,
                env=os.environ | chosen,
            )
    return Active(job, process, printing, given.cores, given.gpus, time.monotonic())


@contextlib.contextmanager
def _pinned_to(cores: tuple[int, ...]) -> Iterator[None]:
    """Bind this thread to the cores for a moment, so that a process started now inherits them."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _end(active: Sequence[Active]) -> None:
    """Send SIGTERM to processes, wait, and kill those that have not ended."""
    for one in active:
        _signal(one, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for one in active:
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            one.process.wait(timeout=max(0.0, deadline - time.monotonic()))
    for one in active:
        if one.process.poll() is None:
            _signal(one, signal.SIGKILL)
            one.process.wait()
        wait_until_printed(one.printing)
        _record_end(one.job, attempts.ended(one.process.returncode, stopped=True))


@contextlib.contextmanager
def redacted(log: TextIO) -> Iterator[subprocess.Popen]:
    """Start a process that writes its standard input to a log, without secrets.

    It ends when all processes that print to it have ended, and so may outlive the launcher, as they may.

    Args:
      log: open for appending.

    Yields:
      The process; its `stdin` is closed here on leaving the context, but not in processes that have it.
    """
    process = subprocess.Popen(
        [sys.executable, redaction.__file__],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    with process.stdin:
        yield process


def wait_until_printed(printing: subprocess.Popen) -> None:
    """Wait until a log is complete, unless a process that a run has left behind still prints to it."""
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        printing.wait(PRINTING_SECONDS)


def begin_attempt(path: Path, log: TextIO, command: Sequence[str]) -> None:
    """Record that an attempt begins, and write its time and command into the log.

    Args:
      path: the file of attempts.
      log: open for appending.
      command: its words.

    Raises:
      OSError: if there is no room for either.
    """
    log.write(f"# {record.now_utc()} {shlex.join(record.redact_command(command))}\n")
    log.flush()
    attempts.append(path, attempts.started(os.fstat(log.fileno()).st_size))


def _record_end(job: Job, event: attempts.Ended) -> None:
    with contextlib.suppress(OSError):  # a full disk must not stop the other runs
        attempts.append(job.attempts, event)


def _signal(one: Active, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.process.pid, number)
