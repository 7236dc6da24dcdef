"""One run: wires the actors and the learner of a trainer to its log."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np
from tqdm import tqdm

from cleanba import evaluate, trees
from cleanba.actor_learner import (
    Act,
    ActorLearner,
    ActorThread,
    EnvGroup,
    Failure,
    GroupRollout,
    Stopped,
)
from cleanba.compatibility import env_overrides, restores
from cleanba.environments import make_envs
from cleanba.exact.groups import GroupExchange
from cleanba.exact.placement import ActorPlacement, saved_by_cache
from cleanba.preparation import Setup, pinned
from cleanba.record import ACTIONS_FILE, checkpoints
from cleanba.record.actions import DamagedActions, read_frames
from cleanba.record.checkpoints import Checkpoint
from cleanba.update_log import (
    Part,
    UpdateTimes,
    begin_log,
    describe_rollouts,
    log_update,
    save_checkpoint,
)

# Streams of random keys. Every key of a run is folded in from (seed, stream, group), so that no two
# groups, threads or processes share one.
INIT_STREAM, ACTION_STREAM, LEARNER_STREAM = 0, 1, 2

# Seconds between two switches of Python's threads: less than an environment step takes. With Python's
# own 5 ms the actors of fast environments wait for the learner's bookkeeping.
SWITCH_INTERVAL = 1e-4


class TrainState(NamedTuple):
    """What the learner carries from update to update."""

    params: Any
    opt_state: Any


Update = Callable[
    [TrainState, dict[int, GroupRollout], int], tuple[TrainState, Mapping[str, jax.Array]]
]


def stream_key(seed: int, stream: int, group: int = 0) -> jax.Array:
    """Return the first random key of one stream of one group of a run."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), group)


def initial_params(setup: Setup) -> Any:
    """Initialize a network's parameters."""
    obs = np.zeros((1, *setup.spec.obs_shape), setup.spec.obs_dtype)
    return jax.jit(setup.network.init)(stream_key(setup.args.seed, INIT_STREAM), obs)


def _rebuild(
    setup: Setup,
    checkpoint: Checkpoint,
    group: EnvGroup,
    advance: Callable[[int], Any],
    failure: Failure,
) -> None:
    """Bring a new environment group to its state at a checkpoint, by replaying its actions."""
    columns = slice(group.index * setup.group_size, (group.index + 1) * setup.group_size)
    digest = b""
    path = setup.directory / ACTIONS_FILE
    try:
        for frame in read_frames(path, setup.actions_shape, checkpoint.update):
            if failure.stopped.is_set():
                raise Stopped
            digest, _ = group.replay(np.ascontiguousarray(frame.actions[:, columns]))
            advance(setup.args.num_steps * setup.group_size)
    except DamagedActions as error:
        raise RuntimeError(f"{path}: {error}") from None
    if [digest.hex()] != checkpoint.digests[group.index : group.index + 1]:
        raise RuntimeError(
            f"{path}: the recorded actions do not lead environment group {group.index} to where "
            f"it was at update {checkpoint.update}"
        )


def make_group(
    setup: Setup, act: Act, index: int, device: jax.Device, stream: int | None = None
) -> EnvGroup:
    """Make an environment group of a run.

    Args:
      setup: the run.
      act: compiled inference of one group, see `EnvGroup`.
      index: index of the group in the run.
      device: acts.
      stream: of the group's random numbers; by default its index.
    """
    env_threads = setup.args.hardware.envpool_threads
    if env_threads is None:
        env_threads = min(len(os.sched_getaffinity(0)), setup.group_size)
    compat = setup.args.compat
    envs = make_envs(
        setup.spec.env_id,
        setup.env_seeds[index * setup.group_size : (index + 1) * setup.group_size],
        env_threads,
        setup.args.atari_preprocessing,
        **env_overrides(compat, setup.spec.is_atari),
    )
    stream = index if stream is None else stream
    key = jax.device_put(stream_key(setup.args.seed, ACTION_STREAM, stream), device)
    with_entry = restores(compat, "alignment") or restores(compat, "mask")
    return EnvGroup(index, envs, setup.group_size, key, act, with_entry)


def _make_actors(
    setup: Setup,
    act: Act,
    exchange: GroupExchange,
    clock: Callable[[], float],
    advance: Callable[[int], Any],
    failure: Failure,
) -> list[ActorThread]:
    devices = jax.local_devices()

    def make(index: int, actor: ActorPlacement) -> EnvGroup:
        # The original's actor threads start from one key.
        stream = actor.groups.index(index) if restores(setup.args.compat, "seeds") else index
        group = make_group(setup, act, index, devices[actor.device_id], stream)
        if setup.checkpoint is not None:
            _rebuild(setup, setup.checkpoint, group, advance, failure)
        return group

    return [
        ActorThread(
            actor.thread,
            lambda actor=actor: [make(index, actor) for index in actor.groups],
            exchange.device_of,
            num_steps=setup.args.num_steps,
            steps_per_env_step=setup.num_envs,
            num_rollouts=setup.num_updates,
            rollouts_done=setup.updates_done,
            concurrency=setup.args.concurrency,
            clock=clock,
            failure=failure,
        )
        for actor in setup.placement.actors
    ]


class Trainer(NamedTuple):
    """An algorithm, compiled for a run.

    Attributes:
      state: initial parameters and optimizer state.
      act: inference of one group, see `EnvGroup`.
      update: one update: (state, rollout by local group, number of the update from 1) to the next
        state and metrics (scalars on the device; `loss`, `learning_rate` and others).
      exchange: the devices of the groups.
    """

    state: TrainState
    act: Act
    update: Update
    exchange: GroupExchange


def train(setup: Setup, trainer: Trainer) -> TrainState:
    """Train and record a run; return the final state of the learner."""
    state, act, update, exchange = trainer
    # An actor that wants to send its actions waits at most this long for the learner's Python code.
    sys.setswitchinterval(SWITCH_INTERVAL)
    # The Cleanba architecture collects its next rollout with the parameters before the newest, so a
    # checkpoint holds both.
    previous = state.params
    if setup.checkpoint is not None:
        arrays = checkpoints.load(setup.checkpoint)
        state, previous = from_arrays(arrays, state, setup.args.concurrency)
    with _naming_lost_processes(setup):
        found = exchange.gather_bytes(b"%d" % setup.updates_done)
    if len(set(found)) > 1:
        raise RuntimeError("the processes found different checkpoints: do they share the folder?")
    with contextlib.ExitStack() as stack:
        # Only the first process logs. The log is closed after the actors.
        log = stack.enter_context(begin_log(setup)) if setup.placement.process == 0 else None
        stack.enter_context(_naming_lost_processes(setup))
        last = setup.checkpoint.wall_time if setup.checkpoint else 0.0
        start = time.perf_counter() - last
        replayed = stack.enter_context(
            tqdm(
                total=setup.updates_done
                * setup.args.num_steps
                * setup.group_size
                * len(setup.placement.local_groups),
                desc="rebuilding the environments",
                unit="step",
                unit_scale=True,
                disable=setup.checkpoint is None or log is None,
            )
        )
        failure = Failure()
        actors = _make_actors(
            setup, act, exchange, lambda: time.perf_counter() - start, replayed.update, failure
        )
        devices = [jax.local_devices()[actor.device_id] for actor in setup.placement.actors]
        runner = ActorLearner(
            actors,
            devices,
            num_updates=setup.num_updates,
            updates_done=setup.updates_done,
            concurrency=setup.args.concurrency,
            failure=failure,
        )
        state, previous = jax.device_put((state, previous), exchange.lead)
        with runner:
            if setup.checkpoint is None:
                runner.put_params(state.params)
            else:
                runner.resume_params(previous, state.params)
            for number in range(setup.updates_done + 1, setup.num_updates + 1):
                rollouts, get_time = runner.get_rollouts()
                replayed.close()
                before = time.perf_counter()
                data = {g: rollout for r in rollouts for g, rollout in r.groups.items()}
                previous = state.params
                state, metrics = update(state, data, number)
                learner_version = runner.version
                runner.version += 1
                # Complete before they are sent, so that an actor's wait for them is measured as one.
                jax.block_until_ready(state.params)
                runner.put_params(state.params)
                metrics = {k: float(v) for k, v in jax.device_get(metrics).items()}
                training_time = time.perf_counter() - before
                if not np.isfinite(metrics["loss"]):
                    raise FloatingPointError(f"the loss of update {number} is {metrics['loss']}")
                now = time.perf_counter() - start
                part = describe_rollouts(setup, rollouts, learner_version)
                encoded = exchange.gather_bytes(msgspec.msgpack.encode(part))
                if log is not None:
                    times = UpdateTimes(now, now - last, get_time, training_time)
                    parts = [msgspec.msgpack.decode(data, type=Part) for data in encoded]
                    every = setup.args.checkpoints.checkpoint_every
                    saved = None
                    if every and number % every == 0:
                        saved = to_arrays(state, previous if setup.args.concurrency else None)
                    digests = log_update(
                        setup, log, parts, number, times, metrics, state.params, saved
                    )
                    if saved is not None:
                        save_checkpoint(
                            setup,
                            log,
                            saved,
                            update=number,
                            wall_time=now,
                            digests=digests,
                            pinned=pinned(setup.hyperparameters, setup.placement),
                        )
                last = now
        evaluate.save_final_model(setup, state.params)  # before the record is marked as completed
        if log is not None:
            log.note_hardware(saved_by_cache())
    return state


@contextlib.contextmanager
def _naming_lost_processes(setup: Setup) -> Iterator[None]:
    """In a run of several processes, replace jax's error when one is lost by one that says so."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if setup.placement.num_processes == 1:
            raise
        raise ConnectionError(
            "another process of this run has ended or cannot be reached (its own output says why); "
            "--resume continues from the last checkpoint"
        ) from error


def _checkpoint_tree(state: TrainState, previous: Any | None) -> dict[str, Any]:
    return {**state._asdict(), "previous": previous}


def to_arrays(state: TrainState, previous: Any | None) -> dict[str, np.ndarray]:
    """Return what a checkpoint holds, see `trees.to_arrays`.

    Args:
      state: of the learner.
      previous: parameters that collect the next rollout, or None if they are the state's.
    """
    return trees.to_arrays(_checkpoint_tree(state, previous))


def from_arrays(
    arrays: Mapping[str, np.ndarray], like: TrainState, concurrency: bool
) -> tuple[TrainState, Any]:
    """Return the state that a checkpoint holds, and the parameters that collect the next rollout.

    Args:
      arrays: what `to_arrays` returned.
      like: a state of the same run, or its shapes.
      concurrency: whether these parameters are the previous ones, see `to_arrays`.

    Raises:
      RecordError: with one line, if the arrays are those of another network or optimizer.
    """
    tree = trees.from_arrays(arrays, _checkpoint_tree(like, like.params if concurrency else None))
    acting = tree["previous"] if concurrency else tree["params"]
    return TrainState(tree["params"], tree["opt_state"]), acting
