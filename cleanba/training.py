"""One run: wires the actors and the learner of a trainer to its log."""

import base64
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from cleanba import checkpoints, evaluate
from cleanba.actions import DamagedActions, read_frames
from cleanba.actor_learner import (
    Act,
    ActorLearner,
    ActorThread,
    EnvGroup,
    Failure,
    GroupRollout,
    Stopped,
)
from cleanba.checkpoints import Checkpoint
from cleanba.environments import env_seeds, make_envs
from cleanba.groupwise import GroupExchange
from cleanba.preparation import Setup, pinned
from cleanba.record import ACTIONS_FILE, RecordError
from cleanba.run_log import RunLog

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
    """Initialise a network's parameters, the same bits on any number of cores.

    Orthogonal initialisation is a QR factorisation, and LAPACK's result depends on its threads, so
    it gets one.
    """
    obs = np.zeros((1, *setup.spec.obs_shape), setup.spec.obs_dtype)
    with threadpool_limits(1, user_api="blas"):
        params = jax.jit(setup.network.init)(stream_key(setup.args.seed, INIT_STREAM), obs)
        return jax.block_until_ready(params)


def _rebuild(
    setup: Setup,
    checkpoint: Checkpoint,
    group: EnvGroup,
    advance: Callable[[int], Any],
    failure: Failure,
) -> None:
    """Bring a new environment group to where it was at a checkpoint, by replaying its actions."""
    columns = slice(group.index * setup.group_size, (group.index + 1) * setup.group_size)
    digest = b""
    path = setup.directory / ACTIONS_FILE
    try:
        for frame in read_frames(path, setup.actions_shape, checkpoint.update):
            if failure.stopped.is_set():
                raise Stopped
            digest = group.replay(np.ascontiguousarray(frame.actions[:, columns]))
            advance(setup.args.num_steps * setup.group_size)
    except DamagedActions as error:
        raise RecordError(f"{path}: {error}") from None
    if digest.hex() != checkpoint.digests[group.index]:
        raise RecordError(
            f"{path}: the recorded actions do not lead environment group {group.index} to where "
            f"it was at update {checkpoint.update}"
        )


def _make_actors(
    setup: Setup,
    act: Act,
    exchange: GroupExchange,
    clock: Callable[[], float],
    advance: Callable[[int], Any],
    failure: Failure,
) -> list[ActorThread]:
    devices = jax.local_devices()
    env_threads = setup.args.hardware.envpool_threads
    if env_threads is None:
        cores = len(os.sched_getaffinity(0))
        env_threads = min(cores, setup.group_size)

    def make_group(index: int, device: jax.Device) -> EnvGroup:
        seeds = env_seeds(setup.args.seed, index * setup.group_size, setup.group_size)
        envs = make_envs(setup.spec.env_id, seeds, env_threads, setup.args.atari_preprocessing)
        key = jax.device_put(stream_key(setup.args.seed, ACTION_STREAM, index), device)
        group = EnvGroup(index, envs, setup.group_size, key, act)
        if setup.checkpoint is not None:
            _rebuild(setup, setup.checkpoint, group, advance, failure)
        return group

    return [
        ActorThread(
            actor.thread,
            lambda actor=actor: [make_group(g, devices[actor.device_id]) for g in actor.groups],
            exchange.device_of,
            num_steps=setup.args.num_steps,
            steps_per_env_step=setup.num_envs,
            num_rollouts=setup.num_updates,
            rollouts_done=setup.updates_done,
            concurrency=setup.args.concurrency,
            clock=clock,
            failure=failure,
        )
        for actor in setup.layout.actors
    ]


def train(
    setup: Setup,
    state: TrainState,
    act: Act,
    update: Update,
    exchange: GroupExchange,
) -> TrainState:
    """Train, and record it.

    Args:
      setup: the checked run.
      state: initial parameters and optimiser state.
      act: compiled inference of one group, see `EnvGroup`.
      update: one update: (state, rollout by local group, number of the update from 1) to the next
        state and metrics (scalars on the device; `loss`, `learning_rate` and others).
      exchange: the devices of the groups.

    Returns:
      The final state.
    """
    # An actor that wants to send its actions waits this long for the learner's Python to let go.
    sys.setswitchinterval(SWITCH_INTERVAL)
    run = setup.args.run
    # The Cleanba architecture collects its next rollout with the parameters before the newest, so a
    # checkpoint holds both.
    previous = state.params
    if setup.checkpoint is not None:
        tree = checkpoints.restore(setup.checkpoint, _as_tree(state, previous))
        state, previous = TrainState(tree["params"], tree["opt_state"]), tree["previous"]
    if len(set(exchange.gather_json(setup.updates_done))) > 1:
        raise RuntimeError("the processes found different checkpoints: do they share the folder?")
    log = RunLog(setup) if setup.layout.process == 0 else None
    last = setup.checkpoint.wall_time if setup.checkpoint else 0.0
    start = time.perf_counter() - last
    replayed = tqdm(
        total=setup.updates_done
        * setup.args.num_steps
        * setup.group_size
        * len(setup.layout.local_groups),
        desc="rebuilding the environments",
        unit="step",
        unit_scale=True,
        disable=setup.checkpoint is None or log is None,
    )
    failure = Failure()
    actors = _make_actors(
        setup, act, exchange, lambda: time.perf_counter() - start, replayed.update, failure
    )
    devices = [jax.local_devices()[actor.device_id] for actor in setup.layout.actors]
    runner = ActorLearner(
        actors,
        devices,
        num_updates=setup.num_updates,
        updates_done=setup.updates_done,
        concurrency=setup.args.concurrency,
        failure=failure,
    )
    error: BaseException | None = None
    try:
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
                # Complete before they are sent, so that an actor's wait for them is seen as one.
                jax.block_until_ready(state.params)
                runner.put_params(state.params)
                metrics = {k: float(v) for k, v in jax.device_get(metrics).items()}
                training_time = time.perf_counter() - before
                if not np.isfinite(metrics["loss"]):
                    raise FloatingPointError(f"the loss of update {number} is {metrics['loss']}")
                now = time.perf_counter() - start
                lines = _describe_rollouts(setup, rollouts, learner_version)
                parts = exchange.gather_json(lines)
                if log is not None:
                    log.write_update(
                        version=runner.version,
                        now=now,
                        update_seconds=now - last,
                        metrics=metrics,
                        rollout_queue_get_time=get_time,
                        training_time=training_time,
                        params=state.params,
                        parts=parts,
                        last=number == setup.num_updates,
                    )
                    if run.checkpoint_every and number % run.checkpoint_every == 0:
                        what = pinned(setup.hyperparameters, setup.layout)
                        log.save_checkpoint(_as_tree(state, previous), number, now, what)
                last = now
        evaluate.save_final_model(setup, state.params)  # before the record says `completed`
    except jax.errors.JaxRuntimeError as caught:
        error = caught
        if setup.layout.num_processes == 1:
            raise
        error = ConnectionError(
            "another process of this run has ended or cannot be reached (its own output says why); "
            "--resume goes on from the last checkpoint"
        )
        raise error from caught
    except BaseException as caught:
        error = caught
        raise
    finally:
        replayed.close()
        if log is not None:
            log.close(error)
    return state


def _as_tree(state: TrainState, previous: Any) -> dict[str, Any]:
    """Return what a checkpoint holds."""
    return {**state._asdict(), "previous": previous}


def _describe_rollouts(setup: Setup, rollouts: list, learner_version: int) -> dict[str, Any]:
    """Return what the record keeps of the rollouts of one process, as JSON can say it."""
    steps = setup.args.num_steps * setup.group_size
    groups = [
        (group, r.thread, r.number, r.wall_time, r.version) for r in rollouts for group in r.groups
    ]
    return {
        "rollouts": [
            {
                "actor": thread,
                "group": group,
                "rollout": number,
                "steps": steps,
                "wall_time": round(wall_time, 4),
                "version_first": version,
                "version_last": version,
                "versions": [[version, steps]],
                "learner_version": learner_version,
            }
            for group, thread, number, wall_time, version in sorted(groups)
        ],
        "episodes": [
            {
                "step": e.step,
                "wall_time": round(e.wall_time, 4),
                "env_index": e.env_index,
                "return": e.episode_return,
                "length": e.length,
            }
            for r in rollouts
            for e in r.episodes
        ],
        "traces": [
            {
                "group": group,
                "actions": base64.b64encode(trace.actions.astype("<u2")).decode(),
                "digest": trace.digest.hex(),
            }
            for r in rollouts
            for group, trace in r.traces.items()
        ],
        "times": [r.times for r in rollouts],
    }
