"""Runs a program in several processes on this machine, each with the variables that Slurm would set for it.

    python -m cleanba.local_processes 2 cleanba/cleanba_ppo.py --distributed ...

On a cluster `srun --ntasks 2 python` takes the place of this.
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

from cleanba.placement import HEARTBEAT_TIMEOUT

# Seconds that the others have to end by themselves once one has failed: they notice by its heartbeat.
GRACE_SECONDS = HEARTBEAT_TIMEOUT + 30
POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1  # of sys/prctl.h


_job_ids = itertools.count(os.getpid() * 8)


def find_job_id() -> int:
    """Return a number for a job whose port is free: jax makes the coordinator's port from it."""
    for job in itertools.islice(_job_ids, 2**12):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("localhost", job % 2**12 + 65535 - 2**12 + 1))
            return job
    raise OSError("no port is free for the processes to meet at")


def variables(rank: int, count: int, job: int) -> dict[str, str]:
    """Return what Slurm would set for one of several processes on this machine.

    Args:
      rank: of the process.
      count: number of processes.
      job: number of the job, the same for all of them.
    """
    values = {
        "SLURM_JOB_ID": job, "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": count,
        "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_NODES": 1,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def start(command: Sequence[str], count: int, **options: Any) -> list[subprocess.Popen]:
    """Start a program in several processes.

    Args:
      command: its words.
      count: number of processes.
      options: of `subprocess.Popen`.
    """
    job = find_job_id()
    return [
        subprocess.Popen(command, env=os.environ | variables(rank, count, job), **options)
        for rank in range(count)
    ]


def wait(processes: Sequence[subprocess.Popen], grace: float = GRACE_SECONDS) -> int:
    """Wait until all have ended; once one has failed, the others have some seconds left.

    Returns:
      The exit code of the first that failed, 128 + the number of its signal if one ended it; else 0.
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
    """Run the command line; returns the exit code of the run, or 2 for bad input."""
    if len(argv) < 2 or not argv[0].isdecimal() or int(argv[0]) < 1:
        print("error: usage: python -m cleanba.local_processes NUMBER PROGRAM ...", file=sys.stderr)
        return 2
    processes: list[subprocess.Popen] = []
    early: list[int] = []  # signals that came before there was anybody to hear them

    def pass_on(number: int, frame: object) -> None:
        if not processes:
            early.append(number)
        for process in processes:
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    started = start(
        [sys.executable, *argv[1:]],
        int(argv[0]),
        start_new_session=True,  # a signal to this process's group reaches them once: from here
        close_fds=False,  # a study's lock is theirs too
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    processes += started
    for number in early:
        pass_on(number, None)
    return wait(processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
