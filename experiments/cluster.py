"""Runs commands as jobs of a cluster through submitit; experiments/pool.py does the same on this machine.

Slurm decides when and where a job runs; the launcher waits on the login node. A launcher that is stopped
cancels its jobs. One that is killed leaves them in the queue, and the next launcher waits for them.
"""

import contextlib
import importlib.util
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments import attempts
from experiments.pool import Ended, Job, Tick, begin_attempt, redacted, wait_until_printed

if TYPE_CHECKING:
    import submitit  # imported where it is used: only a cluster needs it

POLL_SECONDS = 2.0
CANCEL_SECONDS = 60.0  # wait for cancelled jobs; Slurm kills them 30 seconds after SIGTERM
LOCAL_MINUTES = 30 * 24 * 60  # submitit needs a time limit for processes of this machine too
IN_QUEUE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING")
KILLED = -9  # return code of a job that left none
TERMINATED = (-15, 143)  # return codes of a command that ended on SIGTERM


class Cluster(NamedTuple):
    """Where jobs are submitted.

    Attributes:
      name: `slurm`, or `local` for processes of this machine.
      parameters: of submitit's executor, such as `{"slurm_partition": "gpu", "timeout_min": 600}`.
    """

    name: str
    parameters: Mapping[str, Any]


class Submitted(NamedTuple):
    """A job that is queued or running."""

    job: Job
    handle: "submitit.Job"
    started: float


class Command(NamedTuple):
    """The function of a job's task: runs the command and returns its exit code."""

    words: list[str]
    log: str
    attempts_file: str

    def __call__(self) -> int:
        """Run the command; all tasks print into one log, and the first records the attempt."""
        import submitit

        first = submitit.JobEnvironment().global_rank == 0
        with open(self.log, "a") as log:
            if first:
                begin_attempt(Path(self.attempts_file), log, self.words)
            with redacted(log) as printing:
                code = subprocess.call(
                    self.words,
                    stdin=subprocess.DEVNULL,
                    stdout=printing.stdin,
                    stderr=subprocess.STDOUT,
                )
            wait_until_printed(printing)
        if first and code not in TERMINATED:  # the launcher records that it cancelled a job
            with contextlib.suppress(OSError):
                attempts.append(Path(self.attempts_file), attempts.ended(code))
        return code


def in_queue(jobs: Sequence[Job], cluster: Cluster) -> dict[str, Submitted]:
    """Return the jobs, by name, that an earlier launcher submitted and that have not ended."""
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
      cluster: where to submit them.
      at_once: largest number of jobs in the queue.
      queued: the jobs that are in the queue already.

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
                job_id_file(one.job).unlink(missing_ok=True)
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
            job_id_file(one.job).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                attempts.append(one.job.attempts, attempts.ended(None, stopped=True))


def check(cluster: Cluster) -> None:
    """Refuse parameters that submitit does not accept, before anything is written.

    Raises:
      ValueError: with one line.
    """
    if importlib.util.find_spec("submitit") is None:
        raise ValueError("--cluster: submitit is not installed (pip install '.[slurm]')")
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


def job_id_file(job: Job) -> Path:
    """Return the file that holds the id of the cluster's job for a run, while it is in the queue."""
    return job.log.with_name(f"{job.name}.job")


def _executor(job: Job, cluster: Cluster) -> "submitit.AutoExecutor":
    """Return an executor that asks for what a job needs."""
    import submitit

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
        # Since Slurm 22.05, srun does not inherit the number of cores of a task. A job that Slurm requeued
        # would find its own record and refuse it; the launcher resumes the run when it is started again.
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
    files = (str(path.absolute()) for path in (job.log, job.attempts))
    handle = _executor(job, cluster).submit(Command(job.command, *files))
    if cluster.name == "slurm":
        try:
            job_id_file(job).write_text(handle.job_id)
        except OSError:
            handle.cancel(check=False)  # the next launcher could not find it
            raise
    return Submitted(job, handle, time.monotonic())


def _take_over(job: Job, cluster: Cluster) -> Submitted | None:
    """Return the job that an earlier launcher submitted for a run, if it is in the queue."""
    file = job_id_file(job)
    if cluster.name != "slurm" or not file.exists():
        return None
    import submitit

    handle = submitit.SlurmJob(_folder(job), file.read_text(), list(range(job.processes)))
    info = handle.get_info(mode="force")
    if not info:  # the job is unknown, or submitit has caught an error of sacct
        _check_sacct()
    state = info.get("State", "UNKNOWN")
    return Submitted(job, handle, time.monotonic()) if state in IN_QUEUE else None


def _check_sacct() -> None:
    """Raise a RuntimeError if Slurm's accounting does not answer."""
    try:
        done = subprocess.run(["sacct", "--noheader"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"sacct: {error}") from None
    if done.returncode:
        raise RuntimeError(f"sacct: {done.stderr.strip() or f'exit code {done.returncode}'}")


def _exit_code(handle: "submitit.Job") -> int:
    """Return the first exit code of a job's tasks that is not 0, else 0; `KILLED` if there is none."""
    import submitit

    try:
        return next((code for code in handle.results() if code), 0)
    except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError):
        return KILLED
