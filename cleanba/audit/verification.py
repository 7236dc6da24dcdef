"""Compares a record with a simulation of its actions, and with repetitions of its updates."""

import contextlib
import importlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from cleanba.audit.preparation import check_size
from cleanba.audit.segments import (
    Mismatch,
    NotRepeatable,
    Repetition,
    Replayed,
    Segment,
    begin,
    check_update,
)
from cleanba.audit.simulation import Simulation, options_of, shape_of
from cleanba.environments import Episode
from cleanba.record import ACTIONS_FILE, FILE_OF_ROW, Run
from cleanba.record.actions import Frame, Shape, read_frames
from cleanba.record.consistency import contradictions
from cleanba.run.command_line import BadInput

# Modules of the programs whose updates can be made again. A record names a program, never a module.
MODULES = {
    "cleanba_ppo": "cleanba.cleanba_ppo",
    "cleanba_impala": "cleanba.cleanba_impala",
    "cleanrl_ppo": "baselines.cleanrl_ppo",
    "hts_rl": "baselines.hts_rl",
}


class Verified(NamedTuple):
    """What a replay has verified, in numbers."""

    episodes: int
    steps: int
    rollouts: int
    recorded: int  # episodes of the record; more than `episodes` if its actions end before them
    updates: int  # number of updates repeated


def repetition(run: Run, module: str | None = None) -> Repetition:
    """Prepare to make the updates of a record again.

    Args:
      run: the record.
      module: with a function `repeat(run)`, for programs that do not come with the toolkit.

    Raises:
      NotRepeatable: with one line.
    """
    name = MODULES.get(run.info.program or "", module)
    if name is None:
        raise NotRepeatable("no module is known that repeats its training")
    check_size(run)
    return importlib.import_module(name).repeat(run)


def check_module(name: str | None) -> None:
    """Import a module that the user names, and check that it can repeat a run.

    Raises:
      BadInput: with one line.
    """
    if name is None:
        return
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise BadInput(f"--module {name}: {error}") from None
    if not callable(getattr(module, "repeat", None)):
        raise BadInput(f"--module {name}: it has no function `repeat`")


def check_rows(run: Run, published: bool = False) -> None:
    """Check that a record has its rows, undamaged and without contradictions.

    Args:
      run: the record.
      published: it is a published copy, without logs and the like.

    Raises:
      Mismatch: with the first problem.
    """
    _check_files(run, FILE_OF_ROW.values(), published)
    if found := contradictions(run, run.updates(), run.rollouts(), run.episodes()):
        raise Mismatch(found[0])


def _check_files(run: Run, needed: Iterable[str], published: bool) -> None:
    for name in needed:
        if not (run.path / name).is_file():
            raise Mismatch(f"{name} is missing")
    if problems := run.check_files(needed if published else None):
        raise Mismatch(problems[0])


def check_whole(run: Run, published: bool = False) -> int:
    """Check that a record has all its files, undamaged, with the same number of rollouts in each.

    Args:
      run: the record.
      published: it is a published copy, without logs and the like.

    Returns:
      The number of rollouts; for an incomplete run, of those whose actions and rows were both written.

    Raises:
      Mismatch: with the first problem.
    """
    _check_files(run, (*FILE_OF_ROW.values(), ACTIONS_FILE), published)
    path = run.path / ACTIONS_FILE
    frames, torn = divmod(path.stat().st_size, shape_of(run).frame_size)
    # The actions are counted first: while the run is being written, the other files only grow.
    rows = run.updates(), run.rollouts(), run.episodes()
    updates, collected = len(rows[0]), sum(row.steps for row in rows[1])
    shape = shape_of(run)
    batch = shape.num_steps * shape.num_envs
    if run.completed:
        whole = options_of(run).total_timesteps // batch
        fits = not torn and whole == frames == updates and collected == frames * batch
    else:
        # An update writes its actions, episodes, rollouts and its own line, in that order.
        fits = updates >= frames - 1 and collected >= (frames - 1) * batch
        if run.info.status != "running":
            fits = fits and updates <= frames and collected <= frames * batch
    if not fits:
        raise Mismatch(
            f"{ACTIONS_FILE} has {frames} rollouts and {torn} bytes, updates.jsonl {updates} "
            f"updates, rollouts.jsonl {collected} steps"
        )
    if found := contradictions(run, *rows):
        raise Mismatch(found[0])
    for number, row in enumerate(rows[0], start=1):
        if (row.version, row.step) != (number + 1, number * batch):
            raise Mismatch(
                f"updates.jsonl, line {number}: its version and step are not those of its place"
            )
    return min(frames, collected // batch)


def verify(
    run: Run,
    simulation: Simulation | Repetition,
    segments: Sequence[Segment] = (),
    *,
    published: bool = False,
    progress: bool = False,
) -> Verified:
    """Compare a record with the simulation of its actions, and some of its updates with their repetitions.

    Args:
      run: the record.
      simulation: of the run, at its beginning; this function closes it.
      segments: to be repeated, in their order; they need a `Repetition`.
      published: see `check_whole`.
      progress: show a progress bar.

    Returns:
      How much was verified.

    Raises:
      Mismatch: with the first difference.
    """
    rollouts = check_whole(run, published)
    shape = shape_of(run)
    batch = shape.num_steps * shape.num_envs
    recorded = [
        {"step": e.step, "env_index": e.env_index, "return": e.episode_return, "length": e.length}
        for e in run.episodes()
    ]
    total = len(recorded)
    if not run.completed:
        # The episodes of one more rollout may have been written, and not its other rows.
        last = max((row["step"] for row in recorded), default=0)
        if last > (rollouts + 1) * batch and run.info.status != "running":
            raise Mismatch(f"an episode ends at step {last}, the actions at {rollouts * batch}")
        recorded = [row for row in recorded if row["step"] <= rollouts * batch]
    updates = run.updates()
    if segments and (len(updates) != rollouts or updates[-1].fingerprint is None):
        raise Mismatch("updates.jsonl does not end with a fingerprint of the last rollout's update")
    begins = {segment.start: segment for segment in segments}
    repeated = {n for start, end in segments for n in range(start, end)}
    count = made_again = 0
    bar = tqdm(total=rollouts * batch, unit="step", unit_scale=True, disable=not progress)
    with bar, contextlib.closing(simulation):
        for number, frame in enumerate(read_frames(run.path / ACTIONS_FILE, shape, rollouts)):
            if number in begins:
                begin(run, simulation, begins[number], updates)
            if number in repeated:
                try:
                    made, metrics = simulation.update()
                except FloatingPointError as error:  # from the parameters of a falsified checkpoint
                    raise Mismatch(f"update {number + 1}: {error}") from None
                check_rollout(frame, made, number)
                check_update(updates[number], simulation, metrics)
                made_again += 1
            else:
                made = simulation.replay(frame.actions)
                check_rollout(frame, made, number)
            found = [_as_recorded(e, number, shape) for e in made.episodes]
            claimed = recorded[count : count + len(found)]
            for episode, claim in itertools.zip_longest(found, claimed):
                count += 1
                if episode != claim:
                    raise Mismatch(f"episode {count}: {_differences(claim, episode)}")
            bar.update(batch)
    if count < len(recorded):
        raise Mismatch(
            f"episode {count + 1}: recorded {recorded[count]}, but the actions end before it"
        )
    return Verified(count, rollouts * batch, rollouts, total, made_again)


def check_rollout(frame: Frame, made: Replayed, number: int) -> None:
    """Compare a recorded rollout with a simulated one.

    Raises:
      Mismatch: with the first action that differs, or because rewards or ends of episodes do.
    """
    where = f"{ACTIONS_FILE}, rollout {number + 1}"
    if frame.actions is not made.actions and (frame.actions != made.actions).any():
        t, index = np.argwhere(frame.actions != made.actions)[0]
        raise Mismatch(
            f"{where}: step {t + 1} of environment {index}: action {frame.actions[t, index]} recorded, "
            f"{made.actions[t, index]} computed"
        )
    if frame.digest != made.digest:
        raise Mismatch(
            f"{where}: actions, rewards or ends of episodes differ from the recorded digest"
        )


def _as_recorded(episode: Episode, number: int, shape: Shape) -> dict[str, Any]:
    """Return an episode of a rollout with the fields of `episodes.jsonl`, except the wall time."""
    return {
        "step": (number * shape.num_steps + episode.t + 1) * shape.num_envs,
        "env_index": episode.index,
        "return": episode.episode_return,
        "length": episode.length,
    }


def _differences(claim: dict[str, Any] | None, found: dict[str, Any]) -> str:
    where = f"environment {found['env_index']}, step {found['step']}"
    if claim is None:
        return f"{where}: not in episodes.jsonl"
    parts = [
        f"{k} {claim[k]} recorded, {found[k]} simulated" for k in found if claim[k] != found[k]
    ]
    return f"{where}: {', '.join(parts)}"
