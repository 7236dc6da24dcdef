"""Runs commands as processes, several at once, each on CPU cores and GPUs of its own."""

import contextlib
import itertools
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cleanba import record

POLL_SECONDS = 0.2
GRACE_SECONDS = 20.0
# Lines of the launcher in a log: each try begins with its time and command, and ends with one of these,
# unless the launcher was killed before.
ENDED = "# ended"
STOPPED_LINE = f"{ENDED} by the launcher"


class Job(NamedTuple):
    """A command to run."""

    name: str
    command: list[str]
    log: Path
    cores: int
    processes: int = 1  # that make the run together, with this command each
    gpus: int = 0
    nodes: int = 1  # of the cluster


class Free(NamedTuple):
    """What can be given to a command: CPU cores, and GPUs as CUDA_VISIBLE_DEVICES names them."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...]


class Active(NamedTuple):
    """A command at work."""

    job: Job
    process: subprocess.Popen
    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    started: float


class Ended(NamedTuple):
    """A command that has ended; the exit code is None if it could not even be started."""

    job: Job
    exit_code: int | None
    seconds: float
    error: str = ""


class Tick(NamedTuple):
    """A look at the pool: who is at work, and who has ended since the last look."""

    active: tuple[Active, ...]
    ended: tuple[Ended, ...]


def in_processes(command: list[str], count: int) -> list[str]:
    """Return the command that makes a run on this machine whose processes have a command each."""
    python, *words = command
    several = ["-m", "cleanba.local_processes", str(count)] if count > 1 else []
    return [python, *several, *words]


def available_cores() -> tuple[int, ...]:
    """Return the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def available_gpus() -> tuple[str, ...]:
    """Return the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # up to the first that is none, such as -1
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

    A job that asks for more cores than there are gets them all. Where there are GPUs, a job sees those
    that it was given and no others: JAX takes the memory of every GPU that it sees; one that asks for
    more than there are is not started. Closing the iterator ends the commands that are at work, with
    SIGTERM, and SIGKILL if that does not help.

    Args:
      jobs: the commands, in the order in which they should start where cores and GPUs allow.
      cores: the CPU cores to give out.
      at_once: never run more commands than this at once.
      keep_open: file descriptors that the commands inherit.
      gpus: the GPUs to give out.

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
                _note(one.job, f"{ENDED} with exit code {one.process.returncode}")
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
                except OSError as error:  # a full disk, say: costs this run, not the others
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
    """Return as many cores and GPUs of those that are free as a job is given, and the others."""
    free = Free(tuple(sorted(free.cores)), free.gpus)
    given = Free(free.cores[:cores], free.gpus[:gpus])
    return given, Free(free.cores[cores:], free.gpus[gpus:])


def _start(job: Job, given: Free, keep_open: Sequence[int], sees_gpus: bool) -> Active:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with open(job.log, "a") as log:
        command = in_processes(job.command, job.processes)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        log.write(f"# {now} {shlex.join(record.redact_command(command))}\n")
        log.flush()
        chosen = {"CUDA_VISIBLE_DEVICES": ",".join(given.gpus)} if sees_gpus else {}
        with _pinned_to(given.cores):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends them
                pass_fds=keep_open,
                env=os.environ | chosen,
            )
    return Active(job, process, given.cores, given.gpus, time.monotonic())


@contextlib.contextmanager
def _pinned_to(cores: tuple[int, ...]) -> Iterator[None]:
    """Bind this thread to the cores for a moment: a process inherits them from its first breath."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _end(active: Sequence[Active]) -> None:
    """Ask processes to end, wait, and make those end that did not."""
    for one in active:
        _signal(one, signal.SIGTERM)
        _note(one.job, STOPPED_LINE)
    deadline = time.monotonic() + GRACE_SECONDS
    for one in active:
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            one.process.wait(timeout=max(0.0, deadline - time.monotonic()))
    for one in active:
        if one.process.poll() is None:
            _signal(one, signal.SIGKILL)
            one.process.wait()


def _note(job: Job, line: str) -> None:
    with contextlib.suppress(OSError), open(job.log, "a") as log:
        log.write(f"{line}\n")


def _signal(one: Active, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.process.pid, number)
