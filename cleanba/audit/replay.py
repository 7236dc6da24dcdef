"""Verify a run's episodes without its network: simulate its recorded actions again.

    python -m cleanba.audit.replay runs/<study>/<run>
    make replay RUN=runs/<study>/<run>

Exit code 0: the actions reproduce every episode of the record. 1: they do not; the first difference is
printed. 2: there is no record, or it has no actions. A run that did not complete is verified up to its last
recorded action, and the output says so.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import tyro
from msgspec import UNSET, Meta
from tqdm import tqdm

from cleanba.compatibility import env_overrides, overlapping_seeds, restores
from cleanba.environments import (
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
from cleanba.run.command_line import BadInput, input_checks, run_command_line


class Mismatch(Exception):
    """The recorded actions contradict the record; the message is one line with the first difference."""


class Verified(NamedTuple):
    """What a replay has verified, in numbers."""

    episodes: int
    steps: int
    rollouts: int
    recorded: int  # episodes of the record; more than `episodes` if its actions end before them


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


def _simulate(
    run: Run, frames: Iterator[Frame], num_threads: int
) -> Iterator[list[dict[str, Any]]]:
    """Replay the frames of a record, and check the digest of each.

    Args:
      run: the record.
      frames: its recorded actions.
      num_threads: EnvPool threads.

    Yields:
      The episodes that ended in each rollout, with the fields of `episodes.jsonl` except the wall time.

    Raises:
      Mismatch: if a simulated rollout differs from its recorded digest.
    """
    options = options_of(run)
    num_envs, num_groups = options.num_envs, options.num_env_groups
    spec = describe_env(run.info.env_id, options.atari_preprocessing)
    if spec.num_actions != run.info.num_actions:  # environments do not check actions
        raise Mismatch(f"run.json: {run.info.env_id} has {spec.num_actions} actions")
    # One pool of all environments: their trajectories depend on seeds and actions alone.
    envs = make_envs(
        run.info.env_id,
        _seeds_of(run),
        num_threads,
        options.atari_preprocessing,
        **env_overrides(options.compat, spec.is_atari),
    )
    statistics = EpisodeStatistics(num_envs)
    digests = [GroupDigest() for _ in range(num_groups)]
    size = num_envs // num_groups
    envs.async_reset()
    envs.recv()
    for number, frame in enumerate(frames):
        _, rewards, dones, _ = play(envs, frame.actions)
        columns = [slice(g * size, (g + 1) * size) for g in range(num_groups)]
        found = combine_digests(
            digest.update(frame.actions[:, c], rewards[:, c], dones[:, c])
            for digest, c in zip(digests, columns, strict=True)
        )
        if found != frame.digest:
            raise Mismatch(
                f"{ACTIONS_FILE}, rollout {number + 1}: actions, rewards or ends of episodes differ "
                "from the recorded digest"
            )
        yield [
            {
                "step": (number * len(rewards) + e.t + 1) * num_envs,
                "env_index": e.index,
                "return": e.episode_return,
                "length": e.length,
            }
            for e in statistics.count(rewards, dones)
        ]
    envs.close()


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


def verify(run: Run, num_threads: int, progress: bool = False) -> Verified:
    """Compare every episode of a record with the simulation of its actions.

    Args:
      run: the record.
      num_threads: EnvPool threads.
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
    count = 0
    frames = read_frames(run.path / ACTIONS_FILE, shape, rollouts)
    bar = tqdm(total=rollouts * batch, unit="step", unit_scale=True, disable=not progress)
    with bar:
        for episodes in _simulate(run, frames, num_threads):
            claimed = recorded[count : count + len(episodes)]
            for found, claim in itertools.zip_longest(episodes, claimed):
                count += 1
                if found != claim:
                    raise Mismatch(f"episode {count}: {_differences(claim, found)}")
            bar.update(batch)
    if count < len(recorded):
        raise Mismatch(
            f"episode {count + 1}: recorded {recorded[count]}, but the actions end before it"
        )
    return Verified(count, rollouts * batch, rollouts, total)


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
    progress: bool = True
    """Show a progress bar."""


def main(args: Args) -> None:
    """Verify a record, and print the outcome."""
    run = read_run(args.run)
    threads = args.threads or min(len(os.sched_getaffinity(0)), shape_of(run).num_envs)
    with input_checks():
        check_env_id(run.info.env_id)
        env_seeds(run.info.seed, 0, shape_of(run).num_envs)
    try:
        done = verify(run, threads, args.progress)
    except (Mismatch, RecordError, DamagedActions) as error:
        print(f"not verified: {run.path}: {error}")
        raise SystemExit(1) from None
    print(
        f"verified: {done.episodes:,} of {done.recorded:,} episodes, {done.steps:,} steps, "
        f"{done.rollouts:,} rollouts"
    )
    if not run.completed:
        print(
            f"(the run is {run.info.status}, not completed: verified up to its last recorded action)"
        )


if __name__ == "__main__":
    run_command_line(
        Args, main, "Verify the episodes of a run by simulating its recorded actions again."
    )
