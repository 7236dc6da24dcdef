"""Check a run's episodes without its network: simulate its recorded actions again.

    python -m cleanba.replay runs/<study>/<run>
    make replay RUN=runs/<study>/<run>

Exit code 0: every episode of the record is what its actions lead to. 1: it is not, and the first
difference is named. 2: there is no record here, or one without actions. A run that did not complete is
verified as far as its actions go, which is said.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import tyro
from tqdm import tqdm

from cleanba.actions import DamagedActions, Frame, GroupDigest, Shape, combine_digests, read_frames
from cleanba.command_line import BadInput, run_command_line
from cleanba.environments import EpisodeStatistics, env_seeds, make_envs, play
from cleanba.record import ACTIONS_FILE, LINE_FILES, RecordError, Run, read_run


class Mismatch(Exception):
    """A record that its own actions contradict; the message is one line that says where."""


class Verified(NamedTuple):
    """What a replay has shown."""

    episodes: int
    steps: int
    rollouts: int
    recorded: int  # episodes of the record, more than `episodes` where its actions end before them


def shape_of(run: Run) -> Shape:
    """Return the shape of a record's actions.

    Raises:
      BadInput: if it was written without actions.
    """
    try:
        options = run.info["hyperparameters"]
        return Shape(options["num_steps"], options["num_envs"], run.info["num_actions"])
    except KeyError as missing:
        raise BadInput(f"{run.path}: a record without actions (no {missing})") from None


def _simulate(
    run: Run, frames: Iterator[Frame], num_threads: int
) -> Iterator[list[dict[str, Any]]]:
    """Play the frames of a record, and check each one's digest.

    Args:
      run: the record.
      frames: its recorded actions.
      num_threads: EnvPool's threads.

    Yields:
      The episodes that ended in each rollout, as `episodes.jsonl` has them but for the wall time.

    Raises:
      Mismatch: if a rollout does not lead to what was recorded of it.
    """
    options = run.info["hyperparameters"]
    num_envs, num_groups = options["num_envs"], options["num_env_groups"]
    # One pool of all environments: their trajectories depend on seeds and actions alone.
    seeds = env_seeds(run.info["seed"], 0, num_envs)
    preprocessing = options.get("atari_preprocessing", "machado")
    envs = make_envs(run.info["env_id"], seeds, num_threads, preprocessing)
    statistics = EpisodeStatistics(num_envs)
    digests = [GroupDigest() for _ in range(num_groups)]
    size = num_envs // num_groups
    envs.async_reset()
    envs.recv()
    for number, frame in enumerate(frames):
        _, rewards, dones = play(envs, frame.actions)
        columns = [slice(g * size, (g + 1) * size) for g in range(num_groups)]
        found = combine_digests(
            digest.update(frame.actions[:, c], rewards[:, c], dones[:, c])
            for digest, c in zip(digests, columns, strict=True)
        )
        if found != frame.digest:
            raise Mismatch(
                f"{ACTIONS_FILE}, rollout {number + 1}: actions, rewards and ends of episodes are "
                "not those that were recorded"
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
    """Check that a record has all its files, and as many rollouts in each; return the rollouts.

    Raises:
      Mismatch: if something is missing.
    """
    for name in sorted({*run.info.get("files", []), *(f"{kind}.jsonl" for kind in LINE_FILES)}):
        if not (run.path / name).is_file():
            raise Mismatch(f"{name} is missing")
    path = run.path / ACTIONS_FILE
    if not path.is_file():
        raise Mismatch(f"{ACTIONS_FILE} is missing")
    frames, torn = divmod(path.stat().st_size, shape_of(run).frame_size)
    # In this order: a run that is being written has more lines by now, not fewer.
    updates, rollouts = len(run.lines("updates")), len(run.lines("rollouts"))
    options = run.info["hyperparameters"]
    groups, shape = options["num_env_groups"], shape_of(run)
    if run.completed:
        whole = options["total_timesteps"] // (shape.num_steps * shape.num_envs)
        fits = not torn and whole == frames == updates == rollouts / groups
    else:
        # An update writes its episodes, rollouts, actions and its own line, in that order.
        fits = updates >= frames - 1 and rollouts >= groups * frames
        if run.info["status"] != "running":
            fits = fits and updates <= frames and rollouts <= groups * (frames + 1)
    if not fits:
        raise Mismatch(
            f"{ACTIONS_FILE} has {frames} rollouts and {torn} bytes, updates.jsonl {updates} "
            f"updates, rollouts.jsonl {rollouts} rollouts of {groups} groups"
        )
    return frames


def verify(run: Run, num_threads: int, progress: bool = False) -> Verified:
    """Compare every episode of a record with what its actions lead to.

    Args:
      run: the record.
      num_threads: EnvPool's threads.
      progress: show a progress bar.

    Returns:
      What was verified.

    Raises:
      Mismatch: with the first difference.
    """
    rollouts = check_whole(run)
    shape = shape_of(run)
    batch = shape.num_steps * shape.num_envs
    fields = ("step", "env_index", "return", "length")
    recorded = [{k: row.get(k) for k in fields} for row in run.lines("episodes")]
    total = len(recorded)
    if not run.completed:
        # A run that was killed may have written the episodes of one rollout without its actions.
        last = max((row["step"] for row in recorded), default=0)
        if last > (rollouts + 1) * batch and run.info["status"] != "running":
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
    threads: int | None = None
    """EnvPool's threads; by default the cores."""
    progress: bool = True
    """Show a progress bar."""


def main(args: Args) -> None:
    """Verify, and say so."""
    run = read_run(args.run)
    if args.threads is not None and args.threads < 1:
        raise BadInput("--threads must be 1 or more")
    shape_of(run)
    threads = args.threads or min(
        len(os.sched_getaffinity(0)), run.info["hyperparameters"]["num_envs"]
    )
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
            f"(the run is {run.info['status']}, not completed: verified as far as its actions go)"
        )


if __name__ == "__main__":
    run_command_line(
        Args, main, "Simulate the recorded actions of a run again, and check its episodes."
    )
