"""Run a program in several processes on this machine, with the environment variables that Slurm would set.

    python -m cleanba.audit.local_processes 2 cleanba/cleanba_ppo.py --distributed ...

On a cluster, use `srun --ntasks 2 python` instead.
"""

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from cleanba.exact.placement import HEARTBEAT_TIMEOUT

# Seconds that the other processes have to exit by themselves once one has failed: they miss its heartbeat.
GRACE_SECONDS = HEARTBEAT_TIMEOUT + 30
POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1  # of sys/prctl.h


_job_ids = itertools.count(os.getpid() * 8)


def find_job_id() -> int:
    """Return a job id whose port is free: jax derives the coordinator's port from it."""
    for job in itertools.islice(_job_ids, 2**12):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("localhost", job % 2**12 + 65535 - 2**12 + 1))
            return job
    raise OSError("no port is free for the coordinator of the processes")


def variables(rank: int, count: int, job: int) -> dict[str, str]:
    """Return the environment variables that Slurm would set for one of several processes on this machine.

    Args:
      rank: index of the process.
      count: number of processes.
      job: job id, the same for all processes.
    """
    values = {
        "SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": count,
        "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_NODES": 1,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def start(command: Sequence[str], count: int, **options: Any) -> list[subprocess.Popen]:
    """Start a program in several processes.

    Args:
      command: the command line of each.
      count: number of processes.
      options: of `subprocess.Popen`.

    Returns:
      The processes, by rank.
    """
    job = find_job_id()
    return [
        subprocess.Popen(command, env=os.environ | variables(rank, count, job), **options)
        for rank in range(count)
    ]


def wait(processes: Sequence[subprocess.Popen], grace: float = GRACE_SECONDS) -> int:
    """Wait until all processes have exited; kill the rest some seconds after the first failure.

    Args:
      processes: to wait for.
      grace: seconds between the first failure and the kill.

    Returns:
      The exit code of the first process that failed, or 128 + the number of the signal that ended it; 0 if
      none failed.
    """
    code, deadline = 0, float("inf")
    while alive := [process for process in processes if process.poll() is None]:
        failed = next((p.returncode for p in processes if p.returncode), 0)
        if failed and not code:
            code, deadline = failed, time.monotonic() + grace
        if time.monotonic() > deadline:
            for process in alive:
                process.kill()
        time.sleep(POLL_SECONDS)
    code = code or next((p.returncode for p in processes if p.returncode), 0)
    return code if code >= 0 else 128 - code


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the exit code of the run, or 2 for bad input."""
    if len(argv) < 2 or not argv[0].isdecimal() or int(argv[0]) < 1:
        print(
            "error: usage: python -m cleanba.audit.local_processes NUMBER PROGRAM ...",
            file=sys.stderr,
        )
        return 2
    processes: list[subprocess.Popen] = []
    early: list[int] = []  # signals that arrived before the processes were started

    def forward(number: int, frame: object) -> None:
        if not processes:
            early.append(number)
        for process in processes:
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    started = start(
        [sys.executable, *argv[1:]],
        int(argv[0]),
        start_new_session=True,  # a signal to this process group reaches them once, forwarded from here
        close_fds=False,  # they inherit a study's lock
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    processes += started
    for number in early:
        forward(number, None)
    return wait(processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
