"""PPO on µRTS with four ways to handle invalid actions, in JAX.

"A Closer Look at Invalid Action Masking in Policy Gradient Algorithms"
(https://arxiv.org/abs/2006.14171): most actions of a real-time strategy game are invalid in most states.
`--strategy` chooses among

- masking: invalid source and target units get no probability, when acting and in the gradient;
- penalty: nothing is masked, and an invalid action costs `--invalid-penalty`;
- naive: masked when acting, not masked in the gradient;
- removed: trained as with masking; the recorded episodes are played without a mask, after every update.

`--objective` chooses between the loss of the paper's code and that of PPO as it is usually written.
docs/differences.md compares the program with the paper's code.

    make setup MICRORTS=1
    python baselines/ppo_microrts.py --env-id MicrortsMining4x4F9-v0 --strategy masking
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from msgspec import UNSET

from baselines import microrts
from baselines.microrts import HARVESTING, PLANES, SCENARIOS, Task
from baselines.microrts_rollouts import Act, Actor, Rollout
from baselines.synchronous import Repetition, Times, check_batches, episode_rows, rows
from cleanba import record, trees
from cleanba.audit.preparation import platform_of, prepare_again
from cleanba.audit.segments import NotRepeatable
from cleanba.exact import placement
from cleanba.networks import Dense, StridedConv
from cleanba.preparation import PACKAGES
from cleanba.record import checkpoints
from cleanba.record.actions import Frame, Shape, pack
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

PROGRAM = "ppo_microrts"
MASKED = -1e8  # logit of a masked action
TASKS = [name for name, scenario in SCENARIOS.items() if scenario.rewards == HARVESTING]
VERSIONS = (*PACKAGES, "gym-microrts", "JPype1")


@dataclass(frozen=True)
class Hardware:
    """Hardware settings."""

    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    """Kind of device; auto takes an accelerator where jax finds one."""
    compilation_cache: bool = True
    """Use JAX's persistent compilation cache, in ~/.cache/cleanba unless JAX_COMPILATION_CACHE_DIR is set."""


@dataclass(frozen=True)
class Args:
    """Hyperparameters (those of the paper) and, after them, hardware settings and the record."""

    env_id: Hyper[str] = "MicrortsMining4x4F9-v0"
    """Harvesting task of µRTS."""
    strategy: Hyper[Literal["masking", "penalty", "naive", "removed"]] = "masking"
    """How invalid actions are handled."""
    invalid_penalty: Hyper[NotNegative] = 0.01
    """What an invalid action costs, with --strategy penalty. It does not count in episode returns."""
    objective: Hyper[Literal["components", "action"]] = "components"
    """components, as in the paper's code: each component of an action has a clipped ratio of its own, and the
    mean of -p log p of the chosen components is added to the loss. action: one ratio for each action, and the
    entropy is subtracted from the loss."""
    seed: Hyper[int] = 1
    """Seed of the run: initial parameters, actions, minibatches. The game has no randomness."""
    total_timesteps: Hyper[Count] = 500_000
    """Agent steps over all environments."""
    learning_rate: Hyper[Positive] = 3e-4
    """Learning rate of Adam."""
    anneal_lr: Hyper[bool] = True
    """Anneal the learning rate linearly to 0."""
    num_envs: Hyper[Count] = 8
    """Environments."""
    num_steps: Hyper[Count] = 256
    """Steps of each environment in a rollout."""
    gamma: Hyper[Share] = 0.99
    """Discount factor."""
    gae_lambda: Hyper[Share] = 0.97
    """Lambda of generalized advantage estimation."""
    num_minibatches: Hyper[Count] = 8
    """Minibatches of an epoch, cut from one permutation of the whole batch."""
    update_epochs: Hyper[Count] = 10
    """Epochs over each batch."""
    norm_adv: Hyper[bool] = True
    """Normalize advantages over each batch."""
    clip_coef: Hyper[Positive] = 0.2
    """Clipping of the probability ratio, and of the change of values."""
    ent_coef: Hyper[NotNegative] = 0.01
    """Coefficient of the entropy."""
    max_grad_norm: Hyper[Positive] = 0.5
    """Largest norm of a gradient, of the policy and of the value function each."""
    adam_eps: Hyper[NotNegative] = 1e-8
    """Epsilon of Adam."""
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


class Masks(NamedTuple):
    """Which source and target units may be chosen."""

    source: Any  # bool [..., cells]
    target: Any  # bool [..., cells]


class Transitions(NamedTuple):
    """N steps, without the order of time."""

    obs: jax.Array  # [N, 5, height, width]
    actions: jax.Array  # [N, 8]
    logprobs: jax.Array  # of each component, [N, 8]
    values: jax.Array  # [N]
    advantages: jax.Array  # [N]
    returns: jax.Array  # [N]


class AgentState(NamedTuple):
    """What an update changes."""

    params: Any
    opt_state: Any


def encode(obs: jax.Array) -> jax.Array:
    """Return the 27 binary planes of observations: uint8 [B, 5, H, W] to float32 [B, H, W, 27]."""
    parts = [
        jax.nn.one_hot(jnp.minimum(obs[:, plane], size - 1), size)
        for plane, size in enumerate(PLANES)
    ]
    return jnp.concatenate(parts, axis=-1)


class Network(nn.Module):
    """The paper's network: one convolution on the 4x4 map, two on larger ones, and a hidden layer."""

    num_outputs: int
    portable: bool

    @nn.compact
    def __call__(self, planes: jax.Array) -> jax.Array:
        """Map [B, H, W, 27] to [B, num_outputs]."""
        kernels = [(16, 2)] if planes.shape[1] <= 4 else [(16, 3), (32, 3)]
        x = planes
        for channels, size in kernels:
            x = nn.relu(StridedConv(channels, size, 1, self.portable)(x))
        x = nn.relu(Dense(128, 2**0.5, self.portable)(x.reshape(x.shape[0], -1)))
        return Dense(self.num_outputs, 0.01, self.portable)(x)


class Agent(NamedTuple):
    """Policy and value function, which share nothing."""

    policy: Network
    value: Network
    components: tuple[int, ...]  # sizes of an action's components

    def init(self, key: jax.Array, obs_shape: tuple[int, ...]) -> dict[str, Any]:
        """Initialize the parameters."""
        policy_key, value_key = jax.random.split(key)
        planes = encode(jnp.zeros((1, *obs_shape), jnp.uint8))
        return {
            "policy": self.policy.init(policy_key, planes),
            "value": self.value.init(value_key, planes),
        }

    def logits(self, params: Any, obs: jax.Array) -> list[jax.Array]:
        """Return the logits of each component, [B, size]."""
        logits = self.policy.apply(params["policy"], encode(obs))
        return jnp.split(logits, np.cumsum(self.components)[:-1].tolist(), axis=-1)

    def values(self, params: Any, obs: jax.Array) -> jax.Array:
        """Return the values [B]."""
        return self.value.apply(params["value"], encode(obs))[:, 0]


def make_agent(task: Task, *, portable: bool) -> Agent:
    """Return the agent of a task."""
    policy, value = Network(sum(task.components), portable), Network(1, portable)
    return Agent(policy, value, task.components)


def masked(logits: Sequence[jax.Array], masks: Masks) -> list[jax.Array]:
    """Give invalid source and target units a logit that is constant, so that its gradient is 0."""
    source, *others, target = logits
    return [
        jnp.where(masks.source, source, MASKED),
        *others,
        jnp.where(masks.target, target, MASKED),
    ]


def masks_of(obs: jax.Array) -> Masks:
    """Return the masks of observations [..., 5, height, width]."""
    return Masks(microrts.source_mask(obs), microrts.target_mask(obs))


def sample(logits: Sequence[jax.Array], key: jax.Array) -> jax.Array:
    """Sample actions [B, 8] from the logits of their components [B, size]."""
    keys = jax.random.split(key, len(logits))
    drawn = [jax.random.categorical(k, x) for k, x in zip(keys, logits, strict=True)]
    return jnp.stack(drawn, axis=-1).astype(jnp.int32)


def log_probabilities(log_policies: Sequence[jax.Array], actions: jax.Array) -> jax.Array:
    """Return the log-probability [B, 8] of each component of actions [B, 8], whose policies are [B, size]."""
    chosen = [
        jnp.take_along_axis(log_policy, actions[:, i : i + 1], axis=-1)
        for i, log_policy in enumerate(log_policies)
    ]
    return jnp.concatenate(chosen, axis=-1)


def entropy(log_policies: Sequence[jax.Array]) -> jax.Array:
    """Return the entropies [B] of independent components."""
    return sum(-(jnp.exp(x) * x).sum(axis=-1) for x in log_policies)


def gae(
    rewards: jax.Array,
    discounts: jax.Array,
    values: jax.Array,
    last_value: jax.Array,
    gae_lambda: float,
) -> tuple[jax.Array, jax.Array]:
    """Generalized advantage estimation (https://arxiv.org/abs/1506.02438).

    Args:
      rewards: that followed the actions [T, B].
      discounts: of what comes after them, 0 where they ended an episode [T, B].
      values: of the observations that led to them [T, B].
      last_value: of the last observations [B].
      gae_lambda: mixing parameter.

    Returns:
      Advantages and returns [T, B].
    """
    v_t = jnp.concatenate([values[1:], last_value[None]])
    deltas = rewards + discounts * v_t - values

    def step(advantage: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta, discount = xs
        advantage = delta + discount * gae_lambda * advantage
        return advantage, advantage

    _, advantages = jax.lax.scan(
        step, jnp.zeros_like(last_value), (deltas, discounts), reverse=True
    )
    return advantages, advantages + values


def clipped_losses(
    log_policies: Sequence[jax.Array],
    values: jax.Array,
    minibatch: Transitions,
    *,
    objective: str,
    clip_coef: float,
    ent_coef: float,
    vf_coef: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return PPO's loss of a minibatch, with clipped values, and its parts.

    Args:
      log_policies: log-probabilities of each component of an action [N, size].
      values: [N].
      minibatch: what they are compared with.
      objective: "components" or "action", see `Args`.
      clip_coef: clipping of the probability ratio, and of the change of values.
      ent_coef: coefficient of the entropy.
      vf_coef: coefficient of the value loss.
    """
    logprobs = log_probabilities(log_policies, minibatch.actions)
    if objective == "components":
        log_ratio = logprobs - minibatch.logprobs
        entropy_loss = -(jnp.exp(logprobs) * logprobs).mean()
    else:
        log_ratio = sum(logprobs.T)[:, None] - sum(minibatch.logprobs.T)[:, None]
        entropy_loss = -entropy(log_policies).mean()
    ratio = jnp.exp(log_ratio)  # [N, 8] or [N, 1]
    advantages = minibatch.advantages[:, None]
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_coef, 1 + clip_coef)
    policy_loss = jnp.maximum(unclipped, clipped).mean()
    change = jnp.clip(values - minibatch.values, -clip_coef, clip_coef)
    errors = jnp.maximum(
        (values - minibatch.returns) ** 2, (minibatch.values + change - minibatch.returns) ** 2
    )
    value_loss = 0.5 * errors.mean()
    loss = policy_loss + ent_coef * entropy_loss + vf_coef * value_loss
    return loss, {
        "loss": loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy(log_policies).mean(),
        "approx_kl": ((ratio - 1) - log_ratio).mean(),
        "clip_fraction": (jnp.abs(ratio - 1) > clip_coef).mean(),
    }


def ppo_loss(
    params: Any, agent: Agent, minibatch: Transitions, args: Args
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss of a minibatch, and its parts."""
    logits = agent.logits(params, minibatch.obs)
    if args.strategy in ("masking", "removed"):
        logits = masked(logits, masks_of(minibatch.obs))
    return clipped_losses(
        [jax.nn.log_softmax(x) for x in logits],
        agent.values(params, minibatch.obs),
        minibatch,
        objective=args.objective,
        clip_coef=args.clip_coef,
        ent_coef=args.ent_coef,
        vf_coef=1.0,
    )


def learn_in_epochs(
    learn: Callable, state: AgentState, transitions: Transitions, args: Any, key: jax.Array
) -> tuple[AgentState, dict[str, jax.Array]]:
    """Learn from all minibatches of all epochs.

    Args:
      learn: from a state and a minibatch to the next state and metrics.
      state: before the update.
      transitions: of a rollout, [T, B, ...].
      args: with `batch_size`, `num_minibatches` and `update_epochs`.
      key: of the permutations.

    Returns:
      The state after the update, and the metrics [epochs, minibatches].
    """
    batch = jax.tree.map(lambda x: x.reshape(args.batch_size, *x.shape[2:]), transitions)

    def epoch(state: AgentState, key: jax.Array) -> tuple[AgentState, dict[str, jax.Array]]:
        order = jax.random.permutation(key, args.batch_size)
        minibatches = jax.tree.map(
            lambda x: x[order].reshape(args.num_minibatches, -1, *x.shape[1:]), batch
        )
        return jax.lax.scan(learn, state, minibatches)

    return jax.lax.scan(epoch, state, jax.random.split(key, args.update_epochs))


def make_learn(loss: Callable, model: Any, args: Any, optimizer: Any) -> Callable:
    """Return one step of the optimizer: from a state and a minibatch to the next state and metrics.

    Args:
      loss: of (parameters, model, minibatch, args), with its parts.
      model: of the policy and the value function.
      args: of the loss.
      optimizer: of the parameters.
    """

    def learn(state: AgentState, minibatch: Transitions) -> tuple[AgentState, dict[str, jax.Array]]:
        gradient = jax.grad(loss, has_aux=True)
        grads, metrics = gradient(state.params, model, minibatch, args)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return AgentState(params, opt_state), metrics | {"grad_norm": optax.global_norm(grads)}

    return learn


def make_optimizer(args: Args) -> tuple[optax.GradientTransformation, Callable]:
    """Return Adam after clipping, for policy and value function each, and its learning rate by update."""
    num_updates = args.total_timesteps // args.batch_size

    def learning_rate(update: Any) -> Any:
        return args.learning_rate * (1.0 - update / num_updates if args.anneal_lr else 1.0)

    steps = args.update_epochs * args.num_minibatches
    each = optax.chain(
        optax.clip_by_global_norm(args.max_grad_norm),
        optax.adam(lambda count: learning_rate(count // steps), eps=args.adam_eps),
    )
    names = {"policy": "policy", "value": "value"}
    return optax.multi_transform({"policy": each, "value": each}, names), learning_rate


def make_act(agent: Agent, strategy: str, key: jax.Array) -> Act:
    """Return the compiled policy.

    Args:
      agent: policy and value function.
      strategy: "masking" and "naive" mask the actions that are sampled; the log-probabilities of "naive" are
        those without a mask.
      key: of its random numbers.
    """

    @jax.jit
    def act(params: Any, obs: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = agent.logits(params, obs)
        sampled = masked(logits, masks_of(obs)) if strategy in ("masking", "naive") else logits
        actions = sample(sampled, jax.random.fold_in(key, step))
        judged = sampled if strategy == "masking" else logits
        log_policies = [jax.nn.log_softmax(x) for x in judged]
        return actions, log_probabilities(log_policies, actions), agent.values(params, obs)

    return act


def make_update(agent: Agent, args: Args, optimizer: optax.GradientTransformation) -> Callable:
    """Return the compiled update: (state, rollout, key) to the next state and its metrics.

    The metrics are of each minibatch, [epochs, minibatches].
    """

    learn = make_learn(ppo_loss, agent, args, optimizer)

    @jax.jit
    def update(
        state: AgentState, rollout: Rollout, key: jax.Array
    ) -> tuple[AgentState, dict[str, jax.Array]]:
        rewards = rollout.rewards[..., 0]
        if args.strategy == "penalty":
            rewards -= args.invalid_penalty * rollout.invalid.sum(axis=-1)
        last_value = agent.values(state.params, rollout.obs[-1])
        discounts = args.gamma * (1.0 - rollout.dones)
        advantages, returns = gae(rewards, discounts, rollout.values, last_value, args.gae_lambda)
        if args.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-10)
        parts = Transitions(
            rollout.obs[:-1], rollout.actions, rollout.logprobs, rollout.values, advantages, returns
        )
        return learn_in_epochs(learn, state, parts, args, key)

    return update


class Plan(NamedTuple):
    """A run that has been checked and may begin."""

    args: Args
    run: RunId
    spec: Task
    agent: Agent
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
    run = run_id(system_name(args), args.env_id, args.seed, args.run, "one-device")
    check_env_id = partial(microrts.check_env_id, choices=TASKS)
    check_run(run, args.num_envs, overwrite=args.run.overwrite, check_env_id=check_env_id)
    task = microrts.describe_task(args.env_id)
    placement.start_jax(layout(args.hardware), args.portable)
    args = replace(args, portable=args.portable and jax.local_devices()[0].platform == "cpu")
    agent = make_agent(task, portable=args.portable)
    return Plan(args, run, task, agent, num_updates, checkpoint_every)


def system_name(args: Args) -> str:
    """Return the name of the system that a command line describes, such as `ppo_microrts_penalty-0.01`."""
    suffix = f"-{args.invalid_penalty:g}" if args.strategy == "penalty" else ""
    return f"{PROGRAM}_{args.strategy}{suffix}"


def layout(hardware: Hardware) -> placement.Hardware:
    """Return the hardware settings of one thread and one device, in the terms of Cleanba's trainers."""
    return placement.Hardware(
        num_actor_threads=1,
        platform=hardware.platform,
        compilation_cache=hardware.compilation_cache,
    )


def pinned(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return what must be equal in a run and its repetition for the bits to be the same."""
    return {
        "hyperparameters": hyperparameters(plan.args),
        "versions": versions(VERSIONS),
        "hardware": placement.pinned_hardware(plan.args.portable),
    }


def begin_log(plan: Plan) -> RunLog:
    """Begin the record of a run."""
    args = plan.args
    info = run_info(
        plan.run,
        program=PROGRAM,
        hyperparameters=pinned(plan)["hyperparameters"],
        hardware=placement.describe_hardware(layout(args.hardware), num_processes=1),
        packages=VERSIONS,
    )
    if records_actions(args):
        info.num_actions = plan.spec.num_actions
        info.autoreset = "same_step"
    info.checkpoint_every = plan.checkpoint_every
    return RunLog(
        plan.run,
        info,
        total_steps=plan.num_updates * args.batch_size,
        overwrite=args.run.overwrite,
        progress="bar" if args.run.progress else None,
        log_frequency=args.logging.log_frequency,
    )


def records_actions(args: Args) -> bool:
    """Whether the recorded episodes are those of the rollouts, so that actions can be recorded for them."""
    return args.strategy != "removed"


def make_actor(plan: Plan, strategy: str, stream: int) -> Actor:
    """Make the environments, with the policy of a strategy (see `make_act`) and random numbers of its own."""
    args = plan.args
    key = jax.random.fold_in(jax.random.key(args.seed), stream)
    act = make_act(plan.agent, strategy, key)
    return Actor(plan.spec, args.num_envs, args.num_steps, act, scored=np.ones(1))


class Learner:
    """The parameters, and how they learn from a rollout."""

    def __init__(self, plan: Plan):
        """Begin with initial parameters."""
        optimizer, self._learning_rate = make_optimizer(plan.args)
        self._update = make_update(plan.agent, plan.args, optimizer)
        key = jax.random.key(plan.args.seed)
        self._key = jax.random.fold_in(key, 1)
        init = jax.jit(plan.agent.init, static_argnums=1)
        params = init(jax.random.fold_in(key, 0), plan.spec.obs_shape)
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


def train(plan: Plan, log: RunLog) -> AgentState:
    """Train from initial parameters, and log it; return the final state."""
    args = plan.args
    shape = Shape(args.num_steps, args.num_envs, plan.spec.num_actions)
    training = "masking" if args.strategy == "removed" else args.strategy
    actor, learner = make_actor(plan, training, stream=2), Learner(plan)
    evaluator = make_actor(plan, "removed", stream=3) if args.strategy == "removed" else None
    started, last = time.perf_counter(), 0.0
    for number in range(1, plan.num_updates + 1):
        begin = time.perf_counter()
        collected = actor.collect(learner.state.params)
        after = time.perf_counter()
        metrics = learner.learn(collected.rollout)
        now = time.perf_counter()
        played, played_at = collected, after
        if evaluator is not None:
            played, played_at = evaluator.collect(learner.state.params), time.perf_counter()

        # The record.
        marked = number == plan.num_updates or number % args.logging.fingerprint_every == 0
        saves = plan.checkpoint_every and number % plan.checkpoint_every == 0
        saved = learner.arrays() if saves else None
        collected_here, made = rows(
            number,
            args.batch_size,
            Times(last, begin - started, after - started, now - started),
            collected.times,
            metrics,
            fingerprint=record.fingerprint(learner.state.params) if marked else None,
            checkpoint=UNSET if saved is None else record.fingerprint(saved),
        )
        first_step = (number - 1) * args.batch_size
        episodes = episode_rows(
            played.replayed.episodes,
            args.num_envs,
            first_step,
            round(played_at - started, 4),
            played.invalid,
        )
        if evaluator is not None:  # they were played after the update
            for episode in episodes:
                episode.step = first_step + args.batch_size
        if records_actions(args):
            replayed = collected.replayed
            log.record.write_actions(pack(Frame(replayed.actions, replayed.digest), shape))
        log.write(made, [collected_here], episodes)
        if saved is not None:
            checkpoints.save(
                plan.run.directory,
                saved,
                update=number,
                wall_time=now - started,
                sizes=log.sizes(),
                digests=[collected.replayed.digest.hex()],
                pinned=pinned(plan),
                keep=args.checkpoints.keep_checkpoints,
            )
        last = now - started
    actor.close()
    if evaluator is not None:
        evaluator.close()
    return learner.state


def repeat(run: record.Run) -> Repetition:
    """Prepare to make the updates of a record again.

    Raises:
      NotRepeatable: with one line, if this machine or version cannot compute its bits.
      Mismatch: if the environment has another number of actions than the record.
    """
    if run.info.hyperparameters.get("strategy") == "removed":
        raise NotRepeatable("its episodes are not those that it learned from")
    hardware = Hardware(platform=platform_of(run))
    plan = prepare_again(run, Args, prepare, pinned, hardware=hardware)
    return Repetition(make_actor(plan, plan.args.strategy, stream=2), Learner(plan))


def main(args: Args) -> None:
    """Check the arguments, train, and record it."""
    plan = prepare(args)
    with begin_log(plan) as log:
        train(plan, log)
        log.note_hardware(placement.saved_by_cache())


if __name__ == "__main__":
    run_command_line(Args, main, "PPO on µRTS, with masks of invalid actions.")
