"""One run: wires the actors and the learner of a trainer to its record, progress bar and logs."""

import json
import platform
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from cleanba import placement, scalar_log
from cleanba.actor_learner import Act, ActorLearner, ActorThread, EnvGroup, Failure, GroupRollout
from cleanba.command_line import BadInput, RunOptions
from cleanba.environments import EnvSpec, check_env_id, describe_env, env_seeds, make_envs
from cleanba.groupwise import GroupExchange, fingerprint
from cleanba.networks import make_network
from cleanba.placement import Hardware, Layout
from cleanba.record import RunWriter, check_writable, run_name, source_revision

# Streams of random keys. Every key of a run is folded in from (seed, stream, group), so that no two
# groups, threads or processes share one.
INIT_STREAM, ACTION_STREAM, LEARNER_STREAM = 0, 1, 2

PACKAGES = ("jax", "jaxlib", "flax", "optax", "rlax", "envpool", "numpy")


class Setup(NamedTuple):
    """A run that has been checked and may begin."""

    name: str  # of the trainer
    system: str
    setting: str
    directory: Path
    spec: EnvSpec
    layout: Layout
    hardware: Hardware
    run: RunOptions
    seed: int
    num_envs: int
    num_steps: int
    num_updates: int
    concurrency: bool
    preprocessing: str

    @property
    def group_size(self) -> int:
        """Environments of one group."""
        return self.num_envs // self.layout.num_groups

    @property
    def batch_size(self) -> int:
        """Steps that one update learns from."""
        return self.num_envs * self.num_steps


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
      BadInput: if both are given and disagree, or are not positive.
    """
    _, processes = placement.slurm_processes(hardware)
    if local_num_envs is None:
        total = default if num_envs is None else num_envs
    else:
        threads = hardware.num_actor_threads * len(hardware.actor_device_ids) * processes
        total = local_num_envs * threads
        if num_envs not in (None, total):
            raise BadInput(
                f"--local-num-envs {local_num_envs} on {threads} actor threads makes {total} "
                f"environments, but --num-envs says {num_envs}: give one of them"
            )
    if total < 1:
        raise BadInput(f"--num-envs {total}: must be 1 or more")
    return total


def prepare(
    *,
    name: str,
    env_id: str,
    preprocessing: str,
    seed: int,
    total_timesteps: int,
    num_envs: int,
    num_env_groups: int | None,
    num_steps: int,
    concurrency: bool,
    hardware: Hardware,
    run: RunOptions,
) -> Setup:
    """Check everything that can be wrong with a run, start jax, and lay the run out.

    Divisibility: the number of groups divides `num_envs`, the number of processes divides the
    number of groups, and there are no more actor threads or learner devices than groups.

    Raises:
      BadInput: with one line. Nothing has been written then.
    """
    if num_steps < 1:
        raise BadInput(f"--num-steps {num_steps}: must be 1 or more")
    if run.fingerprint_every < 1 or run.log_frequency < 1:
        raise BadInput("--fingerprint-every and --log-frequency must be 1 or more")
    batch_size = num_envs * num_steps
    if total_timesteps < batch_size:
        raise BadInput(
            f"--total-timesteps {total_timesteps}: one update learns from {batch_size} steps "
            f"({num_envs} environments x {num_steps} steps)"
        )
    try:
        groups = num_env_groups or placement.default_num_env_groups(num_envs)
        if groups < 1 or num_envs % groups:
            raise BadInput(f"--num-env-groups {groups}: must divide the {num_envs} environments")
        process, num_processes = placement.slurm_processes(hardware)
        layout = placement.plan(hardware, groups, process, num_processes)
        env_seeds(seed, 0, num_envs)
        check_env_id(env_id)
        system = name if concurrency else f"{name}-sync"
        setting = run.setting or placement.setting_name(hardware, num_processes)
        directory = Path(run.runs_dir) / run.study / run_name(system, setting, env_id, seed)
        check_writable(directory, run.overwrite)
        placement.start_jax(hardware)
        spec = describe_env(env_id, preprocessing)
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(str(error)) from None
    return Setup(
        name,
        system,
        setting,
        directory,
        spec,
        layout,
        hardware,
        run,
        seed,
        num_envs,
        num_steps,
        total_timesteps // batch_size,
        concurrency,
        preprocessing,
    )


def stream_key(seed: int, stream: int, group: int = 0) -> jax.Array:
    """Return the first random key of one stream of one group of a run."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), group)


def initial_params(setup: Setup, network: Any) -> Any:
    """Initialise a network's parameters, the same bits on any number of cores.

    Orthogonal initialisation is a QR factorisation, and LAPACK's result depends on its threads, so
    it gets one.
    """
    obs = np.zeros((1, *setup.spec.obs_shape), setup.spec.obs_dtype)
    with threadpool_limits(1, user_api="blas"):
        params = jax.jit(network.init)(stream_key(setup.seed, INIT_STREAM), obs)
        return jax.block_until_ready(params)


def _make_actors(setup: Setup, act: Act, exchange: GroupExchange, clock: Any, failure: Failure):  # noqa: ANN202
    devices = jax.local_devices()
    env_threads = setup.hardware.envpool_threads
    if env_threads is None:
        cores = len(placement.os.sched_getaffinity(0))
        env_threads = min(cores, setup.group_size)

    def make_group(group: int, device: jax.Device) -> EnvGroup:
        seeds = env_seeds(setup.seed, group * setup.group_size, setup.group_size)
        envs = make_envs(setup.spec.env_id, seeds, env_threads, setup.preprocessing)
        key = jax.device_put(stream_key(setup.seed, ACTION_STREAM, group), device)
        return EnvGroup(group, envs, setup.group_size, key, act)

    return [
        ActorThread(
            actor.thread,
            lambda actor=actor: [make_group(g, devices[actor.device_id]) for g in actor.groups],
            exchange.device_of,
            num_steps=setup.num_steps,
            steps_per_env_step=setup.num_envs,
            num_rollouts=setup.num_updates,
            concurrency=setup.concurrency,
            clock=clock,
            failure=failure,
        )
        for actor in setup.layout.actors
    ]


def train(
    setup: Setup,
    hyperparameters: Mapping[str, Any],
    state: TrainState,
    act: Act,
    update: Update,
    exchange: GroupExchange,
) -> TrainState:
    """Train, and record it.

    Args:
      setup: the checked run.
      hyperparameters: all that may change what is learned, for the record.
      state: initial parameters and optimiser state.
      act: compiled inference of one group, see `EnvGroup`.
      update: one update: (state, rollout by local group, number of the update from 1) to the next
        state and metrics (scalars on the device; `loss`, `learning_rate` and others).
      exchange: the devices of the groups.

    Returns:
      The final state.
    """
    is_writer = setup.layout.process == 0
    log = _RunLog(setup, hyperparameters) if is_writer else None
    start = time.perf_counter()
    failure = Failure()
    actors = _make_actors(setup, act, exchange, lambda: time.perf_counter() - start, failure)
    devices = [jax.local_devices()[actor.device_id] for actor in setup.layout.actors]
    runner = ActorLearner(
        actors,
        devices,
        num_updates=setup.num_updates,
        concurrency=setup.concurrency,
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
                learner_version = runner.version
                runner.version += 1
                runner.put_params(state.params)
                now = time.perf_counter() - start
                lines = _describe_rollouts(setup, rollouts, learner_version)
                gathered = exchange.gather_bytes(json.dumps(lines).encode())
                if log is not None:
                    log.write_update(
                        version=runner.version,
                        now=now,
                        update_seconds=now - last,
                        metrics=metrics,
                        rollout_queue_get_time=get_time,
                        training_time=training_time,
                        params=state.params,
                        rollouts=[json.loads(part) for part in gathered],
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
    steps = setup.num_steps * setup.group_size
    groups = [
        (group, r.thread, r.number, r.wall_time, r.version)
        for r in rollouts
        for group in r.groups
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

    def __init__(self, setup: Setup, hyperparameters: Mapping[str, Any]):
        self._setup = setup
        header = {
            "system": setup.system,
            "setting": setup.setting,
            "env_id": setup.spec.env_id,
            "seed": setup.seed,
            "study": setup.run.study,
            "hyperparameters": dict(hyperparameters),
            "hardware": placement.describe_hardware(setup.hardware, setup.layout.num_processes),
            "versions": _versions(),
            "revision": source_revision(Path(__file__).parent),
            "command": ["python", *sys.argv],
        }
        self._record = RunWriter(setup.directory, header, setup.run.overwrite)
        self._board = scalar_log.TensorBoardWriter(setup.directory / "tensorboard")
        self._board.write_text("hyperparameters", scalar_log.hyperparameter_table(hyperparameters))
        self._wandb = _start_wandb(setup, hyperparameters) if setup.run.track else None
        self._returns: deque[float] = deque(maxlen=100)
        self._lengths: deque[int] = deque(maxlen=100)
        self._bar = tqdm(
            total=setup.num_updates * setup.batch_size,
            unit="step",
            unit_scale=True,
            disable=not setup.run.progress,
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
        rollouts: list[dict[str, Any]],
        last: bool,
    ) -> None:
        """Record one update and the rollouts that it learned from."""
        setup = self._setup
        episodes = sorted(
            (e for part in rollouts for e in part["episodes"]),
            key=lambda e: (e["step"], e["env_index"]),
        )
        self._record.write("episodes", episodes)
        self._record.write("rollouts", (line for part in rollouts for line in part["rollouts"]))
        all_times = [times for part in rollouts for times in part["times"]]
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
        if last or number % setup.run.fingerprint_every == 0:
            line["fingerprint"] = fingerprint(params)
        self._record.write("updates", [line])
        self._returns.extend(e["return"] for e in episodes)
        self._lengths.extend(e["length"] for e in episodes)
        if last or number % setup.run.log_frequency == 0:
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
                "learner"
                if rollout_queue_get_time > times["params_queue_get_time"]
                else "actors"
            )
            lag = number - rollouts[0]["rollouts"][0]["version_first"]
            mean = f"{np.mean(self._returns):.1f}" if self._returns else "none yet"
            self._bar.set_postfix_str(f"return {mean}, lag {lag}, waiting: {waiting}", refresh=False)

    def close(self, error: BaseException | None) -> None:
        """Close everything, with the status that the error, if any, calls for."""
        self._bar.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(error is not None))
        self._record.__exit__(type(error) if error else None, error, None)
        if error is None:
            print(f"completed: {shlex.quote(str(self._setup.directory))}")


def _start_wandb(setup: Setup, hyperparameters: Mapping[str, Any]) -> Any:
    import os

    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode is None and wandb.api.api_key is None:
        print("no Weights & Biases API key: tracking offline (wandb sync uploads it later)")
        mode = "offline"
    return wandb.init(
        project=setup.run.wandb_project_name,
        entity=setup.run.wandb_entity,
        name=f"{setup.spec.env_id}__{setup.system}__{setup.seed}",
        config=dict(hyperparameters) | {"setting": setup.setting, "seed": setup.seed},
        dir=setup.directory,
        mode=mode,
    )


def make_network_or_refuse(
    name: str, spec: EnvSpec, channels: tuple[int, ...] | None, hiddens: tuple[int, ...] | None
) -> Any:
    """Build the network of a run, see `networks.make_network`.

    Raises:
      BadInput: with one line, if the network does not fit the environment or its options.
    """
    images = len(spec.obs_shape) == 3
    if images != (name != "mlp"):
        fits = "resnet or nature" if images else "mlp"
        raise BadInput(f"--network {name}: {spec.env_id} gives {spec.obs_shape}; choose {fits}")
    try:
        return make_network(name, spec.num_actions, channels, hiddens)
    except ValueError as error:
        raise BadInput(str(error)) from None
