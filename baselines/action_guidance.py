"""Action guidance: PPO on µRTS for a sparse reward, guided by a policy that learns from a shaped one.

"Action Guidance: Getting the Best of Sparse Rewards and Shaped Rewards for Real-time Strategy Games"
(https://arxiv.org/abs/2010.03956). A main policy learns from the sparse reward alone. An auxiliary policy
learns from the shaped reward, and at first chooses most of the actions; then the main policy takes over. Both
learn from all steps, with PPO's clipped ratio to whichever policy acted. `--strategy` chooses among

- sparse, shaped: one policy, and one of the rewards;
- long, short, mixed: the paper's schedules of guidance. Mixed ends with half of the steps guided.

With `--positive-learning` a policy learns only from rollouts in which its reward does not sum to 0.
PPO itself is that of ppo_microrts.py. docs/differences.md compares the program with the paper's code.

    make setup MICRORTS=1
    python baselines/action_guidance.py --env-id MicrortsProduceCombatUnitHRL-v1 --strategy long
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from baselines import microrts
from baselines.microrts import Task
from baselines.microrts_rollouts import Act, Actor, Rollout
from baselines.ppo_microrts import (
    VERSIONS,
    AgentState,
    Hardware,
    Transitions,
    clipped_losses,
    encode,
    gae,
    layout,
    learn_in_epochs,
    log_probabilities,
    make_learn,
    masked,
    masks_of,
    sample,
)
from baselines.synchronous import Times, check_batches, episode_rows, rows
from cleanba import record
from cleanba.exact import placement
from cleanba.networks import Dense, StridedConv
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
from cleanba.run.log import RunLog, run_info
from cleanba.run.options import LogOptions, RunId, RunOptions, check_run, run_id

PROGRAM = "action_guidance"
# Weights of the reward functions in the sparse and in the shaped reward, in the order of `microrts.REWARDS`.
REWARD_WEIGHTS = {
    "MicrortsAttackHRL-v1": ((0, 0, 0, 0, 1, 0, 0), (0, 0, 0, 0, 1, 0, 1)),
    "MicrortsProduceCombatUnitHRL-v1": ((0, 0, 0, 0, 0, 1, 0), (0, 1, 0, 1, 0, 7, 0)),
    "MicrortsRandomEnemyHRL3-v1": ((1, 0, 0, 0, 0, 0, 0), (5, 1, 1, 0.2, 1, 7, 0.2)),
}
SPARSE, SHAPED = 0, 1
FIRST_EPSILON = 0.95  # share of guided steps during the shift


class Schedule(NamedTuple):
    """The share of steps in which the auxiliary policy acts: constant, then falling linearly."""

    shift: float  # share of the run before it begins to fall
    adaptation: float  # share of the run in which it falls
    last: float  # where it ends


# The paper's shifts and adaptations are of 10 million steps.
SCHEDULES = {
    "long": Schedule(0.2, 0.7, 0.0),
    "short": Schedule(0.08, 0.1, 0.0),
    "mixed": Schedule(0.2, 0.2, 0.5),
}


@dataclass(frozen=True)
class Args:
    """Hyperparameters (those of the paper) and, after them, hardware settings and the record."""

    env_id: Hyper[str] = "MicrortsProduceCombatUnitHRL-v1"
    """Task of µRTS with a sparse and a shaped reward."""
    strategy: Hyper[Literal["sparse", "shaped", "long", "short", "mixed"]] = "long"
    """Learn from the sparse reward, from the shaped one, or from both with a schedule of guidance."""
    positive_learning: Hyper[bool] = False
    """Positive learning optimization: a policy skips rollouts in which its reward sums to 0."""
    seed: Hyper[int] = 1
    """Seed of the run: initial parameters, actions, minibatches. A random opponent has no seed."""
    total_timesteps: Hyper[Count] = 10_000_000
    """Agent steps over all environments."""
    learning_rate: Hyper[Positive] = 2.5e-4
    """Learning rate of Adam."""
    anneal_lr: Hyper[bool] = True
    """Anneal the learning rate linearly to 0."""
    num_envs: Hyper[Count] = 8
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
    clip_coef: Hyper[Positive] = 0.1
    """Clipping of the probability ratio, and of the change of values."""
    ent_coef: Hyper[NotNegative] = 0.01
    """Coefficient of the entropy."""
    vf_coef: Hyper[NotNegative] = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: Hyper[Positive] = 0.5
    """Largest norm of a policy's gradient."""
    adam_eps: Hyper[NotNegative] = 1e-5
    """Epsilon of Adam."""
    portable: Hyper[bool] = True
    """On a CPU, compute the same bits on every processor, as Cleanba PPO does. No effect on a GPU."""
    hardware: Nested[Hardware] = Hardware()
    run: Nested[RunOptions] = RunOptions()
    logging: Nested[LogOptions] = LogOptions(log_frequency=1)

    @property
    def batch_size(self) -> int:
        """Steps of a rollout, over all environments."""
        return self.num_envs * self.num_steps

    @property
    def learned_rewards(self) -> tuple[int, ...]:
        """The reward of each policy, the main policy first."""
        return {"sparse": (SPARSE,), "shaped": (SHAPED,)}.get(self.strategy, (SPARSE, SHAPED))


class Network(nn.Module):
    """Two convolutions and a hidden layer, which policy and value function share."""

    components: tuple[int, ...]
    portable: bool

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        """Map observations to the logits of each component [B, size], and values [B]."""
        x = nn.relu(StridedConv(16, 3, 2, self.portable)(encode(obs)))
        x = nn.relu(StridedConv(32, 2, 1, self.portable)(x))
        x = nn.relu(Dense(128, 2**0.5, self.portable)(x.reshape(x.shape[0], -1)))
        logits = Dense(sum(self.components), 0.01, self.portable)(x)
        value = Dense(1, 1.0, self.portable)(x)[:, 0]
        return jnp.split(logits, np.cumsum(self.components)[:-1].tolist(), axis=-1), value


def guided_share(schedule: Schedule, progress: float) -> float:
    """Return the share of steps in which the auxiliary policy acts, at a share of the run."""
    fallen = (progress - schedule.shift) / schedule.adaptation
    share = FIRST_EPSILON + (schedule.last - FIRST_EPSILON) * max(fallen, 0.0)
    return max(share, schedule.last)


def make_act(network: Network, key: jax.Array) -> Act:
    """Return the compiled behaviour policy.

    Its first argument is a pair: the parameters of one policy, or of the main and the auxiliary one; and the
    share of guided steps. Within a step, all environments follow the same policy. Values are those of all P
    policies, [B, P].
    """

    @jax.jit
    def act(
        given: tuple[Sequence[Any], float], obs: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        policies, guided = given
        choice_key, action_key = jax.random.split(jax.random.fold_in(key, step))
        outputs = [network.apply(params, obs) for params in policies]
        logits = outputs[0][0]
        if len(policies) == 2:
            by_auxiliary = jax.random.bernoulli(choice_key, guided)
            logits = jax.tree.map(partial(jnp.where, by_auxiliary), outputs[1][0], logits)
        logits = masked(logits, masks_of(obs))
        actions = sample(logits, action_key)
        log_policies = [jax.nn.log_softmax(x) for x in logits]
        values = jnp.stack([value for _, value in outputs], axis=-1)
        return actions, log_probabilities(log_policies, actions), values

    return act


def ppo_loss(
    params: Any, network: Network, minibatch: Transitions, args: Args
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return PPO's loss of a minibatch, off-policy where another policy acted, and its parts."""
    logits, values = network.apply(params, minibatch.obs)
    advantages = minibatch.advantages
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return clipped_losses(
        [jax.nn.log_softmax(x) for x in masked(logits, masks_of(minibatch.obs))],
        values,
        minibatch._replace(advantages=advantages),
        objective="action",
        clip_coef=args.clip_coef,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef,
    )


def make_optimizer(args: Args) -> tuple[optax.GradientTransformation, Callable]:
    """Return Adam after clipping, and its learning rate by update (from 0).

    The rate is a hyperparameter of the optimizer's state, because a policy that skips updates must not fall
    behind the schedule.
    """
    num_updates = args.total_timesteps // args.batch_size

    def learning_rate(update: int) -> float:
        return args.learning_rate * (1.0 - update / num_updates if args.anneal_lr else 1.0)

    adam = optax.inject_hyperparams(optax.adam)(args.learning_rate, eps=args.adam_eps)
    return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), adam), learning_rate


def make_update(network: Network, args: Args, optimizer: optax.GradientTransformation) -> Callable:
    """Return the compiled update of one policy.

    It takes the policy's state, a rollout, the policy's index, its reward's weights [R], the learning rate
    and a random key, and returns the next state and the metrics [epochs, minibatches].
    """

    learn = make_learn(ppo_loss, network, args, optimizer)

    @jax.jit
    def update(
        state: AgentState,
        rollout: Rollout,
        index: jax.Array,
        weights: jax.Array,
        rate: jax.Array,
        key: jax.Array,
    ) -> tuple[AgentState, dict[str, jax.Array]]:
        state.opt_state[1].hyperparams["learning_rate"] = rate
        _, last_value = network.apply(state.params, rollout.obs[-1])
        values = rollout.values[..., index]
        discounts = args.gamma * (1.0 - rollout.dones)
        advantages, returns = gae(
            rollout.rewards @ weights, discounts, values, last_value, args.gae_lambda
        )
        parts = Transitions(
            rollout.obs[:-1], rollout.actions, rollout.logprobs, values, advantages, returns
        )
        return learn_in_epochs(learn, state, parts, args, key)

    return update


class Learner:
    """One or two policies, each with its own reward, network and optimizer."""

    def __init__(self, args: Args, task: Task, network: Network):
        """Begin with initial parameters."""
        self._args = args
        optimizer, self._learning_rate = make_optimizer(args)
        self._update = make_update(network, args, optimizer)
        key = jax.random.key(args.seed)
        init_key, self._key = (jax.random.fold_in(key, stream) for stream in range(2))
        weights = np.asarray(REWARD_WEIGHTS[task.env_id], np.float32)
        self._weights = [weights[reward] for reward in args.learned_rewards]
        obs = np.zeros((1, *task.obs_shape), np.uint8)
        init = jax.jit(network.init)
        initial = [init(k, obs) for k in jax.random.split(init_key, len(self._weights))]
        self.states = [AgentState(params, optimizer.init(params)) for params in initial]
        self.updates = 0

    @property
    def params(self) -> list[Any]:
        """Parameters of each policy, the main policy first."""
        return [state.params for state in self.states]

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Make the next update of every policy that does not skip it.

        Returns:
          The metrics of the main policy's last minibatch, or of the auxiliary policy's if only that one
          learned. The loss is NaN if both skipped the update.
        """
        rate = self._learning_rate(self.updates)
        self.updates += 1
        found = {"learning_rate": rate, "loss": float("nan")}
        for index in reversed(range(len(self.states))):
            weights = self._weights[index]
            if self._args.positive_learning and not (rollout.rewards @ weights).sum():
                continue
            key = jax.random.fold_in(jax.random.fold_in(self._key, self.updates), index)
            self.states[index], metrics = self._update(
                self.states[index], rollout, index, weights, np.float32(rate), key
            )
            numbers = {name: float(x[-1, -1]) for name, x in jax.device_get(metrics).items()}
            if not np.isfinite(numbers["loss"]):
                raise FloatingPointError(f"the loss of update {self.updates} is {numbers['loss']}")
            found |= numbers
        return found


class Plan(NamedTuple):
    """A run that has been checked and may begin."""

    args: Args
    run: RunId
    task: Task
    network: Network
    num_updates: int


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
    run = run_id(system_name(args), args.env_id, args.seed, args.run, "one-device")
    check_env_id = partial(microrts.check_env_id, choices=REWARD_WEIGHTS)
    check_run(run, args.num_envs, overwrite=args.run.overwrite, check_env_id=check_env_id)
    task = microrts.describe_task(args.env_id)
    placement.start_jax(layout(args.hardware), args.portable)
    args = replace(args, portable=args.portable and jax.local_devices()[0].platform == "cpu")
    network = Network(task.components, args.portable)
    return Plan(args, run, task, network, args.total_timesteps // args.batch_size)


def system_name(args: Args) -> str:
    """Return the name of the system that a command line describes, such as `action_guidance_long-plo`."""
    return f"{PROGRAM}_{args.strategy}{'-plo' if args.positive_learning else ''}"


def begin_log(plan: Plan) -> RunLog:
    """Begin the record of a run, without actions."""
    args = plan.args
    info = run_info(
        plan.run,
        program=PROGRAM,
        hyperparameters=hyperparameters(args),
        hardware=placement.describe_hardware(layout(args.hardware), num_processes=1),
        packages=VERSIONS,
    )
    return RunLog(
        plan.run,
        info,
        total_steps=plan.num_updates * args.batch_size,
        overwrite=args.run.overwrite,
        progress="bar" if args.run.progress else None,
        log_frequency=args.logging.log_frequency,
    )


def train(plan: Plan, log: RunLog) -> None:
    """Train from initial parameters, and log it; recorded returns are sparse returns."""
    args = plan.args
    key = jax.random.fold_in(jax.random.key(args.seed), 2)
    scored = np.asarray(REWARD_WEIGHTS[args.env_id][SPARSE])
    act = make_act(plan.network, key)
    actor = Actor(plan.task, args.num_envs, args.num_steps, act, scored)
    learner = Learner(args, plan.task, plan.network)
    schedule = SCHEDULES.get(args.strategy)
    started, last = time.perf_counter(), 0.0
    for number in range(1, plan.num_updates + 1):
        begin = time.perf_counter()
        guided = guided_share(schedule, (number - 1) / plan.num_updates) if schedule else 0.0
        collected = actor.collect((learner.params, np.float32(guided)))
        after = time.perf_counter()
        metrics = learner.learn(collected.rollout)
        now = time.perf_counter()

        # The record.
        marked = number == plan.num_updates or number % args.logging.fingerprint_every == 0
        named = dict(zip(("main", "auxiliary"), learner.params, strict=False))
        collected_here, made = rows(
            number,
            args.batch_size,
            Times(last, begin - started, after - started, now - started),
            collected.times,
            metrics,
            fingerprint=record.fingerprint(named) if marked else None,
        )
        episodes = episode_rows(
            collected.replayed.episodes,
            args.num_envs,
            (number - 1) * args.batch_size,
            collected_here.wall_time,
            collected.invalid,
        )
        log.write(made, [collected_here], episodes)
        last = now - started
    actor.close()


def main(args: Args) -> None:
    """Check the arguments, train, and record it."""
    plan = prepare(args)
    with begin_log(plan) as log:
        train(plan, log)
        log.note_hardware(placement.saved_by_cache())


if __name__ == "__main__":
    run_command_line(Args, main, "Action guidance on µRTS: PPO with a sparse and a shaped reward.")
