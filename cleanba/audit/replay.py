"""Verify a run: simulate its recorded actions again, and repeat segments of its training.

    python -m cleanba.audit.replay runs/<study>/<run>
    python -m cleanba.audit.replay runs/<study>/<run> --segments 5
    make replay RUN=runs/<study>/<run> ARGS="--segments 5"

Episodes need no network. Segments of the training are drawn at random, see segments.py.

Exit code 0: all that was computed equals the record. 1: it does not; the first difference is printed. 2:
there is no record, or it has no actions, or its training cannot be repeated here. A run that did not complete
is verified up to its last recorded action, and the output says so.
"""

import contextlib
import importlib
import itertools
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import tyro
from msgspec import UNSET, Meta
from tqdm import tqdm

from cleanba.audit.segments import (
    Mismatch,
    NotRepeatable,
    Repetition,
    Replayed,
    Segment,
    begin,
    can_begin,
    chance_of_missing,
    check_update,
    draw,
    segments_of,
)
from cleanba.compatibility import env_overrides, overlapping_seeds, restores
from cleanba.environments import (
    Episode,
    EpisodeStatistics,
    check_env_id,
    describe_env,
    env_seeds,
    make_envs,
    play,
)
from cleanba.record import ACTIONS_FILE, FILE_OF_ROW, RecordError, Run, read_run
from cleanba.record.actions import (
    DamagedActions,
    Frame,
    GroupDigest,
    Shape,
    combine_digests,
    read_frames,
)
from cleanba.record.consistency import contradictions
from cleanba.record.encoding import describe_error
from cleanba.record.schema import Count
from cleanba.run.arguments import CountOrZero
from cleanba.run.command_line import BadInput, input_checks, run_command_line

# Modules of the programs whose updates can be made again. A record names a program, never a module.
MODULES = {
    "cleanba_ppo": "cleanba.cleanba_ppo",
    "cleanba_impala": "cleanba.cleanba_impala",
}

SHARES = (
    0.01,
    0.05,
    0.1,
    0.5,
)  # of falsified segments, for which the chance of missing them is printed


class Verified(NamedTuple):
    """What a replay has verified, in numbers."""

    episodes: int
    steps: int
    rollouts: int
    recorded: int  # episodes of the record; more than `episodes` if its actions end before them
    updates: int  # made again


class Options(msgspec.Struct):
    """The hyperparameters that a replay needs, with the largest that it takes from a stranger."""

    num_steps: Annotated[int, Meta(ge=1, le=2**20)]
    num_envs: Annotated[int, Meta(ge=1, le=4096)]
    num_env_groups: Annotated[int, Meta(ge=1, le=4096)]
    total_timesteps: Count
    atari_preprocessing: Literal["machado", "gym"] = "machado"
    compat: tuple[str, ...] = ()


class Layout(msgspec.Struct):
    """The actor threads of a record, which decide the seeds of `--compat seeds`."""

    num_actor_threads: Annotated[int, Meta(ge=1, le=4096)]
    actor_device_ids: Annotated[tuple[int, ...], Meta(min_length=1, max_length=4096)]
    num_processes: Annotated[int, Meta(ge=1, le=4096)]


def options_of(run: Run) -> Options:
    """Return what a replay needs of a record's hyperparameters.

    Raises:
      BadInput: if something is missing or out of range.
    """
    try:
        options = msgspec.convert(run.info.hyperparameters, Options)
    except msgspec.ValidationError as error:
        raise BadInput(f"{run.path}: hyperparameters: {describe_error(error)}") from None
    if options.num_envs % options.num_env_groups:
        raise BadInput(f"{run.path}: num_envs is no multiple of num_env_groups")
    return options


def _seeds_of(run: Run) -> list[int]:
    """Return the seeds of a record's environments.

    Raises:
      BadInput: if they depend on its layout, and this is missing or out of range.
    """
    options = options_of(run)
    if not restores(options.compat, "seeds"):
        return env_seeds(run.info.seed, 0, options.num_envs)
    try:
        layout = msgspec.convert(run.info.hardware, Layout)
    except msgspec.ValidationError as error:
        raise BadInput(f"{run.path}: hardware: {describe_error(error)}") from None
    threads = layout.num_actor_threads * len(layout.actor_device_ids)
    with input_checks():
        return overlapping_seeds(run.info.seed, options.num_envs, threads, layout.num_processes)


def shape_of(run: Run) -> Shape:
    """Return the shape of a record's actions.

    Raises:
      BadInput: if it has no actions, or its numbers are not those of a run.
    """
    if run.info.num_actions is UNSET:
        raise BadInput(f"{run.path}: a record without actions (no 'num_actions')")
    options = options_of(run)
    return Shape(options.num_steps, options.num_envs, run.info.num_actions)


class Simulation:
    """The environments of a run, without its network: one pool of all, because their trajectories depend on
    seeds and actions alone."""

    def __init__(self, run: Run, num_threads: int):
        """Make the environments.

        Args:
          run: the record.
          num_threads: EnvPool threads.

        Raises:
          Mismatch: if the environment has another number of actions than the record.
        """
        options = options_of(run)
        spec = describe_env(run.info.env_id, options.atari_preprocessing)
        if spec.num_actions != run.info.num_actions:  # environments do not check actions
            raise Mismatch(f"run.json: {run.info.env_id} has {spec.num_actions} actions")
        self._envs = make_envs(
            run.info.env_id,
            _seeds_of(run),
            num_threads,
            options.atari_preprocessing,
            **env_overrides(options.compat, spec.is_atari),
        )
        self._statistics = EpisodeStatistics(options.num_envs)
        self._digests = [GroupDigest() for _ in range(options.num_env_groups)]
        self._envs.async_reset()
        self._envs.recv()

    def replay(self, actions: np.ndarray) -> Replayed:
        """Step the environments through the actions [T, N] of a rollout."""
        _, rewards, dones, _ = play(self._envs, actions)
        groups = (np.split(x, len(self._digests), axis=1) for x in (actions, rewards, dones))
        digest = combine_digests(
            digest.update(*parts) for digest, *parts in zip(self._digests, *groups, strict=True)
        )
        return Replayed(actions, digest, self._statistics.count(rewards, dones))

    def close(self) -> None:
        """Free the environments."""
        self._envs.close()


def repetition(run: Run, module: str | None = None) -> Repetition:
    """Prepare to make the updates of a record again.

    Args:
      run: the record.
      module: with a function `repeat(run)`; by default that of the program that the record names.

    Raises:
      NotRepeatable: with one line.
    """
    if module is None and (module := MODULES.get(run.info.program or "")) is None:
        raise NotRepeatable("the training of its system cannot be repeated")
    return importlib.import_module(module).repeat(run)


def check_whole(run: Run) -> int:
    """Check that a record has all its files, undamaged, with the same number of rollouts in each.

    Returns:
      The number of rollouts.

    Raises:
      Mismatch: if something is missing.
    """
    for name in FILE_OF_ROW.values():
        if not (run.path / name).is_file():
            raise Mismatch(f"{name} is missing")
    if problems := run.check_files():
        raise Mismatch(problems[0])
    path = run.path / ACTIONS_FILE
    if not path.is_file():
        raise Mismatch(f"{ACTIONS_FILE} is missing")
    frames, torn = divmod(path.stat().st_size, shape_of(run).frame_size)
    # The actions are counted first: while the run is being written, the other files only grow.
    rows = run.updates(), run.rollouts(), run.episodes()
    updates, rollouts = len(rows[0]), len(rows[1])
    options = options_of(run)
    groups, shape = options.num_env_groups, shape_of(run)
    if run.completed:
        whole = options.total_timesteps // (shape.num_steps * shape.num_envs)
        fits = not torn and whole == frames == updates == rollouts / groups
    else:
        # An update writes its episodes, rollouts, actions and its own line, in that order.
        fits = updates >= frames - 1 and rollouts >= groups * frames
        if run.info.status != "running":
            fits = fits and updates <= frames and rollouts <= groups * (frames + 1)
    if not fits:
        raise Mismatch(
            f"{ACTIONS_FILE} has {frames} rollouts and {torn} bytes, updates.jsonl {updates} "
            f"updates, rollouts.jsonl {rollouts} rollouts of {groups} groups"
        )
    if found := contradictions(run, *rows):
        raise Mismatch(found[0])
    return frames


def verify(
    run: Run,
    simulation: Simulation | Repetition,
    segments: Sequence[Segment] = (),
    progress: bool = False,
) -> Verified:
    """Compare a record with the simulation of its actions, and with some of its updates made again.

    Args:
      run: the record.
      simulation: of the run, at its beginning. It is closed.
      segments: to be repeated, in their order; they need a `Repetition`.
      progress: show a progress bar.

    Returns:
      How much was verified.

    Raises:
      Mismatch: with the first difference.
    """
    rollouts = check_whole(run)
    shape = shape_of(run)
    batch = shape.num_steps * shape.num_envs
    recorded = [
        {"step": e.step, "env_index": e.env_index, "return": e.episode_return, "length": e.length}
        for e in run.episodes()
    ]
    total = len(recorded)
    if not run.completed:
        # A run that was killed may have written the episodes of one rollout without its actions.
        last = max((row["step"] for row in recorded), default=0)
        if last > (rollouts + 1) * batch and run.info.status != "running":
            raise Mismatch(f"an episode ends at step {last}, the actions at {rollouts * batch}")
        recorded = [row for row in recorded if row["step"] <= rollouts * batch]
    updates = run.updates()
    begins = {segment.start: segment for segment in segments}
    repeated = {n for start, end in segments for n in range(start, end)}
    count = 0
    bar = tqdm(total=rollouts * batch, unit="step", unit_scale=True, disable=not progress)
    with bar, contextlib.closing(simulation):
        for number, frame in enumerate(read_frames(run.path / ACTIONS_FILE, shape, rollouts)):
            if number in begins:
                begin(run, simulation, begins[number], updates)
            if number in repeated:
                made, metrics = simulation.update()
                check_rollout(frame, made, number)
                check_update(updates[number], simulation, metrics)
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
    return Verified(count, rollouts * batch, rollouts, total, len(repeated))


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
    """Seed that draws the segments; by default one that nobody could know before."""
    module: str | None = None
    """Module that repeats the updates of another system (docs/adding-a-baseline.md)."""
    progress: bool = True
    """Show a progress bar."""


def main(args: Args) -> None:
    """Verify a record, and print the outcome."""
    run = read_run(args.run)
    threads = args.threads or min(len(os.sched_getaffinity(0)), shape_of(run).num_envs)
    with input_checks():
        check_env_id(run.info.env_id)
        env_seeds(run.info.seed, 0, shape_of(run).num_envs)
    seed = secrets.randbits(32) if args.seed is None else args.seed
    try:
        drawn, simulation = [], None
        if args.segments:
            every = segments_of(run.updates())
            available = [segment for segment in every if can_begin(run, segment)]
            drawn = draw(available, args.segments, np.random.default_rng(seed))
            simulation = repetition(run, args.module)
        done = verify(run, simulation or Simulation(run, threads), drawn, args.progress)
    except NotRepeatable as error:
        raise BadInput(f"{run.path}: {error}") from None
    except (Mismatch, RecordError, DamagedActions) as error:
        print(f"not verified: {run.path}: {error}")
        raise SystemExit(1) from None
    print(
        f"verified: {done.episodes:,} of {done.recorded:,} episodes, {done.steps:,} steps, "
        f"{done.rollouts:,} rollouts"
    )
    if drawn:
        print(
            f"repeated: {done.updates:,} updates, in {len(drawn)} of {len(every)} segments (seed {seed}): "
            + ", ".join(f"{start + 1}-{end}" for start, end in drawn)
        )
        for share in SHARES:
            chance = chance_of_missing(share, len(every), len(available), len(drawn))
            print(
                f"  if {share:.0%} of the segments were falsified, this had missed it with {chance:.1%}"
            )
    if not run.completed:
        print(
            f"(the run is {run.info.status}, not completed: verified up to its last recorded action)"
        )


if __name__ == "__main__":
    run_command_line(
        Args, main, "Verify the episodes of a run by simulating its recorded actions again."
    )
