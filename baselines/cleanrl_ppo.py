"""CleanRL's PPO on EnvPool, in JAX: the synchronous reference of the comparison, in one file.

Proximal policy optimization (https://arxiv.org/abs/1707.06347) as CleanRL's
`ppo_atari_envpool_xla_jax_scan.py` has it (https://docs.cleanrl.dev/rl-algorithms/ppo): one process, one
batch of environments, one device; rollout and update take turns; the whole update is one compiled call.
It shares environments, networks and the run record with Cleanba PPO, but no code of the algorithm.
docs/ppo-details.md lists which implementation details of PPO each trainer has.

    python baselines/cleanrl_ppo.py --env-id Breakout-v5
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from msgspec import UNSET

from baselines.synchronous import Repetition, Times, check_batches, episode_rows, rows
from cleanba import record, trees
from cleanba.audit.preparation import platform_of, prepare_again
from cleanba.audit.segments import Replayed
from cleanba.environments import (
    EnvSpec,
    EpisodeStatistics,
    describe_env,
    env_seeds,
    make_envs,
    play,
)
from cleanba.exact import placement
from cleanba.networks import check_fits, default_network, make_network
from cleanba.preparation import PACKAGES
from cleanba.record import checkpoints
from cleanba.record.actions import Frame, GroupDigest, Shape, combine_digests, pack
from cleanba.run.arguments import (
    Count,
    Hyper,
    Nested,
    NotNegative,
    Positive,
    Share,
    check_args,
    hyperparameters,
)
from cleanba.run.command_line import input_checks, run_command_line
from cleanba.run.log import RunLog, run_info, versions
from cleanba.run.options import (
    CheckpointOptions,
    LogOptions,
    RunId,
    RunOptions,
    check_run,
    checkpoint_interval,
    run_id,
)

SYSTEM = "cleanrl_ppo"


@dataclass(frozen=True)
class Hardware:
    """Hardware settings."""

    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    """Kind of device; auto takes an accelerator where jax finds one."""
    envpool_threads: Count | None = None
    """Threads that step the environments; by default one per core, at most one per environment."""
    compilation_cache: bool = True
    """Use JAX's persistent compilation cache, in ~/.cache/cleanba unless JAX_COMPILATION_CACHE_DIR is set."""


@dataclass(frozen=True)
class Args:
    """Hyperparameters (those of Cleanba PPO) and, after them, hardware settings and the record."""

    env_id: Hyper[str] = "Breakout-v5"
    """EnvPool environment."""
    seed: Hyper[int] = 1
    """Seed of the run: environments, initial parameters, actions, minibatches."""
    total_timesteps: Hyper[Count] = 50_000_000
    """Agent steps over all environments (200M Atari frames)."""
    learning_rate: Hyper[Positive] = 2.5e-4
    """Learning rate of Adam."""
    anneal_lr: Hyper[bool] = True
    """Anneal the learning rate linearly to 0."""
    num_envs: Hyper[Count] = 120
    """Environments."""
    num_steps: Hyper[Count] = 128
    """Steps of each environment in a rollout."""
    gamma: Hyper[Share] = 0.99
    """Discount factor."""
    gae_lambda: Hyper[Share] = 0.95
    """Lambda of generalized advantage estimation."""
    num_minibatches: Hyper[Count] = 4
    """Minibatches of an epoch, cut from one permutation of the whole batch."""
    update_epochs: Hyper[Count] = 4
    """Epochs over each batch."""
    norm_adv: Hyper[bool] = True
    """Normalize advantages over each minibatch."""
    clip_coef: Hyper[Positive] = 0.1
    """Clipping of the probability ratio."""
    ent_coef: Hyper[NotNegative] = 0.01
    """Coefficient of the entropy."""
    vf_coef: Hyper[NotNegative] = 0.5
    """Coefficient of the value loss (which is not clipped)."""
    max_grad_norm: Hyper[Positive] = 0.5
    """Largest global norm of a gradient."""
    adam_eps: Hyper[NotNegative] = 1e-5
    """Epsilon of Adam."""
    mask_resets: Hyper[bool] = True
    """Leave out the steps on which EnvPool resets an environment: their actions do nothing. CleanRL
    itself learns from them."""
    network: Hyper[Literal["auto", "resnet", "nature", "mlp"]] = "auto"
    """Network: IMPALA ResNet, Nature CNN or MLP; auto takes the ResNet for images, else the MLP."""
    channels: Hyper[tuple[Count, ...] | None] = None
    """Channels of the convolutional stages; by default the network's own."""
    hiddens: Hyper[tuple[Count, ...] | None] = None
    """Widths of the dense layers; by default the network's own."""
    atari_preprocessing: Hyper[Literal["machado", "gym"]] = "machado"
    """Atari wrappers: those of the paper (after Machado et al., 2018), or gym's (appendix D)."""
    portable: Hyper[bool] = True
    """On a CPU, compute the same bits on every processor, as Cleanba PPO does. No effect on a GPU."""
    hardware: Nested[Hardware] = Hardware()
    run: Nested[RunOptions] = RunOptions()
    logging: Nested[LogOptions] = LogOptions(log_frequency=1)
    checkpoints: Nested[CheckpointOptions] = CheckpointOptions()

    @property
    def batch_size(self) -> int:
        """Steps of a rollout, over all environments."""
        return self.num_envs * self.num_steps


class Rollout(NamedTuple):
    """T steps of B environments, all with one policy; `dones[t]` is true where `obs[t]` ended an episode."""

    obs: Any  # [T + 1, B, ...]
    dones: Any  # bool [T + 1, B]
    actions: Any  # int32 [T, B]
    logprobs: Any  # [T, B]
    values: Any  # [T, B]
    rewards: Any  # float32 [T, B], clipped on Atari


class Transitions(NamedTuple):
    """N steps, without the order of time."""

    obs: jax.Array  # [N, ...]
    actions: jax.Array  # [N]
    logprobs: jax.Array  # [N]
    advantages: jax.Array  # [N]
    returns: jax.Array  # [N]
    weights: jax.Array  # [N], 0 for steps that are left out, else 1


class AgentState(NamedTuple):
    """What an update changes."""

    params: Any
    opt_state: Any


def gae(args: Args, rollout: Rollout, last_value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Generalized advantage estimation (https://arxiv.org/abs/1506.02438).

    Args:
      args: hyperparameters.
      rollout: T steps of B environments.
      last_value: bootstrap value of the last observations [B].

    Returns:
      Advantages and returns [T, B].
    """
    values = jnp.concatenate([rollout.values, last_value[None]])

    def step(advantage: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        reward, next_done, value, next_value = xs
        next_not_done = 1.0 - next_done
        delta = reward + args.gamma * next_value * next_not_done - value
        advantage = delta + args.gamma * args.gae_lambda * next_not_done * advantage
        return advantage, advantage

    xs = (rollout.rewards, rollout.dones[1:], values[:-1], values[1:])
    _, advantages = jax.lax.scan(step, jnp.zeros_like(last_value), xs, reverse=True)
    return advantages, advantages + values[:-1]


def ppo_loss(
    params: Any, network: Any, minibatch: Transitions, args: Args
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss of a minibatch, and its parts."""
    logits, values = network.apply(params, minibatch.obs)
    log_policy = jax.nn.log_softmax(logits)
    logprobs = jnp.take_along_axis(log_policy, minibatch.actions[:, None], axis=1)[:, 0]
    log_ratio = logprobs - minibatch.logprobs
    ratio = jnp.exp(log_ratio)
    weights = minibatch.weights / jnp.maximum(minibatch.weights.sum(), 1)

    def mean(x: jax.Array) -> jax.Array:
        return (x * weights).sum()

    advantages = minibatch.advantages
    if args.norm_adv:
        centred = advantages - mean(advantages)
        advantages = centred / (jnp.sqrt(mean(centred**2)) + 1e-8)

    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = mean(jnp.maximum(unclipped, clipped))
    value_loss = mean(0.5 * (values - minibatch.returns) ** 2)
    entropy = mean(-(jnp.exp(log_policy) * log_policy).sum(axis=1))
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    return loss, {
        "loss": loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": mean((ratio - 1) - log_ratio),
        "clip_fraction": mean((jnp.abs(ratio - 1) > args.clip_coef).astype(jnp.float32)),
    }


def make_optimizer(args: Args) -> tuple[optax.GradientTransformation, Callable]:
    """Return Adam after clipping, and its learning rate by update (from 0): constant within one."""
    num_updates = args.total_timesteps // args.batch_size

    def learning_rate(update: Any) -> Any:
        return args.learning_rate * (1.0 - update / num_updates if args.anneal_lr else 1.0)

    steps = args.update_epochs * args.num_minibatches
    optimizer = optax.chain(
        optax.clip_by_global_norm(args.max_grad_norm),
        optax.adam(lambda count: learning_rate(count // steps), eps=args.adam_eps),
    )
    return optimizer, learning_rate


def make_act(network: Any) -> Callable:
    """Return the compiled policy: (params, obs, key, step) to actions, log-probabilities, values."""

    @jax.jit
    def act(
        params: Any, obs: jax.Array, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits, values = network.apply(params, obs)
        actions = jax.random.categorical(jax.random.fold_in(key, step), logits).astype(jnp.int32)
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], axis=1)[:, 0]
        return actions, logprobs, values

    return act


def make_update(
    network: Any, args: Args, optimizer: optax.GradientTransformation, unroll: bool
) -> Callable:
    """Return the compiled update.

    Args:
      network: from observations to logits and values.
      args: hyperparameters.
      optimizer: of the parameters.
      unroll: write all minibatches out, instead of looping over them: XLA's own convolutions are slow in
        loops on a CPU.

    Returns:
      Function of (state, rollout, random key) to the next state and the metrics [epochs, minibatches].
    """

    def learn(state: AgentState, minibatch: Transitions) -> tuple[AgentState, dict[str, jax.Array]]:
        gradient = jax.grad(ppo_loss, has_aux=True)
        grads, metrics = gradient(state.params, network, minibatch, args)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return AgentState(params, opt_state), metrics | {"grad_norm": optax.global_norm(grads)}

    @jax.jit
    def update(
        state: AgentState, rollout: Rollout, key: jax.Array
    ) -> tuple[AgentState, dict[str, jax.Array]]:
        _, last_value = network.apply(state.params, rollout.obs[-1])
        advantages, returns = gae(args, rollout, last_value)
        weights = 1.0 - rollout.dones[:-1] if args.mask_resets else jnp.ones_like(advantages)
        batch = jax.tree.map(
            lambda x: x.reshape(args.batch_size, *x.shape[2:]),
            Transitions(
                rollout.obs[:-1], rollout.actions, rollout.logprobs, advantages, returns, weights
            ),
        )

        def epoch(state: AgentState, key: jax.Array) -> tuple[AgentState, dict[str, jax.Array]]:
            order = jax.random.permutation(key, args.batch_size)
            minibatches = jax.tree.map(
                lambda x: x[order].reshape(args.num_minibatches, -1, *x.shape[1:]), batch
            )
            return jax.lax.scan(learn, state, minibatches, unroll=unroll)

        return jax.lax.scan(epoch, state, jax.random.split(key, args.update_epochs), unroll=unroll)

    return update


class Plan(NamedTuple):
    """A run that has been checked and may begin."""

    args: Args
    run: RunId
    spec: EnvSpec
    network: Any
    network_name: str
    num_updates: int
    checkpoint_every: int  # updates; 0 for no checkpoints


@input_checks()
def prepare(args: Args) -> Plan:
    """Check everything that can be wrong with a run, and start jax; nothing is written yet.

    Raises:
      BadInput: with one line.
      RecordError: if there is a record already and it may not be overwritten.
    """
    check_args(args)
    check_batches(
        num_envs=args.num_envs,
        num_steps=args.num_steps,
        num_minibatches=args.num_minibatches,
        total_timesteps=args.total_timesteps,
    )
    num_updates = args.total_timesteps // args.batch_size
    checkpoint_every = checkpoint_interval(args.checkpoints, num_updates)
    run = run_id(SYSTEM, args.env_id, args.seed, args.run, "one-device")
    check_run(run, args.num_envs, overwrite=args.run.overwrite)
    spec = describe_env(args.env_id, args.atari_preprocessing)
    name = default_network(spec.obs_shape) if args.network == "auto" else args.network
    check_fits(name, spec.obs_shape)
    placement.start_jax(layout(args), args.portable)
    args = replace(args, portable=args.portable and jax.local_devices()[0].platform == "cpu")
    network = make_network(
        name, spec.num_actions, args.channels, args.hiddens, portable=args.portable
    )
    return Plan(args, run, spec, network, name, num_updates, checkpoint_every)


def layout(args: Args) -> placement.Hardware:
    """Return the hardware settings of one thread and one device, in the terms of Cleanba's trainers."""
    return placement.Hardware(
        num_actor_threads=1,
        platform=args.hardware.platform,
        envpool_threads=args.hardware.envpool_threads,
        compilation_cache=args.hardware.compilation_cache,
    )


def pinned(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return what must be equal in a run and its repetition for the bits to be the same."""
    return {
        "hyperparameters": hyperparameters(plan.args) | {"network": plan.network_name},
        "versions": versions(PACKAGES),
        "hardware": placement.pinned_hardware(plan.args.portable),
    }


def begin_log(plan: Plan) -> RunLog:
    """Begin the record of a run."""
    args = plan.args
    info = run_info(
        plan.run,
        program=SYSTEM,
        hyperparameters=pinned(plan)["hyperparameters"],
        hardware=placement.describe_hardware(layout(args), num_processes=1),
        packages=PACKAGES,
    )
    info.num_actions = plan.spec.num_actions
    info.checkpoint_every = plan.checkpoint_every
    return RunLog(
        plan.run,
        info,
        total_steps=plan.num_updates * args.batch_size,
        overwrite=args.run.overwrite,
        progress="bar" if args.run.progress else None,
        log_frequency=args.logging.log_frequency,
    )


def initial_params(args: Args, spec: EnvSpec, network: Any) -> Any:
    """Initialize the network's parameters."""
    init_key, _, _ = jax.random.split(jax.random.key(args.seed), 3)
    return jax.jit(network.init)(init_key, np.zeros((1, *spec.obs_shape), spec.obs_dtype))


class Actor:
    """The environments, and the policy that acts in them."""

    def __init__(self, plan: Plan):
        """Reset the environments."""
        args = plan.args
        cores = len(os.sched_getaffinity(0))
        threads = args.hardware.envpool_threads or min(cores, args.num_envs)
        seeds = env_seeds(args.seed, 0, args.num_envs)
        self._args = args
        self._envs = make_envs(plan.spec.env_id, seeds, threads, args.atari_preprocessing)
        self._act = make_act(plan.network)
        _, self._key, _ = jax.random.split(jax.random.key(args.seed), 3)
        self._statistics, self._digest = EpisodeStatistics(args.num_envs), GroupDigest()
        self._obs, _ = self._envs.reset()
        self._done = np.zeros(args.num_envs, bool)
        self._step = 0  # of every environment

    def collect(self, params: Any) -> tuple[Rollout, Replayed, dict[str, float]]:
        """Collect a rollout: one policy, all of it.

        Returns:
          The rollout, what is recorded of it, and seconds by activity.
        """
        shape = (self._args.num_steps, self._args.num_envs)
        obs = np.empty((shape[0] + 1, *self._obs.shape), self._obs.dtype)
        dones = np.empty((shape[0] + 1, shape[1]), bool)
        actions = np.empty(shape, np.int32)
        rewards, unclipped, logprobs, values = (np.empty(shape, np.float32) for _ in range(4))
        times = {"inference_time": 0.0, "env_time": 0.0}
        for t in range(shape[0]):
            obs[t], dones[t] = self._obs, self._done
            before = time.perf_counter()
            step = np.int32(self._step + t)
            actions[t], logprobs[t], values[t] = self._act(params, self._obs, self._key, step)
            between = time.perf_counter()
            self._obs, rewards[t], terminated, truncated, info = self._envs.step(actions[t])
            unclipped[t] = info.get("reward", rewards[t])
            self._done = terminated | truncated
            times["inference_time"] += between - before
            times["env_time"] += time.perf_counter() - between
        obs[-1], dones[-1] = self._obs, self._done
        rollout = Rollout(obs, dones, actions, logprobs, values, rewards)
        return rollout, self._finish(actions, unclipped, dones[1:]), times

    def replay(self, actions: np.ndarray) -> Replayed:
        """Step the environments through the actions [T, B] of a rollout."""
        self._obs, rewards, dones, _ = play(self._envs, actions)
        self._done = dones[-1]
        return self._finish(actions, rewards, dones)

    def close(self) -> None:
        """Free the environments."""
        self._envs.close()

    def _finish(self, actions: np.ndarray, rewards: np.ndarray, dones: np.ndarray) -> Replayed:
        self._step += len(actions)
        digest = combine_digests([self._digest.update(actions, rewards, dones)])
        return Replayed(actions, digest, self._statistics.count(rewards, dones))


class Learner:
    """The parameters, and how they learn from a rollout."""

    def __init__(self, plan: Plan, params: Any):
        """Begin with initial parameters."""
        args = plan.args
        optimizer, self._learning_rate = make_optimizer(args)
        on_cpu = jax.local_devices()[0].platform == "cpu"
        slow_loops = on_cpu and len(plan.spec.obs_shape) == 3 and not args.portable
        self._update = make_update(plan.network, args, optimizer, unroll=slow_loops)
        _, _, self._key = jax.random.split(jax.random.key(args.seed), 3)
        self.state = AgentState(params, optimizer.init(params))
        self.updates = 0

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Make the next update, all epochs and minibatches; return the metrics of its last minibatch."""
        learning_rate = self._learning_rate(self.updates)
        self.updates += 1
        key = jax.random.fold_in(self._key, self.updates)
        self.state, metrics = self._update(self.state, rollout, key)
        metrics = {name: float(value[-1, -1]) for name, value in jax.device_get(metrics).items()}
        if not np.isfinite(metrics["loss"]):
            raise FloatingPointError(f"the loss of update {self.updates} is {metrics['loss']}")
        return metrics | {"learning_rate": learning_rate}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint holds."""
        return trees.to_arrays(self.state._asdict())

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the state from what a checkpoint holds.

        Raises:
          RecordError: with one line, if it is that of another network.
        """
        self.state = AgentState(**jax.device_put(trees.from_arrays(arrays, self.state._asdict())))


def train(plan: Plan, params: Any, log: RunLog) -> AgentState:
    """Train from initial parameters, and log it; return the final state."""
    args = plan.args
    shape = Shape(args.num_steps, args.num_envs, plan.spec.num_actions)
    actor, learner = Actor(plan), Learner(plan, params)
    started, last = time.perf_counter(), 0.0
    for number in range(1, plan.num_updates + 1):
        begin = time.perf_counter()
        rollout, played, times = actor.collect(learner.state.params)
        collected = time.perf_counter()
        metrics = learner.learn(rollout)
        now = time.perf_counter()

        # The record.
        marked = number == plan.num_updates or number % args.logging.fingerprint_every == 0
        saves = plan.checkpoint_every and number % plan.checkpoint_every == 0
        saved = learner.arrays() if saves else None
        collected_here, made = rows(
            number,
            args.batch_size,
            Times(last, begin - started, collected - started, now - started),
            times,
            metrics,
            fingerprint=record.fingerprint(learner.state.params) if marked else None,
            checkpoint=UNSET if saved is None else record.fingerprint(saved),
        )
        first_step = (number - 1) * args.batch_size
        episodes = episode_rows(
            played.episodes, args.num_envs, first_step, collected_here.wall_time
        )
        log.record.write_actions(pack(Frame(played.actions, played.digest), shape))
        log.write(made, [collected_here], episodes)
        if saved is not None:
            checkpoints.save(
                plan.run.directory,
                saved,
                update=number,
                wall_time=now - started,
                sizes=log.sizes(),
                digests=[played.digest.hex()],
                pinned=pinned(plan),
                keep=args.checkpoints.keep_checkpoints,
            )
        last = now - started
    actor.close()
    return learner.state


def repeat(run: record.Run) -> Repetition:
    """Prepare to make the updates of a record again.

    Raises:
      NotRepeatable: with one line, if this machine or version cannot compute its bits.
      Mismatch: if the environment has another number of actions than the record.
    """
    hardware = Hardware(platform=platform_of(run))
    plan = prepare_again(run, Args, prepare, pinned, hardware=hardware)
    params = initial_params(plan.args, plan.spec, plan.network)
    return Repetition(Actor(plan), Learner(plan, params))


def main(args: Args) -> None:
    """Check the arguments, train, and record it."""
    plan = prepare(args)
    params = initial_params(plan.args, plan.spec, plan.network)
    with begin_log(plan) as log:
        train(plan, params, log)
        log.note_hardware(placement.saved_by_cache())


if __name__ == "__main__":
    run_command_line(Args, main, "CleanRL's PPO on EnvPool, in JAX.")
