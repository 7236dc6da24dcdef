"""One run: wires the actors and the learner of a trainer to its record, progress bar and logs."""

import os
import platform
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from cleanba import placement, scalar_log
from cleanba.actor_learner import Act, ActorLearner, ActorThread, EnvGroup, Failure, GroupRollout
from cleanba.command_line import BadInput, RunOptions
from cleanba.environments import EnvSpec, check_env_id, describe_env, env_seeds, make_envs
from cleanba.groupwise import GroupExchange, fingerprint
from cleanba.networks import check_fits, default_network, make_network
from cleanba.placement import Hardware, Layout
from cleanba.record import RunWriter, check_writable, run_name, source_revision

# Streams of random keys. Every key of a run is folded in from (seed, stream, group), so that no two
# groups, threads or processes share one.
INIT_STREAM, ACTION_STREAM, LEARNER_STREAM = 0, 1, 2

# Most images that one call of a gradient function takes on a CPU: XLA computes convolution gradients
# fastest in batches of 16 to 64 images there (`make bench`).
CPU_IMAGES_PER_GRADIENT = 64

PACKAGES = ("jax", "jaxlib", "flax", "optax", "rlax", "envpool", "numpy")


class CommonArgs(Protocol):
    """The hyperparameters and options that every trainer's command line has."""

    env_id: str
    seed: int
    total_timesteps: int
    num_envs: int | None
    local_num_envs: int | None
    num_env_groups: int | None
    num_steps: int
    num_minibatches: int
    concurrency: bool
    network: str
    channels: tuple[int, ...] | None
    hiddens: tuple[int, ...] | None
    atari_preprocessing: str
    microbatch_size: int | None
    hardware: Hardware
    run: RunOptions


class Setup(NamedTuple):
    """A run that has been checked and may begin."""

    name: str  # of the trainer
    system: str
    setting: str
    directory: Path
    args: Any  # the trainer's command line
    hyperparameters: dict[str, Any]  # as recorded: with what was chosen where args say None
    spec: EnvSpec
    network: Any
    layout: Layout
    num_envs: int
    num_updates: int
    minibatch_size: int  # units (transitions or environments) that a group has in a minibatch
    microbatch_size: int  # units in one call of the gradient function

    @property
    def group_size(self) -> int:
        """Environments of one group."""
        return self.num_envs // self.layout.num_groups

    @property
    def batch_size(self) -> int:
        """Steps that one update learns from."""
        return self.num_envs * self.args.num_steps


class TrainState(NamedTuple):
    """What the learner carries from update to update."""

    params: Any
    opt_state: Any


Update = Callable[
    [TrainState, dict[int, GroupRollout], int], tuple[TrainState, Mapping[str, jax.Array]]
]


def resolve_num_envs(
    num_envs: int | None, local_num_envs: int | None, hardware: Hardware, default: int
) -> int:
    """Return the environments of the whole run.

    Args:
      num_envs: the layout-free way to say it.
      local_num_envs: environments of each actor thread, as in the Cleanba README.
      hardware: the layout that multiplies `local_num_envs`.
      default: used when neither is given.

    Raises:
      ValueError: with one line, if both are given and disagree, or are not positive.
    """
    _, processes = placement.slurm_processes(hardware)
    if local_num_envs is None:
        total = default if num_envs is None else num_envs
    else:
        threads = hardware.num_actor_threads * len(hardware.actor_device_ids) * processes
        total = local_num_envs * threads
        if num_envs not in (None, total):
            raise ValueError(
                f"--local-num-envs {local_num_envs} on {threads} actor threads makes {total} "
                f"environments, but --num-envs says {num_envs}: give one of them"
            )
    if total < 1:
        raise ValueError(f"--num-envs {total}: must be 1 or more")
    return total


def prepare(
    args: CommonArgs,
    *,
    name: str,
    default_num_envs: int,
    units_per_env: int,
    images_per_unit: int,
) -> Setup:
    """Check everything that can be wrong with a run, start jax, and lay the run out.

    Divisibility: the number of groups divides `num_envs`, the number of minibatches divides the
    units of a group, the number of processes divides the number of groups, and there are no more
    actor threads or learner devices than groups of a process.

    Args:
      args: the command line.
      name: of the trainer.
      default_num_envs: environments where the command line does not say.
      units_per_env: what minibatches are cut from, per environment: its steps (PPO) or itself, 1
        (IMPALA).
      images_per_unit: forward passes that one unit needs in the gradient.

    Returns:
      The run, ready to begin. Nothing has been written yet.

    Raises:
      BadInput: with one line.
    """
    try:
        return _checked(args, name, default_num_envs, units_per_env, images_per_unit)
    except ValueError as error:
        raise BadInput(str(error)) from None


def _checked(
    args: CommonArgs, name: str, default_num_envs: int, units_per_env: int, images_per_unit: int
) -> Setup:
    for flag in ("num_steps", "num_minibatches"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be 1 or more")
    if args.run.fingerprint_every < 1 or args.run.log_frequency < 1:
        raise ValueError("--fingerprint-every and --log-frequency must be 1 or more")
    num_envs = resolve_num_envs(args.num_envs, args.local_num_envs, args.hardware, default_num_envs)
    batch_size = num_envs * args.num_steps
    if args.total_timesteps < batch_size:
        raise ValueError(
            f"--total-timesteps {args.total_timesteps}: one update learns from {batch_size} steps "
            f"({num_envs} environments x {args.num_steps} steps)"
        )
    groups = args.num_env_groups or placement.default_num_env_groups(
        num_envs, units_per_env, args.num_minibatches
    )
    if groups < 1 or num_envs % groups:
        raise ValueError(f"--num-env-groups {groups}: must divide the {num_envs} environments")
    group_units = num_envs // groups * units_per_env
    if group_units % args.num_minibatches:
        what = "environments" if units_per_env == 1 else "transitions"
        raise ValueError(
            f"--num-minibatches {args.num_minibatches}: must divide the {group_units} {what} of a "
            f"group ({num_envs} environments in {groups} groups)"
        )
    process, num_processes = placement.slurm_processes(args.hardware)
    layout = placement.plan(args.hardware, groups, process, num_processes)
    env_seeds(args.seed, 0, num_envs)
    check_env_id(args.env_id)
    system = name if args.concurrency else f"{name}-sync"
    setting = args.run.setting or placement.setting_name(args.hardware, num_processes)
    folder = run_name(system, setting, args.env_id, args.seed)
    directory = Path(args.run.runs_dir) / args.run.study / folder
    if process == 0:
        check_writable(directory, args.run.overwrite)
    spec = describe_env(args.env_id, args.atari_preprocessing)
    network_name = args.network
    if network_name == "auto":
        network_name = default_network(spec.obs_shape)
    check_fits(network_name, spec.obs_shape)
    network = make_network(network_name, spec.num_actions, args.channels, args.hiddens)
    placement.start_jax(args.hardware)
    minibatch_size = group_units // args.num_minibatches
    microbatch_size = choose_microbatch_size(
        args.microbatch_size, minibatch_size, images_per_unit, spec
    )
    hyperparameters = {
        k: v for k, v in asdict(args).items() if k not in ("hardware", "run", "local_num_envs")
    } | {
        "num_envs": num_envs,
        "num_env_groups": groups,
        "network": network_name,
        "microbatch_size": microbatch_size,
    }
    return Setup(
        name=name,
        system=system,
        setting=setting,
        directory=directory,
        args=args,
        hyperparameters=hyperparameters,
        spec=spec,
        network=network,
        layout=layout,
        num_envs=num_envs,
        num_updates=args.total_timesteps // batch_size,
        minibatch_size=minibatch_size,
        microbatch_size=microbatch_size,
    )


def choose_microbatch_size(
    requested: int | None, minibatch_size: int, images_per_unit: int, spec: EnvSpec
) -> int:
    """Return the units of one gradient call, a divisor of a group's part of a minibatch.

    Args:
      requested: what the command line says, if it does.
      minibatch_size: units of a group in a minibatch.
      images_per_unit: forward passes that one unit needs in the gradient.
      spec: the environment.

    Raises:
      ValueError: with one line, if the requested size does not divide.
    """
    if requested is not None:
        if requested < 1 or minibatch_size % requested:
            raise ValueError(
                f"--microbatch-size {requested}: must divide the {minibatch_size} that a group "
                "has in a minibatch"
            )
        return requested
    largest = minibatch_size
    if jax.local_devices()[0].platform == "cpu" and len(spec.obs_shape) == 3:
        largest = min(largest, max(1, CPU_IMAGES_PER_GRADIENT // images_per_unit))
    return max(size for size in range(1, largest + 1) if minibatch_size % size == 0)


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


def _make_actors(setup: Setup, act: Act, exchange: GroupExchange, clock: Any, failure: Failure):
    devices = jax.local_devices()
    env_threads = setup.args.hardware.envpool_threads
    if env_threads is None:
        cores = len(os.sched_getaffinity(0))
        env_threads = min(cores, setup.group_size)

    def make_group(group: int, device: jax.Device) -> EnvGroup:
        seeds = env_seeds(setup.args.seed, group * setup.group_size, setup.group_size)
        envs = make_envs(setup.spec.env_id, seeds, env_threads, setup.args.atari_preprocessing)
        key = jax.device_put(stream_key(setup.args.seed, ACTION_STREAM, group), device)
        return EnvGroup(group, envs, setup.group_size, key, act)

    return [
        ActorThread(
            actor.thread,
            lambda actor=actor: [make_group(g, devices[actor.device_id]) for g in actor.groups],
            exchange.device_of,
            num_steps=setup.args.num_steps,
            steps_per_env_step=setup.num_envs,
            num_rollouts=setup.num_updates,
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
    is_writer = setup.layout.process == 0
    log = _RunLog(setup) if is_writer else None
    start = time.perf_counter()
    failure = Failure()
    actors = _make_actors(setup, act, exchange, lambda: time.perf_counter() - start, failure)
    devices = [jax.local_devices()[actor.device_id] for actor in setup.layout.actors]
    runner = ActorLearner(
        actors,
        devices,
        num_updates=setup.num_updates,
        concurrency=setup.args.concurrency,
        failure=failure,
    )
    error: BaseException | None = None
    try:
        state = jax.device_put(state, exchange.lead)
        last = 0.0
        with runner:
            runner.put_params(state.params)
            for number in range(1, setup.num_updates + 1):
                rollouts, get_time = runner.get_rollouts()
                before = time.perf_counter()
                data = {g: rollout for r in rollouts for g, rollout in r.groups.items()}
                state, metrics = update(state, data, number)
                metrics = {k: float(v) for k, v in jax.device_get(metrics).items()}
                training_time = time.perf_counter() - before
                if not np.isfinite(metrics["loss"]):
                    raise FloatingPointError(f"the loss of update {number} is {metrics['loss']}")
                learner_version = runner.version
                runner.version += 1
                runner.put_params(state.params)
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
                last = now
    except BaseException as caught:
        error = caught
        raise
    finally:
        if log is not None:
            log.close(error)
    return state


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
        "times": [r.times for r in rollouts],
    }


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {p: metadata.version(p) for p in PACKAGES}


class _RunLog:
    """Everything that one process writes about a run: record, TensorBoard, W&B, progress bar."""

    def __init__(self, setup: Setup):
        self._setup = setup
        header = {
            "system": setup.system,
            "setting": setup.setting,
            "env_id": setup.spec.env_id,
            "seed": setup.args.seed,
            "study": setup.args.run.study,
            "hyperparameters": setup.hyperparameters,
            "hardware": placement.describe_hardware(
                setup.args.hardware, setup.layout.num_processes
            ),
            "versions": _versions(),
            "revision": source_revision(Path(__file__).parent),
            "command": ["python", *sys.argv],
        }
        self._record = RunWriter(setup.directory, header, setup.args.run.overwrite)
        self._board = scalar_log.TensorBoardWriter(setup.directory / "tensorboard")
        self._board.write_text(
            "hyperparameters", scalar_log.hyperparameter_table(setup.hyperparameters)
        )
        self._wandb = _start_wandb(setup) if setup.args.run.track else None
        self._returns: deque[float] = deque(maxlen=100)
        self._lengths: deque[int] = deque(maxlen=100)
        self._bar = tqdm(
            total=setup.num_updates * setup.batch_size,
            unit="step",
            unit_scale=True,
            disable=not setup.args.run.progress,
            dynamic_ncols=True,
            mininterval=0.5,
        )

    def write_update(
        self,
        *,
        version: int,
        now: float,
        update_seconds: float,
        metrics: Mapping[str, float],
        rollout_queue_get_time: float,
        training_time: float,
        params: Any,
        parts: list[dict[str, Any]],
        last: bool,
    ) -> None:
        """Record one update and the rollouts that it learned from, a part from each process."""
        setup = self._setup
        episodes = sorted(
            (e for part in parts for e in part["episodes"]),
            key=lambda e: (e["step"], e["env_index"]),
        )
        self._record.write("episodes", episodes)
        self._record.write("rollouts", (line for part in parts for line in part["rollouts"]))
        all_times = [times for part in parts for times in part["times"]]
        times = {k: sum(t[k] for t in all_times) / len(all_times) for k in all_times[0]}
        number = version - 1
        line = {
            "version": version,
            "step": number * setup.batch_size,
            "wall_time": round(now, 4),
            "update_seconds": round(update_seconds, 6),
            **metrics,
            "rollout_queue_get_time": round(rollout_queue_get_time, 6),
            **{k: round(v, 6) for k, v in times.items()},
            "training_time": round(training_time, 6),
            "fingerprint": None,
        }
        if last or number % setup.args.run.fingerprint_every == 0:
            line["fingerprint"] = fingerprint(params)
        self._record.write("updates", [line])
        self._returns.extend(e["return"] for e in episodes)
        self._lengths.extend(e["length"] for e in episodes)
        if last or number % setup.args.run.log_frequency == 0:
            scalars = scalar_log.update_scalars(line, setup.batch_size)
            if self._returns:
                scalars["charts/avg_episodic_return"] = float(np.mean(self._returns))
                scalars["charts/avg_episodic_length"] = float(np.mean(self._lengths))
            self._board.write(line["step"], scalars)
            if self._wandb is not None:
                self._wandb.log(scalars | {"global_step": line["step"]}, step=line["step"])
        self._bar.update(setup.batch_size)
        if not self._bar.disable:
            waiting = (
                "learner" if rollout_queue_get_time > times["params_queue_get_time"] else "actors"
            )
            lag = number - parts[0]["rollouts"][0]["version_first"]
            mean = f"{np.mean(self._returns):.1f}" if self._returns else "none yet"
            self._bar.set_postfix_str(
                f"return {mean}, lag {lag}, waiting: {waiting}", refresh=False
            )

    def close(self, error: BaseException | None) -> None:
        """Close everything, with the status that the error, if any, calls for."""
        self._bar.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(error is not None))
        self._record.__exit__(type(error) if error else None, error, None)
        if error is None:
            print(f"completed: {shlex.quote(str(self._setup.directory))}")


def _start_wandb(setup: Setup) -> Any:
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode is None and not wandb.login(prompt=False):
        print("no Weights & Biases API key: tracking offline (wandb sync uploads it later)")
        mode = "offline"
    return wandb.init(
        project=setup.args.run.wandb_project_name,
        entity=setup.args.run.wandb_entity,
        name=f"{setup.spec.env_id}__{setup.system}__{setup.args.seed}",
        config=setup.hyperparameters | {"setting": setup.setting, "seed": setup.args.seed},
        dir=setup.args.run.runs_dir,  # not in the record: W&B notes user and host
        mode=mode,
    )
