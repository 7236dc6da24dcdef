"""CleanRL's PPO on EnvPool, in JAX: the synchronous reference of the comparison, in one file.

Proximal policy optimisation (https://arxiv.org/abs/1707.06347) as CleanRL's
`ppo_atari_envpool_xla_jax_scan.py` has it (https://docs.cleanrl.dev/rl-algorithms/ppo): one process, one
batch of environments, one device; rollout and update take turns; the whole update is one compiled call.
With Cleanba PPO it has environments, networks and the run record in common, and nothing of the algorithm.
docs/ppo-details.md says which of PPO's implementation details are where.

    python baselines/cleanrl_ppo.py --env-id Breakout-v5
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cleanba import record
from cleanba.environments import (
    EnvSpec,
    EpisodeStatistics,
    describe_env,
    env_seeds,
    make_envs,
)
from cleanba.exact import placement
from cleanba.networks import check_fits, default_network, make_network
from cleanba.preparation import PACKAGES
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
from cleanba.run.command_line import BadInput, input_checks, run_command_line
from cleanba.run.log import RunLog, run_info
from cleanba.run.options import LogOptions, RunId, RunOptions, check_run, run_id

SYSTEM = "cleanrl_ppo"


@dataclass(frozen=True)
class Hardware:
    """Hardware settings."""

    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    """Kind of device; auto takes an accelerator where jax finds one."""
    envpool_threads: Count | None = None
    """Threads that step the environments; by default the cores."""


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
    """Lambda of generalised advantage estimation."""
    num_minibatches: Hyper[Count] = 4
    """Minibatches of an epoch, cut from one permutation of the whole batch."""
    update_epochs: Hyper[Count] = 4
    """Epochs over each batch."""
    norm_adv: Hyper[bool] = True
    """Normalise advantages over each minibatch."""
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

    @property
    def batch_size(self) -> int:
        """Steps of a rollout, over all environments."""
        return self.num_envs * self.num_steps


class Rollout(NamedTuple):
    """T steps of B environments, all with one policy; `dones[t]` says that `obs[t]` ended an episode."""

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
    """Generalised advantage estimation (https://arxiv.org/abs/1506.02438).

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


@input_checks()
def prepare(args: Args) -> Plan:
    """Check everything that can be wrong with a run, and start jax; nothing is written yet.

    Raises:
      BadInput: with one line.
      RecordError: if there is a record already and it may not be overwritten.
    """
    check_args(args)
    if args.batch_size % args.num_minibatches:
        raise BadInput(
            f"--num-minibatches {args.num_minibatches}: must divide the {args.batch_size} steps of a "
            f"batch ({args.num_envs} environments x {args.num_steps} steps)"
        )
    if args.total_timesteps < args.batch_size:
        raise BadInput(
            f"--total-timesteps {args.total_timesteps}: one update learns from {args.batch_size} steps"
        )
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
    return Plan(args, run, spec, network, name, args.total_timesteps // args.batch_size)


def layout(args: Args) -> placement.Hardware:
    """Return the hardware settings of one thread and one device, in the terms of Cleanba's trainers."""
    return placement.Hardware(
        num_actor_threads=1,
        platform=args.hardware.platform,
        envpool_threads=args.hardware.envpool_threads,
    )


def begin_log(plan: Plan) -> RunLog:
    """Begin the record of a run."""
    args = plan.args
    info = run_info(
        plan.run,
        program=SYSTEM,
        hyperparameters=hyperparameters(args) | {"network": plan.network_name},
        hardware=placement.describe_hardware(layout(args), num_processes=1),
        packages=PACKAGES,
    )
    return RunLog(
        plan.run,
        info,
        total_steps=plan.num_updates * args.batch_size,
        overwrite=args.run.overwrite,
        progress="bar" if args.run.progress else None,
        log_frequency=args.logging.log_frequency,
    )


def initial_params(args: Args, spec: EnvSpec, network: Any) -> Any:
    """Initialise the network's parameters."""
    init_key, _, _ = jax.random.split(jax.random.key(args.seed), 3)
    return jax.jit(network.init)(init_key, np.zeros((1, *spec.obs_shape), spec.obs_dtype))


def train(plan: Plan, params: Any, log: RunLog) -> AgentState:
    """Train from initial parameters, and log it; return the final state."""
    args, spec, network = plan.args, plan.spec, plan.network
    started = time.perf_counter()
    _, act_key, learn_key = jax.random.split(jax.random.key(args.seed), 3)
    cores = len(os.sched_getaffinity(0))
    threads = args.hardware.envpool_threads or min(cores, args.num_envs)
    seeds = env_seeds(args.seed, 0, args.num_envs)
    envs = make_envs(spec.env_id, seeds, threads, args.atari_preprocessing)
    statistics = EpisodeStatistics(args.num_envs)
    optimizer, learning_rate = make_optimizer(args)
    act = make_act(network)
    on_cpu = jax.local_devices()[0].platform == "cpu"
    slow_loops = on_cpu and len(spec.obs_shape) == 3 and not args.portable
    update = make_update(network, args, optimizer, unroll=slow_loops)
    state = AgentState(params, optimizer.init(params))

    obs, _ = envs.reset()
    done = np.zeros(args.num_envs, bool)
    shape = (args.num_steps, args.num_envs)
    global_step, last = 0, 0.0
    for number in range(1, plan.num_updates + 1):
        # The rollout: one policy, all of it.
        all_obs = np.empty((args.num_steps + 1, *obs.shape), obs.dtype)
        dones = np.empty((args.num_steps + 1, args.num_envs), bool)
        actions = np.empty(shape, np.int32)
        rewards, unclipped, logprobs, values = (np.empty(shape, np.float32) for _ in range(4))
        times = {"inference_time": 0.0, "env_time": 0.0}
        begin = time.perf_counter()
        for t in range(args.num_steps):
            all_obs[t], dones[t] = obs, done
            before = time.perf_counter()
            step = np.int32((number - 1) * args.num_steps + t)
            actions[t], logprobs[t], values[t] = act(state.params, obs, act_key, step)
            between = time.perf_counter()
            obs, rewards[t], terminated, truncated, info = envs.step(actions[t])
            unclipped[t] = info.get("reward", rewards[t])
            done = terminated | truncated
            times["inference_time"] += between - before
            times["env_time"] += time.perf_counter() - between
        all_obs[-1], dones[-1] = obs, done
        collected = time.perf_counter()

        # The update: all epochs and minibatches.
        rollout = Rollout(all_obs, dones, actions, logprobs, values, rewards)
        state, metrics = update(state, rollout, jax.random.fold_in(learn_key, number))
        metrics = {name: float(value[-1, -1]) for name, value in jax.device_get(metrics).items()}
        if not np.isfinite(metrics["loss"]):
            raise FloatingPointError(f"the loss of update {number} is {metrics['loss']}")
        now = time.perf_counter()

        # The record.
        global_step += args.batch_size
        first_step = global_step - args.batch_size
        wall_time = round(collected - started, 4)
        episodes = [
            record.Episode(
                step=first_step + (e.t + 1) * args.num_envs,
                wall_time=wall_time,
                env_index=e.index,
                episode_return=e.episode_return,
                length=e.length,
            )
            for e in statistics.count(unclipped, dones[1:])
        ]
        collected_here = record.Rollout(
            actor=0,
            group=None,
            rollout=number,
            steps=args.batch_size,
            wall_time=wall_time,
            version_first=number,
            version_last=number,
            versions=[(number, args.batch_size)],
            learner_version=number,
        )
        marked = number == plan.num_updates or number % args.logging.fingerprint_every == 0
        made = record.Update(
            version=number + 1,
            step=global_step,
            wall_time=round(now - started, 4),
            update_seconds=round(now - started - last, 6),
            **metrics,
            learning_rate=learning_rate(number - 1),
            # There are no queues: rollout and update take turns.
            rollout_queue_get_time=0.0,
            params_queue_get_time=0.0,
            rollout_queue_put_time=0.0,
            rollout_time=round(collected - begin, 6),
            **{name: round(seconds, 6) for name, seconds in times.items()},
            training_time=round(now - collected, 6),
            fingerprint=record.fingerprint(state.params) if marked else None,
        )
        log.write(made, [collected_here], episodes)
        last = now - started
    return state


def main(args: Args) -> None:
    """Check the arguments, train, and record it."""
    plan = prepare(args)
    params = initial_params(args, plan.spec, plan.network)
    with begin_log(plan) as log:
        train(plan, params, log)


if __name__ == "__main__":
    run_command_line(Args, main, "CleanRL's PPO on EnvPool, in JAX.")
