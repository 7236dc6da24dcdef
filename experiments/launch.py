"""Runs a study: `python -m experiments.launch quickstart`.

Each run is a process of its own, pinned to the CPU cores and GPUs of its hardware setting; several work
at once when these allow. Completed runs are kept: started again, the launcher does what is left, and
goes on with what was interrupted (from a checkpoint, for systems that make some; others begin again).
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from rich.console import Console

from experiments import cluster, display, pool, state, systems
from experiments.state import State, Status
from experiments.study import PlannedRun, Study, StudyError, find_study, load_study

SHUTDOWN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
      0 if every run of the study is completed (or only shown), 1 if not, 2 for bad input, and
      128 + the number of the signal that stopped it.
    """
    options = _parser().parse_args(argv)
    try:
        return _launch(options)
    except StudyError as error:
        return _bad_input(str(error))
    except OSError as error:
        return _bad_input(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _launch(options: argparse.Namespace) -> int:
    path = find_study(options.study)
    study = load_study(path, options.preset)
    systems.check_systems(study.runs)
    check_cluster(options)
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
                queued = in_queue(jobs, options)
                # what is not in the queue any more has ended, but maybe not before the jobs were made
                jobs = make_jobs(study, runs_dir, options.retry)
                ticks = start(jobs, options, lock, queued)
                cores = None if options.cluster else len(pool.available_cores())
                statuses = run_study(console, study, runs_dir, jobs, ticks, stopped, cores)
                display.show_result(console, study, statuses, runs_dir, bool(stopped))
        if stopped:
            return 128 + stopped[0]
    return 0 if all(status.state is State.COMPLETED for status in statuses.values()) else 1


def check_cluster(options: argparse.Namespace) -> None:
    """Refuse a cluster that is not there, or options that it does not take.

    Raises:
      StudyError: with one line.
    """
    if options.cluster_option and not options.cluster:
        raise StudyError("--cluster-option: there is no --cluster")
    if options.cluster == "slurm" and shutil.which("srun") is None:
        raise StudyError("--cluster slurm: there is no srun here")
    if options.cluster:
        try:
            cluster.check(cluster.Cluster(options.cluster, dict(options.cluster_option)))
        except ValueError as error:
            raise StudyError(str(error)) from None


def inspect_all(study: Study, runs_dir: Path, locked: bool = False) -> dict[str, Status]:
    """Return where each run of a study stands, by the run's name."""
    return {run.name: state.inspect(run, runs_dir, locked) for run in study.runs}


def to_start(study: Study, statuses: Mapping[str, Status], retry: bool) -> list[PlannedRun]:
    """Return the runs to start: what was not tried or was interrupted, and on request what failed."""
    wanted = {State.TO_DO, State.INTERRUPTED, *([State.FAILED] if retry else [])}
    return [run for run in study.runs if statuses[run.name].state in wanted]


def make_jobs(study: Study, runs_dir: Path, retry: bool) -> list[pool.Job]:
    """Return the commands of the runs that are left of a study, and what each needs.

    Args:
      study: the study.
      runs_dir: folder of all studies' records.
      retry: whether to run again what failed.
    """
    statuses = inspect_all(study, runs_dir)
    return [
        pool.Job(
            name=run.name,
            command=systems.command(run, runs_dir, state.how_again(statuses[run.name])),
            log=state.log_file(run, runs_dir),
            cores=run.setting.cores,
            processes=run.setting.processes,
            gpus=run.setting.gpus,
            nodes=run.setting.nodes,
        )
        for run in to_start(study, statuses, retry)
    ]


def in_queue(jobs: Sequence[pool.Job], options: argparse.Namespace) -> dict[str, cluster.Submitted]:
    """Return those of the jobs, by name, that are in Slurm's queue, where Slurm is asked for."""
    if options.cluster != "slurm":
        return {}
    where = cluster.Cluster(options.cluster, dict(options.cluster_option))
    try:
        return cluster.in_queue(jobs, where)
    except RuntimeError as error:  # submitit's errors are such: better stop than submit a run twice
        raise StudyError(
            f"cannot tell what is in Slurm's queue: {' '.join(str(error).split())}"
        ) from None


def start(
    jobs: Sequence[pool.Job],
    options: argparse.Namespace,
    lock: int,
    queued: Mapping[str, cluster.Submitted] = MappingProxyType({}),
) -> Iterator[pool.Tick]:
    """Return what runs jobs: on this machine, or on a cluster.

    Args:
      jobs: to run.
      options: of the command line.
      lock: descriptor of the study's lock, which the runs on this machine inherit.
      queued: those of the jobs that are in Slurm's queue already.

    Raises:
      StudyError: if a run is in Slurm's queue already, but Slurm is not asked for.
    """
    submitted = [job for job in jobs if cluster.note_of(job).exists()]
    if options.cluster == "slurm" or (options.cluster and not submitted):
        where = cluster.Cluster(options.cluster, dict(options.cluster_option))
        return cluster.run_jobs(jobs, where, options.jobs or len(jobs), queued)
    if submitted:
        raise StudyError(
            f"{submitted[0].name} was submitted to Slurm: say --cluster slurm to wait for it, or delete "
            f"{cluster.note_of(submitted[0])}"
        )
    cores = pool.available_cores()
    gpus = pool.available_gpus()
    return pool.run_jobs(jobs, cores, options.jobs or len(cores), keep_open=[lock], gpus=gpus)


def run_study(
    console: Console,
    study: Study,
    runs_dir: Path,
    jobs: Sequence[pool.Job],
    ticks: Iterator[pool.Tick],
    stopped: Sequence[int],
    cores: int | None,
) -> dict[str, Status]:
    """Run what is left of a study, and show how it goes.

    Args:
      console: where to show it.
      study: the study.
      runs_dir: folder of all studies' records.
      jobs: what is left.
      ticks: runs them.
      stopped: becomes non-empty when the launcher is to stop.
      cores: that the jobs share; None where nobody knows.

    Returns:
      Where each run stands in the end, by its name.
    """
    planned = {run.name: run for run in study.runs}
    runs = {job.name: planned[job.name] for job in jobs}
    statuses = inspect_all(study, runs_dir)
    for run in study.runs:
        if run.name not in runs:  # it may have ended after its launcher
            state.keep_log(run, runs_dir)
    display.printer(console)(display.plan_line(study, list(runs.values())))
    statuses |= {name: Status(State.TO_DO) for name in runs}
    begin = time.monotonic()
    ended_runs: list[pool.Ended] = []
    with display.open_display(console) as show, contextlib.closing(ticks):
        for tick in ticks:
            for ended in tick.ended:
                run = runs[ended.job.name]
                state.keep_log(run, runs_dir)
                statuses[run.name] = _status_after(ended, state.inspect(run, runs_dir))
                ended_runs.append(ended)
                count, total = len(ended_runs), len(jobs)
                show.line(display.ended_line(run, statuses[run.name], ended.seconds, count, total))
            working = [one.job.name for one in tick.active]
            statuses |= {name: Status(State.RUNNING) for name in working}
            if show.is_due():
                progress = {name: _part_done(runs[name], runs_dir) for name in working}
                elapsed = time.monotonic() - begin
                left = _seconds_left(ended_runs, jobs, cores)
                show.update(display.Snapshot(study, statuses, progress, elapsed, left))
            if stopped:
                break
    for name in [name for name, status in statuses.items() if status.state is State.RUNNING]:
        statuses[name] = state.inspect(runs[name], runs_dir)
    return statuses


def keep_copy(study: Study, path: Path, directory: Path) -> None:
    """Keep the study file with the records, so that a report can say what was asked.

    Raises:
      StudyError: if the records there are of a study of another title, or nobody can tell.
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
    new = copy.with_suffix(".new")
    new.write_bytes(path.read_bytes())
    new.replace(copy)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.launch",
        description="Run a study; completed runs are kept, and what is left is run.",
    )
    parser.add_argument("study", help="name of a study in experiments/studies, or a TOML file")
    parser.add_argument("--preset", help="size of the study: cpu (default), paper, ...")
    parser.add_argument("--dry-run", action="store_true", help="show the plan and run nothing")
    parser.add_argument("--runs-dir", default="runs", help="folder of all records (default: runs)")
    parser.add_argument(
        "--retry",
        action="store_true",
        help="run again what failed, from its last checkpoint or deleting what it left behind",
    )
    parser.add_argument(
        "--cluster",
        choices=("slurm", "local"),
        help="submit the runs through submitit: to Slurm, or to try it out as processes of this machine",
    )
    parser.add_argument(
        "--cluster-option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of submitit's executor, such as slurm_partition=gpu or timeout_min=600",
    )
    parser.add_argument(
        "--jobs", type=_positive, help="runs at once (default: as many as the cores allow)"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _option(text: str) -> tuple[str, int | str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, int(value) if re.fullmatch("0|[1-9][0-9]*", value) else value  # 0123 is an account


def _bad_input(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def _stop_flag() -> Iterator[list[int]]:
    """Collect shutdown signals; the second one interrupts whatever is going on."""
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
    """Hold the study's lock; wait for it while another launcher or its runs are at work."""
    told = False
    while not stopped:
        with state.study_lock(directory) as lock:
            if lock is not None:
                yield lock
                return
        if not told:
            display.printer(console)(
                "another launcher, or runs that it left behind, are at work on this study: "
                "waiting for them to end"
            )
            told = True
        time.sleep(pool.POLL_SECONDS)
    yield None


def _status_after(ended: pool.Ended, on_disk: Status) -> Status:
    """Join what the disk says of a run that has just ended with how its process ended."""
    if ended.exit_code is None:
        return Status(State.FAILED, ended.error)
    if on_disk.state is State.COMPLETED:
        if ended.exit_code != 0:
            return Status(State.FAILED, f"exit code {ended.exit_code} after a completed record")
        return on_disk
    if on_disk.state is State.TO_DO:
        return Status(State.FAILED, f"exit code {ended.exit_code}, and no record")
    if ended.exit_code < 0:
        return Status(on_disk.state, f"{on_disk.note} (signal {-ended.exit_code})")
    if on_disk.state is State.INTERRUPTED and state.gave_up(ended.exit_code):
        # where the disk is full, even its log cannot say so
        words = state.last_words(ended.job.log)
        return on_disk._replace(state=State.FAILED, note=f"exit code {ended.exit_code}: {words}")
    return on_disk


def _part_done(run: PlannedRun, runs_dir: Path) -> float:
    return min(1.0, state.steps_done(run, runs_dir) / run.total_timesteps)


def _seconds_left(
    ended: Sequence[pool.Ended], jobs: Sequence[pool.Job], cores: int | None
) -> float | None:
    """Guess the time left: runs to come take as long per core as those that have ended."""
    if not ended or cores is None:
        return None
    spent = sum(one.seconds * min(one.job.cores, cores) for one in ended)
    asked = sum(min(one.job.cores, cores) for one in ended)
    still = sum(min(job.cores, cores) for job in jobs) - asked
    return spent / asked * still / cores


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has left (`| head`): end quietly
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
