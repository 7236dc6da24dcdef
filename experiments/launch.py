"""Runs a study: `python -m experiments.launch quickstart`.

Each run is a separate process, pinned to the CPU cores and GPUs of its hardware setting; several run at
once if there are enough. Completed runs are kept. When started again, the launcher runs the remaining
ones; interrupted runs are resumed from a checkpoint if their system writes checkpoints, else restarted.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import tyro
from rich.console import Console

from cleanba.record import replace_file
from cleanba.run.arguments import Count
from cleanba.run.command_line import BadInput, parse
from experiments import attempts, cluster, display, pool, state, systems
from experiments.cluster import Cluster
from experiments.flag_check import check_flags
from experiments.state import State, Status
from experiments.study import (
    PlannedRun,
    Study,
    StudyError,
    check_systems,
    find_study,
    load_study,
)
from experiments.time_left import Work, seconds_left

SHUTDOWN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Options:
    """Run a study: completed runs are kept, and the others are run."""

    study: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STUDY")]
    """Name of a study in experiments/studies, or a TOML file."""
    preset: str | None = None
    """Size of the study: cpu (default), paper, ..."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show the plan, and run nothing."""
    runs_dir: str = "runs"
    """Folder of all records."""
    retry: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run failed runs again. Those that have not recorded their failure are resumed, if they can be; the
    records of the others are deleted, and they start over."""
    cluster: Literal["slurm", "local"] | None = None
    """Submit the runs through submitit: to Slurm, or, to try it out, as processes of this machine."""
    cluster_option: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """NAME=VALUE, a parameter of submitit's executor, such as slurm_partition=gpu or timeout_min=600;
    can be repeated."""
    jobs: Count | None = None
    """Largest number of runs at once (default: as many as the cores allow)."""


def main(argv: Sequence[str]) -> int:
    """Run the command line.

    Returns:
      0 if every run of the study is completed (or only shown), 1 if not, 2 for bad input, and
      128 + the number of the signal that stopped it.
    """
    try:
        return launch(parse(Options, argv, "Run a study."))
    except (BadInput, StudyError) as error:
        return _bad_input(str(error))
    except OSError as error:
        return _bad_input(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:  # before the first run; later ones are stopped in order
        return 130


def launch(options: Options) -> int:
    """Run a study, or show its plan; returns the exit code of `main`.

    Raises:
      StudyError: with one line, for bad input.
      OSError: if the folder of records cannot be written.
    """
    path = find_study(options.study)
    study = load_study(path, options.preset)
    check_systems(study.runs)
    check_flags(study.runs)
    where = find_cluster(options)
    runs_dir = Path(options.runs_dir)
    directory = runs_dir / study.name
    console = display.make_console()
    if options.dry_run:
        statuses = inspect_all(study, runs_dir, state.is_locked(directory))
        runs = to_start(study, statuses, options.retry)
        display.show_plan(console, study, statuses, runs, runs_dir)
        return 0
    directory.mkdir(parents=True, exist_ok=True)
    with _stop_flag() as stopped:
        with _locked(console, directory, stopped) as lock:
            if lock is not None:
                keep_copy(study, path, directory)
                jobs = make_jobs(study, runs_dir, options.retry)
                queued = in_queue(jobs, where)
                # A job that has just left the queue has ended, but possibly after `jobs` was computed.
                jobs = make_jobs(study, runs_dir, options.retry)
                ticks = start(jobs, where, options.jobs, lock, queued)
                cores = None if where else usable_cores(jobs, options.jobs)
                statuses = run_study(console, study, runs_dir, jobs, ticks, stopped, cores)
                display.show_result(console, study, statuses, runs_dir, bool(stopped))
        if stopped:
            return 128 + stopped[0]
    return 0 if all(status.state is State.COMPLETED for status in statuses.values()) else 1


def find_cluster(options: Options) -> Cluster | None:
    """Return the cluster that the options ask for, or None for this machine.

    Raises:
      StudyError: with one line, if it does not exist or does not accept the options.
    """
    if options.cluster is None:
        if options.cluster_option:
            raise StudyError("--cluster-option needs --cluster")
        return None
    where = Cluster(options.cluster, dict(map(_name_and_value, options.cluster_option)))
    if options.cluster == "slurm" and shutil.which("srun") is None:
        raise StudyError("--cluster slurm: there is no srun on this machine")
    try:
        cluster.check(where)
    except ValueError as error:
        raise StudyError(str(error)) from None
    return where


def _name_and_value(text: str) -> tuple[str, int | str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise StudyError(f"--cluster-option {text}: must be NAME=VALUE")
    return name, int(value) if re.fullmatch(
        "0|[1-9][0-9]*", value
    ) else value  # not 0123, an account


def inspect_all(study: Study, runs_dir: Path, locked: bool = False) -> dict[str, Status]:
    """Return the status of each run of a study, by the run's name."""
    return {run.name: state.inspect(run, runs_dir, locked) for run in study.runs}


def to_start(study: Study, statuses: Mapping[str, Status], retry: bool) -> list[PlannedRun]:
    """Return the runs to start: those not tried or interrupted, and with `retry` those that failed."""
    wanted = {State.TO_DO, State.INTERRUPTED, *([State.FAILED] if retry else [])}
    return [run for run in study.runs if statuses[run.name].state in wanted]


def make_jobs(study: Study, runs_dir: Path, retry: bool) -> list[pool.Job]:
    """Return a job for each run that is left of a study.

    Args:
      study: the study.
      runs_dir: folder of all studies' records.
      retry: whether to run failed runs again.
    """
    statuses = inspect_all(study, runs_dir)
    return [
        pool.Job(
            name=run.name,
            command=systems.command(run, runs_dir, state.restart_flag(run, statuses[run.name])),
            log=state.log_file(run, runs_dir),
            cores=run.setting.cores,
            processes=run.setting.processes,
            gpus=run.setting.gpus,
            nodes=run.setting.nodes,
        )
        for run in to_start(study, statuses, retry)
    ]


def in_queue(jobs: Sequence[pool.Job], where: Cluster | None) -> dict[str, cluster.Submitted]:
    """Return the jobs, by name, that are in Slurm's queue, if Slurm is asked for.

    Raises:
      StudyError: if Slurm cannot tell: a run must not be submitted twice.
    """
    if where is None or where.name != "slurm":
        return {}
    try:
        return cluster.in_queue(jobs, where)
    except RuntimeError as error:  # as submitit raises
        raise StudyError(
            f"cannot tell what is in Slurm's queue: {' '.join(str(error).split())}"
        ) from None


def start(
    jobs: Sequence[pool.Job],
    where: Cluster | None,
    at_once: int | None,
    lock: int,
    queued: Mapping[str, cluster.Submitted] = MappingProxyType({}),
) -> Iterator[pool.Tick]:
    """Return the iterator that runs jobs, on this machine or on a cluster.

    Args:
      jobs: to run.
      where: the cluster, or None for this machine.
      at_once: largest number of jobs at once; None: limited only by the cores.
      lock: descriptor of the study's lock, which the runs on this machine inherit.
      queued: the jobs that are in Slurm's queue already.

    Raises:
      StudyError: if a run was submitted to Slurm, but Slurm is not asked for.
    """
    submitted = [job for job in jobs if cluster.job_id_file(job).exists()]
    if submitted and (where is None or where.name != "slurm"):
        raise StudyError(
            f"{submitted[0].name} was submitted to Slurm: use --cluster slurm to wait for it, or delete "
            f"{cluster.job_id_file(submitted[0])}"
        )
    if where is not None:
        return cluster.run_jobs(jobs, where, at_once or len(jobs), queued)
    cores = pool.available_cores()
    gpus = pool.available_gpus()
    return pool.run_jobs(jobs, cores, at_once or len(cores), keep_open=[lock], gpus=gpus)


def usable_cores(jobs: Sequence[pool.Job], at_once: int | None) -> int:
    """Return the largest number of this machine's cores that jobs can occupy, `at_once` jobs at a time."""
    largest = sorted((job.cores for job in jobs), reverse=True)[:at_once]
    return min(sum(largest), len(pool.available_cores()))


def run_study(
    console: Console,
    study: Study,
    runs_dir: Path,
    jobs: Sequence[pool.Job],
    ticks: Iterator[pool.Tick],
    stopped: Sequence[int],
    cores: int | None,
) -> dict[str, Status]:
    """Run what is left of a study, and show its progress.

    Args:
      console: where to show it.
      study: the study.
      runs_dir: folder of all studies' records.
      jobs: those that are left.
      ticks: the iterator that runs them.
      stopped: becomes non-empty when the launcher has to stop.
      cores: that the jobs can occupy; None if unknown.

    Returns:
      The final status of each run, by its name.
    """
    planned = {run.name: run for run in study.runs}
    runs = {job.name: planned[job.name] for job in jobs}
    statuses = inspect_all(study, runs_dir)
    for run in study.runs:
        if run.name not in runs:  # it may have outlived its launcher
            state.keep_log(run, runs_dir)
    display.printer(console)(display.plan_line(study, statuses, list(runs.values()), runs_dir))
    statuses |= {name: Status(State.TO_DO) for name in runs}
    begin = time.monotonic()
    work = {}
    for job in jobs:
        steps = state.steps_done(runs[job.name], runs_dir)
        work[job.name] = Work(job.cores, runs[job.name].total_timesteps, start=steps, steps=steps)
    with display.open_display(console) as show, contextlib.closing(ticks):
        for tick in ticks:
            for ended in tick.ended:
                run = runs[ended.job.name]
                state.keep_log(run, runs_dir)
                statuses[run.name] = _status_after(ended, run, runs_dir)
                work[run.name].update(state.steps_done(run, runs_dir), ended.seconds, ended=True)
                count = sum(one.ended for one in work.values())
                show.line(
                    display.ended_line(run, statuses[run.name], ended.seconds, count, len(jobs))
                )
            running = [one.job.name for one in tick.active]
            statuses |= {name: Status(State.RUNNING) for name in running}
            if show.is_due():
                now = time.monotonic()
                for one in tick.active:
                    name = one.job.name
                    work[name].update(state.steps_done(runs[name], runs_dir), now - one.started)
                progress = {name: work[name].part_done for name in running}
                left = None if cores is None else seconds_left(list(work.values()), cores)
                show.update(display.Snapshot(study, statuses, progress, now - begin, left))
            if stopped:
                break
    for name in [name for name, status in statuses.items() if status.state is State.RUNNING]:
        statuses[name] = state.inspect(runs[name], runs_dir)
    return statuses


def keep_copy(study: Study, path: Path, directory: Path) -> None:
    """Copy the study file to its records, so that a report knows the question and the planned runs.

    Raises:
      StudyError: if the records there are of a study with another title, or their study is not readable.
    """
    copy = directory / "study.toml"
    if copy.exists():
        if path.samefile(copy):
            return
        way_out = f"choose another --runs-dir, or delete {copy}"
        try:
            title = load_study(copy).title
        except StudyError as error:
            raise StudyError(f"{error}: {way_out}") from None
        if title != study.title:
            raise StudyError(
                f"{directory} holds the records of another study, {title!r}: {way_out}"
            )
    replace_file(copy, path.read_bytes())


def _bad_input(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def _stop_flag() -> Iterator[list[int]]:
    """Collect shutdown signals; the second one raises KeyboardInterrupt."""
    stopped: list[int] = []

    def note(number: int, frame: object) -> None:
        stopped.append(number)
        if len(stopped) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in SHUTDOWN_SIGNALS}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _locked(console: Console, directory: Path, stopped: Sequence[int]) -> Iterator[int | None]:
    """Hold the study's lock; wait for it while another launcher or its runs are active."""
    told = False
    while not stopped:
        with state.study_lock(directory) as lock:
            if lock is not None:
                yield lock
                return
        if not told:
            display.printer(console)(
                "another launcher of this study, or runs that it left behind, are active: "
                "waiting for them to end"
            )
            told = True
        time.sleep(pool.POLL_SECONDS)
    yield None


def _status_after(ended: pool.Ended, run: PlannedRun, runs_dir: Path) -> Status:
    """Combine the status of a run that has just ended with how its process ended."""
    on_disk, code = state.inspect(run, runs_dir), ended.exit_code
    if code is None:
        return Status(State.FAILED, ended.error)
    if on_disk.state is State.COMPLETED:
        if code != 0:
            return Status(State.FAILED, f"exit code {code} after a completed record")
        return on_disk
    if on_disk.state is State.TO_DO:
        return Status(State.FAILED, f"exit code {code}, and no record")
    if code < 0:
        return Status(on_disk.state, f"{on_disk.note} (signal {-code})")
    if on_disk.state is State.INTERRUPTED and attempts.exited_with_error(code):
        # On a full disk, the file of attempts could not take the exit code either.
        note = f"exit code {code}: {state.last_words(run, runs_dir)}"
        return on_disk._replace(state=State.FAILED, note=note)
    return on_disk


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # stdout was closed, as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
