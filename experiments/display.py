"""How the launcher shows a study: a live table on a terminal, lines in a log file."""

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from experiments import pool, state, systems
from experiments.state import State, Status
from experiments.study import PlannedRun, Study

TABLE_SECONDS = 1.0
HEARTBEAT_SECONDS = 60.0  # between two lines where stdout is not a terminal
PLAIN_WIDTH = 120
MINUTES_OF_A_DAY = 24 * 60


class Snapshot(NamedTuple):
    """The state of a study at one moment."""

    study: Study
    statuses: Mapping[str, Status]  # by name of the run
    progress: Mapping[str, float]  # share done of each running run, by name
    elapsed: float  # seconds
    left: float | None  # seconds, an estimate


def make_console() -> Console:
    """Return a console for stdout, with a fixed width if stdout is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH, force_terminal=False)


def printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints text literally: text from a record must not be read as markup."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    return say


class LiveDisplay:
    """A table that is updated in place."""

    def __init__(self, live: Live):
        self.live = live
        self.shown = 0.0

    def line(self, text: str) -> None:
        """Ignore an event: the table shows it."""

    def is_due(self) -> bool:
        """Whether an update is due."""
        return time.monotonic() - self.shown >= TABLE_SECONDS

    def update(self, now: Snapshot) -> None:
        """Show the state of the study."""
        table = study_table(now.study, now.statuses, now.progress)
        table.caption = summary(now)
        table.caption_justify = "left"
        self.live.update(table, refresh=True)
        self.shown = time.monotonic()


class LineDisplay:
    """A line for each event, and one per minute."""

    def __init__(self, console: Console):
        self.line = printer(console)
        self.shown = time.monotonic()

    def is_due(self) -> bool:
        """Whether an update is due."""
        return time.monotonic() - self.shown >= HEARTBEAT_SECONDS

    def update(self, now: Snapshot) -> None:
        """Print the state of the study in a line."""
        working = ", ".join(f"{name} {part:.0%}" for name, part in now.progress.items())
        self.line(f"{summary(now)}; running: {working or 'nothing'}")
        self.shown = time.monotonic()


@contextlib.contextmanager
def open_display(console: Console) -> Iterator[LiveDisplay | LineDisplay]:
    """Open the display that fits the console."""
    if not console.is_terminal:
        yield LineDisplay(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveDisplay(live)


def study_table(
    study: Study, statuses: Mapping[str, Status], progress: Mapping[str, float]
) -> Table:
    """Return a table with one row per system, setting and environment.

    Args:
      study: the study.
      statuses: of each run, by its name.
      progress: share done of each running run, by its name.
    """
    table = Table(header_style="bold", pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for column in ("system", "setting", "environment"):
        table.add_column(column, no_wrap=True)
    for column in ("steps", "completed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("not completed")
    rows: dict[tuple[str, str, str], list[PlannedRun]] = {}
    for run in study.runs:
        rows.setdefault((run.system, run.setting.name, run.env_id), []).append(run)
    for key, runs in rows.items():
        done = sum(statuses[run.name].state is State.COMPLETED for run in runs)
        others = ", ".join(
            _seed_status(run, statuses[run.name].state, progress.get(run.name))
            for run in runs
            if statuses[run.name].state not in (State.COMPLETED, State.TO_DO)
        )
        steps = " or ".join(f"{steps:,}" for steps in sorted({run.total_timesteps for run in runs}))
        table.add_row(*key, steps, f"{done}/{len(runs)}", others)
    return table


def show_plan(
    console: Console,
    study: Study,
    statuses: Mapping[str, Status],
    runs: Sequence[PlannedRun],
    runs_dir: Path,
) -> None:
    """Print what a study consists of, which runs would be started now, and their commands."""
    say = printer(console)
    say(f"{study.title}\n{study.question}\n")
    console.print(study_table(study, statuses, {}))
    say("")
    show_problems(console, study, statuses, runs_dir)
    for run in runs:
        words = systems.command(run, runs_dir, state.restart_flag(run, statuses[run.name]))
        words[0] = "python" if words[0] == sys.executable else words[0]
        say(shlex.join(pool.in_processes(words, run.setting.processes)))
    say(f"\n{plan_line(study, statuses, runs, runs_dir)}; nothing was started (--dry-run)")


def plan_line(
    study: Study, statuses: Mapping[str, Status], runs: Sequence[PlannedRun], runs_dir: Path
) -> str:
    """Return a line with the size of a study, and the number of its runs and steps that are left."""
    gpus = len(pool.available_gpus())
    also = f" and {gpus} GPU{'s' * (gpus > 1)}" if gpus else ""
    total = sum(run.total_timesteps for run in study.runs)
    left = sum(state.steps_left(run, statuses[run.name], runs_dir) for run in runs)
    return (
        f"{study.name}: {len(study.runs)} runs, {total:,} steps; "
        f"to run now: {len(runs)} runs, {left:,} steps, "
        f"on {len(pool.available_cores())} CPU cores{also}; {_expected(study.minutes, left / total)}"
    )


def _expected(study_minutes: int | None, share: float) -> str:
    """Estimate the duration of a share of a study's steps from the minutes in its file."""
    if study_minutes is None:
        return "its file does not give its duration"
    minutes = study_minutes * share
    days = minutes / MINUTES_OF_A_DAY
    long = f"{days:,.0f} days" if days >= 2 else _clock(60 * minutes)
    return f"about {long} on two cores according to its file"


def show_result(
    console: Console,
    study: Study,
    statuses: Mapping[str, Status],
    runs_dir: Path,
    stopped: bool,
) -> None:
    """Print the final state of a study, and what to do about runs that are not completed."""
    say = printer(console)
    console.print(study_table(study, statuses, {}))
    done = sum(status.state is State.COMPLETED for status in statuses.values())
    say(f"{done} of {len(study.runs)} runs completed")
    show_problems(console, study, statuses, runs_dir)
    states = {status.state for status in statuses.values()}
    if stopped:
        say("stopped: the same command continues the study")
    elif State.INTERRUPTED in states:
        say("the same command resumes interrupted runs, or starts them over")
    if State.FAILED in states:
        say(
            "--retry (make: RETRY=1) runs failed runs again: it resumes those that have not recorded their "
            "failure, if they can be resumed, and deletes the records of the others"
        )
    if State.CHANGED in states:
        say("records of another command are kept: use another --runs-dir, or move them away")


def show_problems(
    console: Console, study: Study, statuses: Mapping[str, Status], runs_dir: Path
) -> None:
    """Print a line for each run that failed, was interrupted, or was made by another command."""
    say = printer(console)
    for run in study.runs:
        status = statuses[run.name]
        if status.state in (State.FAILED, State.INTERRUPTED, State.CHANGED):
            log = state.log_file(run, runs_dir)
            where = f" (log: {log})" if log.exists() else ""
            say(f"{status.state}: {run.name}: {status.note}{where}")
        if status.problem:
            say(f"warning: {run.name}: {status.problem}")


def ended_line(run: PlannedRun, status: Status, seconds: float, count: int, total: int) -> str:
    """Return a line about a run that has ended."""
    width = len(str(total))
    note = f"  {status.note}" if status.note else ""
    return f"[{count:>{width}}/{total}] {status.state:<11} {seconds:6.1f} s  {run.name}{note}"


def summary(now: Snapshot) -> str:
    """Return a line with the number of runs in each state, the time spent, and the time left."""
    states = [status.state for status in now.statuses.values()]
    counts = [f"{states.count(kind)} {kind}" for kind in State if kind in states]
    about = f", about {_clock(now.left)} left" if now.left is not None else ""
    return f"{' · '.join(counts)} · {_clock(now.elapsed)}{about}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _seed_status(run: PlannedRun, now: State, part: float | None) -> str:
    return f"s{run.seed} {now}" + (f" {part:.0%}" if part is not None else "")
