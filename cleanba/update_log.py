"""Logs of the Cleanba trainers: for every update, the rollouts, episodes and actions of all processes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from cleanba.actor_learner import Rollout as CollectedRollout
from cleanba.exact import placement
from cleanba.preparation import PACKAGES, Setup
from cleanba.record import (
    Episode,
    RecordError,
    Rollout,
    Update,
    checkpoints,
    fingerprint,
    read_run,
)
from cleanba.record.actions import Frame, combine_digests, pack
from cleanba.run.log import ResumePoint, RunLog, run_info


class Actions(msgspec.Struct):
    """The actions of one environment group in one rollout."""

    group: int
    actions: bytes  # little-endian uint16 [T, B]
    digest: bytes  # of the group's trajectory so far


class Part(msgspec.Struct):
    """What one process contributes to the log of an update."""

    rollouts: list[Rollout]
    episodes: list[Episode]
    actions: list[Actions]
    times: list[dict[str, float]]  # of each actor thread: seconds by activity


class UpdateTimes(msgspec.Struct):
    """Seconds of an update, as the first process measures them."""

    wall_time: float  # of the run, at the update's end
    update_seconds: float  # since the end of the last update
    rollout_queue_get_time: float
    training_time: float


def _is_completed(directory: Path) -> bool:
    """Whether a record is completed by now, such as by another process with the same command."""
    try:
        return read_run(directory).completed
    except RecordError:
        return False


def begin_log(setup: Setup) -> RunLog:
    """Begin the log of a run, or resume it at its checkpoint."""
    args = setup.args
    info = run_info(
        setup.run,
        program=setup.name,
        hyperparameters=setup.hyperparameters,
        hardware=placement.describe_hardware(args.hardware, setup.placement.num_processes),
        packages=PACKAGES,
    )
    info.num_actions = setup.spec.num_actions
    info.checkpoint_every = args.checkpoints.checkpoint_every
    resume = None
    if setup.checkpoint is not None:
        step = setup.updates_done * setup.batch_size
        resume = ResumePoint(setup.checkpoint.sizes, step, setup.updates_done)
    return RunLog(
        setup.run,
        info,
        total_steps=setup.num_updates * setup.batch_size,
        # A run without a checkpoint starts over; preparation has made sure that it may.
        overwrite=args.run.overwrite
        or (args.resuming.resume and not _is_completed(setup.directory)),
        progress="bar" if args.run.progress else None,
        log_frequency=args.logging.log_frequency,
        tracking=args.tracking,
        resume=resume,
    )


def describe_rollouts(
    setup: Setup, collected: Sequence[CollectedRollout], learner_version: int
) -> Part:
    """Return the logged part of this process's rollouts, which an update learned from."""
    steps = setup.args.num_steps * setup.group_size
    groups = [
        (group, r.thread, r.number, r.wall_time, r.version) for r in collected for group in r.groups
    ]
    return Part(
        rollouts=[
            Rollout(
                actor=thread,
                group=group,
                rollout=number,
                steps=steps,
                wall_time=round(wall_time, 4),
                version_first=version,
                version_last=version,
                versions=[(version, steps)],
                learner_version=learner_version,
            )
            for group, thread, number, wall_time, version in sorted(groups)
        ],
        episodes=[
            Episode(
                step=e.step,
                wall_time=round(e.wall_time, 4),
                env_index=e.env_index,
                episode_return=e.episode_return,
                length=e.length,
            )
            for r in collected
            for e in r.episodes
        ],
        actions=[
            Actions(group, trace.actions.astype("<u2").tobytes(), trace.digest)
            for r in collected
            for group, trace in r.traces.items()
        ],
        times=[r.times for r in collected],
    )


def log_update(
    setup: Setup,
    log: RunLog,
    parts: Sequence[Part],
    number: int,
    times: UpdateTimes,
    metrics: Mapping[str, float],
    params: Any,
    saved: Mapping[str, np.ndarray] | None,
) -> list[str]:
    """Log one update.

    Args:
      setup: the run.
      log: its log.
      parts: what each process contributes.
      number: of the update, from 1.
      times: of the update.
      metrics: losses, `learning_rate` and others, by their names in `Update`.
      params: after the update.
      saved: arrays of the checkpoint that will be written after the update, if one will.

    Returns:
      Digest of each environment group's trajectory so far, for a checkpoint.
    """
    actors = [seconds for part in parts for seconds in part.times]
    activities = {k: sum(seconds[k] for seconds in actors) / len(actors) for k in actors[0]}
    marked = number == setup.num_updates or number % setup.args.logging.fingerprint_every == 0
    seconds = msgspec.structs.asdict(times) | activities
    wall_time = round(seconds.pop("wall_time"), 4)
    update = Update(
        version=number + 1,
        step=number * setup.batch_size,
        wall_time=wall_time,
        **metrics,
        **{name: round(value, 6) for name, value in seconds.items()},
        fingerprint=fingerprint(params) if marked else None,
        checkpoint=UNSET if saved is None else fingerprint(saved),
    )
    episodes = [episode for part in parts for episode in part.episodes]
    episodes.sort(key=lambda e: (e.step, e.env_index))
    digests = _write_actions(setup, log, parts)
    log.write(update, [rollout for part in parts for rollout in part.rollouts], episodes)
    return digests


def _write_actions(setup: Setup, log: RunLog, parts: Sequence[Part]) -> list[str]:
    """Record the actions of one rollout; return the digests of all groups."""
    groups = sorted((a for part in parts for a in part.actions), key=lambda a: a.group)
    shape = (setup.args.num_steps, setup.group_size)
    columns = [np.frombuffer(a.actions, "<u2").reshape(shape) for a in groups]
    whole = combine_digests(a.digest for a in groups)
    log.record.write_actions(
        pack(Frame(np.concatenate(columns, axis=1), whole), setup.actions_shape)
    )
    return [a.digest.hex() for a in groups]


def save_checkpoint(
    setup: Setup,
    log: RunLog,
    arrays: Mapping[str, np.ndarray],
    *,
    update: int,
    wall_time: float,
    digests: list[str],
    pinned: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write a checkpoint of the learner's state after an update that has been logged."""
    checkpoints.save(
        setup.directory,
        arrays,
        update=update,
        wall_time=wall_time,
        sizes=log.sizes(),
        digests=digests,
        pinned=pinned,
        keep=setup.args.checkpoints.keep_checkpoints,
    )
