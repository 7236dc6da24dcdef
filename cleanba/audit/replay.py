"""Verify a run: simulate its recorded actions again, and repeat segments of its training.

    python -m cleanba.audit.replay runs/<study>/<run>
    python -m cleanba.audit.replay runs/<study>/<run> --segments 5
    make replay RUN=runs/<study>/<run> ARGS="--segments 5"

Episodes need no network. Segments of the training are drawn at random, see segments.py.

Exit code 0: all that was computed equals the record. 1: it does not, and the first difference is printed. 2:
there is no record, or it has no actions, or its training cannot be repeated here. A run that did not complete
is verified up to its last recorded action; the output reports this.
"""

import hashlib
import os
import secrets
import time
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
import tyro
from msgspec import UNSET, Meta

from cleanba.audit.segments import (
    Mismatch,
    NotRepeatable,
    chance_of_missing,
    draw,
    segments_of,
)
from cleanba.audit.simulation import Simulation, shape_of
from cleanba.audit.verification import MODULES, check_module, check_rows, repetition, verify
from cleanba.record import RecordError, Run, read_run, run_name
from cleanba.record.actions import DamagedActions
from cleanba.record.consistency import schedule_of
from cleanba.record.encoding import ENCODER
from cleanba.record.folder import PUBLISHED
from cleanba.run.arguments import CountOrZero
from cleanba.run.command_line import BadInput, run_command_line

SHARES = (0.01, 0.05, 0.1, 0.5)  # of falsified updates

Verdict = Literal["verified", "refuted", "consistent only", "not checkable", "failed"]


class Outcome(msgspec.Struct, kw_only=True):
    """What was checked of a record, and what came out.

    Attributes:
      verdict: "verified": everything that was computed equals the record. "refuted": something differs.
        "consistent only": it records no actions, and its rows do not contradict each other. "not
        checkable": its training was not repeated; its episodes may have been verified. "failed": the
        check ended abnormally.
      reason: why it is not verified, in one line.
      episodes: number of episodes simulated and compared.
      recorded: number of episodes in the record; larger than `episodes` if the actions end first.
      steps: number of agent steps simulated, over all environments, reset steps included.
      updates: number of updates repeated.
      segments: first and last update of each segment that was drawn and repeated.
      all_segments: number of segments into which the recorded checkpoints divide the run.
      missed: share of falsified updates -> the largest chance that no drawn segment contains one.
      seconds: duration of the check.
    """

    verdict: Verdict
    reason: str = ""
    episodes: int = 0
    recorded: int = 0
    steps: int = 0
    updates: int = 0
    segments: list[tuple[int, int]] = []
    all_segments: int = 0
    missed: dict[str, float] = {}
    seconds: float = 0.0


def judge(
    run: Run,
    *,
    segments: int,
    seed: int,
    module: str | None = None,
    threads: int | None = None,
    published: bool = False,
    progress: bool = False,
) -> Outcome:
    """Check a record.

    Args:
      run: the record; somebody else may have written it.
      segments: number of segments to draw and repeat.
      seed: seed of the draw, which also depends on the name of the run's folder.
      module: module that repeats the updates of systems that do not come with the toolkit, see
        `verification.repetition`.
      threads: EnvPool threads, if no update is repeated; by default one per core, at most one per
        environment.
      published: the record is a published copy, without logs and the like.
      progress: show a progress bar.
    """
    started = time.perf_counter()
    outcome = Outcome(verdict="verified")
    try:
        if published and run.info.status == "running":
            raise Mismatch("run.json: a published run cannot have the status 'running'")
        info = run.info
        name = run_name(info.system, info.setting, info.env_id, info.seed)
        if published and run.path.name != name:
            raise Mismatch(f"run.json: the folder of this run should be named {name}")
        if run.info.num_actions is UNSET:
            if run.info.program in MODULES or schedule_of(run) is not None:
                raise Mismatch("run.json: its program records actions, and there are none")
            check_rows(run, published)
            outcome.verdict = "consistent only"
            outcome.reason = "its system is nondeterministic, or records no actions"
        else:
            _simulate(run, outcome, segments, seed, module, threads, published, progress)
    except (Mismatch, RecordError, DamagedActions) as error:
        outcome = Outcome(verdict="refuted", reason=str(error))
    except BadInput as error:
        outcome = _not_simulated(run, str(error), published)
    outcome.seconds = round(time.perf_counter() - started, 1)
    return outcome


def _not_simulated(run: Run, reason: str, published: bool) -> Outcome:
    """Check what can be checked of a record without its environments."""
    try:
        check_rows(run, published)
        if published and (problems := run.check_files(PUBLISHED)):
            raise Mismatch(problems[0])
    except (Mismatch, RecordError) as error:
        return Outcome(verdict="refuted", reason=str(error))
    return Outcome(verdict="not checkable", reason=reason)


def _simulate(
    run: Run,
    outcome: Outcome,
    count: int,
    seed: int,
    module: str | None,
    threads: int | None,
    published: bool,
    progress: bool,
) -> None:
    simulation, drawn = None, []
    if count:
        every = segments_of(run, run.updates())
        try:
            if not run.completed or not every:
                raise NotRepeatable("it did not complete")
            simulation = repetition(run, module)
        except NotRepeatable as error:
            outcome.verdict, outcome.reason = "not checkable", str(error)
        else:
            drawn = draw(every, count, random_numbers(seed, run.path.name))
    else:
        outcome.verdict, outcome.reason = "not checkable", "no segments were requested"
    if simulation is None:
        threads = threads or min(len(os.sched_getaffinity(0)), shape_of(run).num_envs)
        simulation = Simulation(run, threads)
    done = verify(run, simulation, drawn, published=published, progress=progress)
    outcome.episodes, outcome.recorded, outcome.steps = done.episodes, done.recorded, done.steps
    outcome.updates = done.updates
    if drawn:
        outcome.segments = [(start + 1, end) for start, end in drawn]
        outcome.all_segments = len(every)
        outcome.missed = {
            f"{share:.0%}": chance_of_missing(share, every, len(drawn)) for share in SHARES
        }


def random_numbers(seed: int, name: str) -> np.random.Generator:
    """Return the generator that draws the segments of a run, by its folder's name."""
    word = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    return np.random.default_rng([seed, word])


def lines(outcome: Outcome) -> list[str]:
    """Return what was checked, and what is refuted, as text."""
    episodes = f"{outcome.episodes:,} of {outcome.recorded:,} episodes, {outcome.steps:,} steps"
    found = [f"refuted: {outcome.reason}"] if outcome.verdict == "refuted" else []
    found += [f"verified: {episodes}"] if outcome.steps else []
    if outcome.segments:
        updates = ", ".join(f"{first}-{last}" for first, last in outcome.segments)
        found.append(
            f"repeated: {outcome.updates:,} updates, in {len(outcome.segments)} of "
            f"{outcome.all_segments} segments: {updates}"
        )
        found += [
            f"  if {share} of the updates were falsified, this would have missed it with up to {chance:.1%}"
            for share, chance in outcome.missed.items()
        ]
    return found


@dataclass(frozen=True)
class Args:
    """A run record to check."""

    run: Annotated[str, tyro.conf.Positional]
    """Folder of the run record."""
    threads: Annotated[int, Meta(ge=1, le=1024, description="from 1 to 1024")] | None = None
    """EnvPool threads; by default the number of cores."""
    segments: CountOrZero = 0
    """Segments of the training to repeat, from one checkpoint to the next."""
    seed: CountOrZero | None = None
    """Seed that draws the segments; random by default."""
    module: str | None = None
    """Module that repeats the updates of a system that does not come with the toolkit: its `repeat(run)`
    returns a `Repetition` (docs/adding-a-baseline.md)."""
    published: bool = False
    """The record is a published copy, without logs and the like."""
    json: bool = False
    """Print the outcome as one line of JSON, with exit code 0."""
    progress: bool = True
    """Show a progress bar."""


def main(args: Args) -> None:
    """Check a record, and print the outcome."""
    check_module(args.module)
    run = read_run(args.run)
    seed = secrets.randbits(32) if args.seed is None else args.seed
    outcome = judge(
        run,
        segments=args.segments,
        seed=seed,
        module=args.module,
        threads=args.threads,
        published=args.published,
        progress=args.progress,
    )
    if args.json:
        print(ENCODER.encode(outcome).decode())
        return
    print("\n".join(lines(outcome)))
    if outcome.segments:
        print(f"(drawn with --seed {seed})")
    if outcome.steps and not run.completed:
        print(f"(the run is {run.info.status}, not completed: verified up to its last action)")
    if outcome.verdict == "refuted":
        raise SystemExit(1)
    if outcome.verdict != "verified" and (args.segments or not outcome.steps):
        raise BadInput(f"{run.path}: {outcome.reason}")


if __name__ == "__main__":
    run_command_line(
        Args, main, "Verify a run by simulating its actions and repeating parts of its training."
    )
