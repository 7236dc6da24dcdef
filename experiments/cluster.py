"""Runs commands as jobs of a cluster, through submitit: the same as experiments/pool.py does on this machine.

Slurm decides what runs when and where; the launcher waits on the login node. Stopped, it cancels its jobs.
Were it killed, Slurm would go on: a launcher that is started again takes over what is in the queue.
"""

import contextlib
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import submitit

from cleanba import record
from experiments.pool import ENDED, STOPPED_LINE, Ended, Job, Tick

POLL_SECONDS = 2.0
CANCEL_SECONDS = (
    60.0  # that cancelled jobs are waited for: Slurm gives them 30 to end by themselves
)
LOCAL_MINUTES = 30 * 24 * 60  # time limit of processes of this machine, which submitit wants
IN_QUEUE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING")
KILLED = -9  # exit code of a job that has left no other
CANCELLED = (-15, 143)  # exit codes of a command that was told to end


class Cluster(NamedTuple):
    """Where jobs are submitted to.

    Attributes:
      name: `slurm`, or `local` for processes of this machine.
      parameters: of submitit's executor, such as `{"slurm_partition": "gpu", "timeout_min": 600}`.
    """

    name: str
    parameters: Mapping[str, Any]


class Submitted(NamedTuple):
    """A job in the queue or at work."""

    job: Job
    handle: submitit.Job
    started: float


class Command(NamedTuple):
    """What a task of a job does: it runs the command, and returns its exit code."""

    words: list[str]
    log: str

    def __call__(self) -> int:
        """Run the command; all tasks print into one log."""
        first = submitit.JobEnvironment().global_rank == 0
        with open(self.log, "a") as log:
            if first:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                log.write(f"# {now} {shlex.join(record.redact_command(self.words))}\n")
                log.flush()
            code = subprocess.call(
                self.words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            if first and code not in CANCELLED:  # the launcher says that itself
                log.write(f"{ENDED} with exit code {code}\n")
        return code


def in_queue(jobs: Sequence[Job], cluster: Cluster) -> dict[str, Submitted]:
    """Return those of the jobs, by name, that an earlier launcher submitted and that have not ended."""
    found = {job.name: _take_over(job, cluster) for job in jobs}
    return {name: one for name, one in found.items() if one}


def run_jobs(
    jobs: Sequence[Job],
    cluster: Cluster,
    at_once: int,
    queued: Mapping[str, Submitted] = MappingProxyType({}),
) -> Iterator[Tick]:
    """Run commands as jobs of a cluster. Closing the iterator cancels those that have not ended.

    Args:
      jobs: the commands, in the order in which they are submitted.
      cluster: where.
      at_once: submit none while this many are in the queue.
      queued: those of them that are in the queue already.

    Yields:
      The state of the jobs, every few seconds.
    """
    waiting = [job for job in jobs if job.name not in queued]
    active = [queued[job.name] for job in jobs if job.name in queued]
    try:
        while waiting or active:
            ended = []
            for one in [one for one in active if one.handle.done()]:
                active.remove(one)
                note_of(one.job).unlink(missing_ok=True)
                seconds = time.monotonic() - one.started
                ended.append(Ended(one.job, _exit_code(one.handle), seconds))
            while waiting and len(active) < at_once:
                job = waiting.pop(0)
                try:
                    active.append(_submit(job, cluster))
                except (OSError, RuntimeError) as error:  # submitit's errors are RuntimeErrors
                    note = f"cannot be submitted: {_last_line(error)}"
                    ended.append(Ended(job, None, 0.0, note))
            yield Tick(tuple(active), tuple(ended))
            if active and not ended:
                time.sleep(POLL_SECONDS)
    finally:
        for one in active:
            one.handle.cancel(check=False)
        deadline = time.monotonic() + CANCEL_SECONDS
        for one in active:
            while not one.handle.done(force_check=True) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            note_of(one.job).unlink(missing_ok=True)
            with contextlib.suppress(OSError), open(one.job.log, "a") as log:
                log.write(f"{STOPPED_LINE}\n")


def check(cluster: Cluster) -> None:
    """Refuse parameters that submitit does not take, before anything is written.

    Raises:
      ValueError: with one line.
    """
    limits = ("timeout_min", "slurm_time")
    if cluster.name == "slurm" and not any(name in cluster.parameters for name in limits):
        raise ValueError("Slurm needs a time limit: --cluster-option timeout_min=MINUTES of a run")
    try:
        with tempfile.TemporaryDirectory() as folder:
            _executor(Job("x", [], Path(folder) / "x.log", cores=1), cluster)
    except (AssertionError, NameError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"--cluster-option: {_last_line(error)}") from None


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _folder(job: Job) -> Path:
    """Return the folder of submitit's own files: pickled commands and what they returned."""
    return job.log.parent / "submitit"


def note_of(job: Job) -> Path:
    """Return the file that says which job of the cluster makes a run."""
    return job.log.with_name(f"{job.name}.job")


def _executor(job: Job, cluster: Cluster) -> submitit.AutoExecutor:
    """Return what submits a job, with what the job needs."""
    executor = submitit.AutoExecutor(_folder(job), cluster=cluster.name)
    cores = max(1, job.cores // job.processes)
    needs = {
        "name": job.name,
        "nodes": job.nodes,
        "tasks_per_node": job.processes // job.nodes,
        "cpus_per_task": cores,
        **({"gpus_per_node": job.gpus // job.nodes} if job.gpus else {}),
    }
    if cluster.name == "slurm":
        # srun does not inherit the cores of a task since Slurm 22.05. A job that began anew by itself would
        # find its own record; the launcher goes on with it when it is started again.
        needs |= {
            "slurm_srun_args": [f"--cpus-per-task={cores}"],
            "slurm_additional_parameters": {"no-requeue": True},
        }
    else:
        needs |= {"nodes": 1, "tasks_per_node": job.processes, "timeout_min": LOCAL_MINUTES}
    executor.update_parameters(**(needs | dict(cluster.parameters)))
    return executor


def _submit(job: Job, cluster: Cluster) -> Submitted:
    _folder(job).mkdir(parents=True, exist_ok=True)
    handle = _executor(job, cluster).submit(Command(job.command, str(job.log.absolute())))
    if cluster.name == "slurm":
        try:
            note_of(job).write_text(handle.job_id)
        except OSError:
            handle.cancel(check=False)  # nobody would wait for it
            raise
    return Submitted(job, handle, time.monotonic())


def _take_over(job: Job, cluster: Cluster) -> Submitted | None:
    """Return the job that an earlier launcher submitted for a run, if it is in the queue."""
    note = note_of(job)
    if cluster.name != "slurm" or not note.exists():
        return None
    handle = submitit.SlurmJob(_folder(job), note.read_text(), list(range(job.processes)))
    state = handle.get_info(mode="force").get("State", "UNKNOWN")
    return Submitted(job, handle, time.monotonic()) if state in IN_QUEUE else None


def _exit_code(handle: submitit.Job) -> int:
    """Return the exit code of a job's command: the first that is not 0, or `KILLED`."""
    try:
        return next((code for code in handle.results() if code), 0)
    except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError):
        return KILLED
