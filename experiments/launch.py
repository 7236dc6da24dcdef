"""Runs a study: `python -m experiments.launch quickstart`.

Each run is a process of its own, pinned to the CPU cores of its hardware setting; several work at
once when the cores allow. Completed runs are kept: started again, the launcher does what is left, and
goes on with what was interrupted (from a checkpoint, for systems that make some; others begin again).
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from experiments import display, pool, state, systems
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
        return _bad_input(f"{error.filename}: {error.strerror}")


def _launch(options: argparse.Namespace) -> int:
    path = find_study(options.study)
    study = load_study(path, options.preset)
    systems.check_systems(study.runs)
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
                keep_copy(path, directory)
                retry, at_once = options.retry, options.jobs
                statuses = run_study(console, study, runs_dir, retry, at_once, lock, stopped)
                display.show_result(console, study, statuses, runs_dir, bool(stopped))
        if stopped:
            return 128 + stopped[0]
    return 0 if all(status.state is State.COMPLETED for status in statuses.values()) else 1


def inspect_all(study: Study, runs_dir: Path, locked: bool = False) -> dict[str, Status]:
    """Return where each run of a study stands, by the run's name."""
    return {run.name: state.inspect(run, runs_dir, locked) for run in study.runs}


def to_start(study: Study, statuses: Mapping[str, Status], retry: bool) -> list[PlannedRun]:
    """Return the runs to start: what was not tried or was interrupted, and on request what failed."""
    wanted = {State.TO_DO, State.INTERRUPTED, *([State.FAILED] if retry else [])}
    return [run for run in study.runs if statuses[run.name].state in wanted]


def run_study(
    console: Console,
    study: Study,
    runs_dir: Path,
    retry: bool,
    at_once: int | None,
    lock: int,
    stopped: Sequence[int],
) -> dict[str, Status]:
    """Run what is left of a study, and show how it goes.

    Args:
      console: where to show it.
      study: the study.
      runs_dir: folder of all studies' records.
      retry: whether to run again what failed.
      at_once: never run more than this at once; None lets the cores decide.
      lock: descriptor of the study's lock, which the runs inherit.
      stopped: becomes non-empty when the launcher is to stop.

    Returns:
      Where each run stands in the end, by its name.
    """
    statuses = inspect_all(study, runs_dir)
    runs = {run.name: run for run in to_start(study, statuses, retry)}
    display.printer(console)(display.plan_line(study, list(runs.values())))
    jobs = [
        pool.Job(
            name=name,
            command=systems.command(run, runs_dir, state.how_again(statuses[name])),
            log=state.log_file(run, runs_dir),
            cores=run.setting.cores,
        )
        for name, run in runs.items()
    ]
    statuses |= {name: Status(State.TO_DO) for name in runs}
    cores = pool.available_cores()
    ticks = pool.run_jobs(jobs, cores, at_once or len(cores), keep_open=[lock])
    begin = time.monotonic()
    ended_runs: list[pool.Ended] = []
    with display.open_display(console) as show, contextlib.closing(ticks):
        for tick in ticks:
            for ended in tick.ended:
                run = runs[ended.job.name]
                statuses[run.name] = _status_after(ended, state.inspect(run, runs_dir))
                ended_runs.append(ended)
                count, total = len(ended_runs), len(jobs)
                show.line(display.ended_line(run, statuses[run.name], ended.seconds, count, total))
            working = [one.job.name for one in tick.active]
            statuses |= {name: Status(State.RUNNING) for name in working}
            if show.is_due():
                progress = {name: _part_done(runs[name], runs_dir) for name in working}
                elapsed = time.monotonic() - begin
                left = _seconds_left(ended_runs, jobs, len(cores))
                show.update(display.Snapshot(study, statuses, progress, elapsed, left))
            if stopped:
                break
    for name in [name for name, status in statuses.items() if status.state is State.RUNNING]:
        statuses[name] = state.inspect(runs[name], runs_dir)
    return statuses


def keep_copy(path: Path, directory: Path) -> None:
    """Keep the study file with the records, so that a report can say what was asked."""
    copy = directory / "study.toml"
    if not copy.exists() or not path.samefile(copy):
        copy.write_bytes(path.read_bytes())


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
        help="run again what failed, deleting what it left behind",
    )
    parser.add_argument(
        "--jobs", type=_positive, help="runs at once (default: as many as the cores allow)"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


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
    return on_disk


def _part_done(run: PlannedRun, runs_dir: Path) -> float:
    return min(1.0, state.steps_done(run, runs_dir) / run.total_timesteps)


def _seconds_left(
    ended: Sequence[pool.Ended], jobs: Sequence[pool.Job], cores: int
) -> float | None:
    """Guess the time left: runs to come take as long per core as those that have ended."""
    if not ended:
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
