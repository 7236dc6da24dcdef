"""Train one configuration under several hardware settings, each in fresh processes, and read the records."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from cleanba.audit import local_processes
from cleanba.audit.matrix import Setting
from cleanba.record import Run, find_runs, read_run
from cleanba.run.flags import flags

# Seconds after which a run counts as hanging and is killed.
SECONDS_PER_TRIAL = 900
SECONDS_PER_EMULATED_TRIAL = 3600


class Program(NamedTuple):
    """A trainer and the options that all of its trials share."""

    script: Path
    options: Mapping[str, Any]  # see `cleanba.run.flags`

    def command(self, setting: Setting, runs_dir: Path) -> list[str]:
        """Return the command line that trains under a setting and records into a folder."""
        place = {"runs_dir": str(runs_dir), "study": "certify"}
        options = {**self.options, **setting.options(), **place}
        emulator = ["qemu-x86_64", "-cpu", setting.processor] if setting.processor else []
        return [*emulator, sys.executable, str(self.script), *flags(options)]


class Trial(NamedTuple):
    """What training under one setting led to: a completed run, or an error."""

    setting: Setting
    seconds: float
    run: Run | None  # the record; None if a process failed or no record was written
    error: str | None


def run_trial(program: Program, setting: Setting, runs_dir: Path) -> Trial:
    """Train under one setting, in as many processes as its layout has."""
    start = time.perf_counter()
    cores = sorted(os.sched_getaffinity(0))[: setting.cores]
    processes = local_processes.start(
        program.command(setting, runs_dir),
        setting.layout.processes,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    for process in processes:
        os.sched_setaffinity(process.pid, cores)  # before it starts threads, which inherit it
    limit = SECONDS_PER_EMULATED_TRIAL if setting.processor else SECONDS_PER_TRIAL
    timer = threading.Timer(limit, lambda: [p.kill() for p in processes])
    timer.start()
    with ThreadPoolExecutor(
        len(processes)
    ) as pool:  # a full pipe would stop a process, and so the others
        messages = list(pool.map(lambda process: process.communicate()[1], processes))
    timer.cancel()
    seconds = time.perf_counter() - start
    for process, message in zip(processes, messages, strict=True):
        if process.returncode:
            last_line = (message.strip().splitlines() or ["no message"])[-1]
            return Trial(setting, seconds, None, f"exit code {process.returncode}: {last_line}")
    found = [path for path in find_runs(runs_dir) if f"__{setting.name}__" in path.name]
    if not found:
        return Trial(setting, seconds, None, "no record was written")
    run = read_run(found[0])
    return Trial(setting, seconds, run, None if run.completed else run.problems[0])


def batches(settings: Sequence[Setting], jobs: int) -> list[list[Setting]]:
    """Split settings into batches that run at once, of at most `jobs` processes.

    A setting of more processes than that is a batch by itself.
    """
    result: list[list[Setting]] = []
    free = 0
    for setting in sorted(settings, key=lambda x: x.layout.processes):
        if setting.layout.processes > free:
            result.append([])
            free = jobs
        result[-1].append(setting)
        free -= setting.layout.processes
    return result


def run_trials(
    program: Program, settings: Sequence[Setting], runs_dir: Path, jobs: int
) -> list[Trial]:
    """Train under several settings, `jobs` processes at a time; return the trials in the settings' order."""
    trials: dict[Setting, Trial] = {}
    for batch in batches(settings, jobs):
        with ThreadPoolExecutor(len(batch)) as pool:
            found = pool.map(lambda setting: run_trial(program, setting, runs_dir), batch)
            trials |= zip(batch, found, strict=True)
    return [trials[setting] for setting in settings]
