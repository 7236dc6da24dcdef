"""Runs commands as jobs of a cluster, through submitit: the same as experiments/pool.py does on this machine.

Slurm decides what runs when and where; the launcher waits on the login node. Were it killed, Slurm would go
on: a launcher that is started again takes over the jobs that are still in the queue.
"""

import contextlib
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import submitit

from cleanba import record
from experiments.pool import ENDED, STOPPED_LINE, Ended, Job, Tick

POLL_SECONDS = 2.0
KILLED = -9  # exit code of a job that has left no other


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
            if first:
                log.write(f"{ENDED} with exit code {code}\n")
        return code


def run_jobs(jobs: Sequence[Job], cluster: Cluster, at_once: int) -> Iterator[Tick]:
    """Run commands as jobs of a cluster. Closing the iterator cancels those that have not ended.

    Args:
      jobs: the commands, in the order in which they are submitted.
      cluster: where.
      at_once: never have more than this in the queue.

    Yields:
      The state of the jobs, every few seconds.
    """
    waiting = list(jobs)
    active: list[Submitted] = []
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
                    active.append(_take_over(job, cluster) or _submit(job, cluster))
                except (OSError, submitit.core.utils.FailedJobError) as error:
                    words = (str(error).strip().splitlines() or ["no message"])[-1]
                    ended.append(Ended(job, None, 0.0, f"cannot be submitted: {words}"))
            yield Tick(tuple(active), tuple(ended))
            if active and not ended:
                time.sleep(POLL_SECONDS)
    finally:
        for one in active:
            one.handle.cancel(check=False)
            note_of(one.job).unlink(missing_ok=True)
            with contextlib.suppress(OSError), open(one.job.log, "a") as log:
                log.write(f"{STOPPED_LINE}\n")


def _folder(job: Job) -> Path:
    """Return the folder of submitit's own files: pickled commands and what they returned."""
    return job.log.parent / "submitit"


def note_of(job: Job) -> Path:
    """Return the file that says which job of the cluster makes a run."""
    return job.log.with_name(f"{job.name}.job")


def _submit(job: Job, cluster: Cluster) -> Submitted:
    _folder(job).mkdir(parents=True, exist_ok=True)
    executor = submitit.AutoExecutor(_folder(job), cluster=cluster.name)
    needs = {
        "name": job.name,
        "nodes": job.nodes,
        "tasks_per_node": job.processes // job.nodes,
        "cpus_per_task": max(1, job.cores // job.processes),
        **({"gpus_per_node": job.gpus // job.nodes} if job.gpus else {}),
    }
    executor.update_parameters(**(needs | dict(cluster.parameters)))
    handle = executor.submit(Command(job.command, str(job.log.absolute())))
    note_of(job).write_text(handle.job_id)
    return Submitted(job, handle, time.monotonic())


def _take_over(job: Job, cluster: Cluster) -> Submitted | None:
    """Return the job that an earlier launcher submitted for a run, if it has not ended."""
    note = note_of(job)
    if cluster.name != "slurm" or not note.exists():
        return None
    handle = submitit.SlurmJob(_folder(job), note.read_text(), list(range(job.processes)))
    return None if handle.done(force_check=True) else Submitted(job, handle, time.monotonic())


def _exit_code(handle: submitit.Job) -> int:
    """Return the exit code of a job's command: the first that is not 0, or `KILLED`."""
    try:
        return next((code for code in handle.results() if code), 0)
    except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError):
        return KILLED
