"""Cleanba PPO: all of the algorithm, in one file.

Proximal policy optimization (https://arxiv.org/abs/1707.06347) under the synchronous or the Cleanba
architecture (https://arxiv.org/abs/2310.00036), on EnvPool. Read from top to bottom: hyperparameters,
acting, advantages, loss, the loops of an update, command line. Next files to read: training.py (the
loop over updates), actor_learner.py (actor threads and their queues), exact/groups.py (gradients of
environment groups, summed in one order).

    python cleanba/cleanba_ppo.py --env-id Breakout-v5
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cleanba import evaluate, training
from cleanba.actor_learner import Act, GroupRollout
from cleanba.compatibility import advantage_chunks, restores
from cleanba.exact import psum, single_gradient
from cleanba.exact.groups import GroupExchange, sum_over_microbatches, tree_sum
from cleanba.exact.placement import Hardware
from cleanba.preparation import Setup, prepare_run
from cleanba.record import Run
from cleanba.repetition import Repetition, repetition_of
from cleanba.run.arguments import (
    Count,
    Hyper,
    Nested,
    NotHyper,
    NotNegative,
    Positive,
    Share,
)
from cleanba.run.command_line import run_command_line
from cleanba.run.options import (
    CheckpointOptions,
    LogOptions,
    ModelOptions,
    ResumeOptions,
    RunOptions,
    TrackingOptions,
)
from cleanba.training import Trainer, TrainState, Update


@dataclass(frozen=True)
class Args:
    """Hyperparameters (the paper's table 2) and, after them, hardware settings and logging."""

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
    num_envs: Hyper[Count | None] = None
    """Environments of the whole run, on any layout; 120 by default."""
    local_num_envs: NotHyper[Count | None] = None
    """Environments of each actor thread, as in the original Cleanba; the layout multiplies them."""
    num_env_groups: Hyper[Count | None] = None
    """Environment groups, the unit of computation; by default the largest divisor up to 8."""
    num_steps: Hyper[Count] = 128
    """Steps of each environment in a rollout."""
    gamma: Hyper[Share] = 0.99
    """Discount factor."""
    gae_lambda: Hyper[Share] = 0.95
    """Lambda of generalized advantage estimation."""
    num_minibatches: Hyper[Count] = 4
    """Minibatches of an epoch; each has the same number of transitions of every group."""
    gradient_accumulation_steps: Hyper[Count] = 1
    """Number of gradients averaged per optimizer step; each minibatch is split into as many parts."""
    update_epochs: Hyper[Count] = 4
    """Epochs over each batch."""
    norm_adv: Hyper[bool] = True
    """Normalize advantages over the whole minibatch."""
    clip_coef: Hyper[Positive] = 0.1
    """Clipping of the probability ratio."""
    ent_coef: Hyper[NotNegative] = 0.01
    """Coefficient of the entropy bonus."""
    vf_coef: Hyper[NotNegative] = 0.5
    """Coefficient of the value loss (which is not clipped)."""
    max_grad_norm: Hyper[Positive] = 0.5
    """Largest global norm of a gradient."""
    adam_eps: Hyper[NotNegative] = 1e-5
    """Epsilon of Adam."""
    concurrency: Hyper[bool] = False
    """Cleanba architecture: the actors are one policy behind. Without it: synchronous."""
    network: Hyper[Literal["auto", "resnet", "nature", "mlp"]] = "auto"
    """Network: IMPALA ResNet, Nature CNN or MLP; auto: the ResNet for images, else the MLP."""
    channels: Hyper[tuple[Count, ...] | None] = None
    """Channels of the convolutional stages; by default the network's own."""
    hiddens: Hyper[tuple[Count, ...] | None] = None
    """Widths of the dense layers; by default the network's own."""
    atari_preprocessing: Hyper[Literal["machado", "gym"]] = "machado"
    """Atari preprocessing: as in the paper (Machado et al., 2018), or gym's wrappers (appendix D)."""
    microbatch_size: Hyper[Count | None] = None
    """Transitions of a group in one call of the gradient function. Part of the arithmetic, not of the
    algorithm. By default at most 64 images on a CPU, else the group's whole part of a minibatch."""
    reduction: Hyper[Literal["groups", "psum"]] = "groups"
    """How gradients are summed: by environment group, bit-identical on every layout; or by device with
    `lax.psum`, whose bits depend on the number of learner devices."""
    portable: Hyper[bool] = True
    """On a CPU, compute the same bits on every processor and with any number of threads. It needs AVX2 and
    FMA on x86-64, and a C++ compiler. On a GPU it has no effect, and is recorded as off."""
    compat: Hyper[
        tuple[
            Literal["original", "advantages", "reset-steps", "no-ops", "seeds"],
            ...,
        ]
    ] = ()
    """Parts of the original Cleanba's arithmetic to restore; `original`: all (docs/differences.md)."""
    hardware: Nested[Hardware] = Hardware()
    run: Nested[RunOptions] = RunOptions()
    logging: Nested[LogOptions] = LogOptions()
    checkpoints: Nested[CheckpointOptions] = CheckpointOptions()
    resuming: Nested[ResumeOptions] = ResumeOptions()
    tracking: Nested[TrackingOptions] = TrackingOptions()
    model: Nested[ModelOptions] = ModelOptions()


class Behaviour(NamedTuple):
    """Outputs of the behaviour policy beside its actions, [T, B] each."""

    logprob: jax.Array  # of the action, under the behaviour policy
    value: jax.Array


class Batch(NamedTuple):
    """The N = T * B transitions of a group, ready for minibatches."""

    obs: jax.Array  # [N, ...]
    actions: jax.Array  # [N]
    logprobs: jax.Array  # [N]
    advantages: jax.Array  # [N]
    returns: jax.Array  # [N]
    mask: jax.Array  # [N], 0 where the transition is a reset
    order: jax.Array  # [epochs, N], the permutation that minibatches are cut from


class Moments(NamedTuple):
    """Number, mean and sum of squared deviations of the advantages in each minibatch, [M]."""

    count: jax.Array
    mean: jax.Array
    deviations: jax.Array


class Losses(NamedTuple):
    """Contributions to the mean losses of a minibatch."""

    loss: jax.Array
    policy_loss: jax.Array
    value_loss: jax.Array
    entropy: jax.Array
    approx_kl: jax.Array
    clip_fraction: jax.Array


def make_act(network: Any) -> Act:
    """Return the compiled inference call, from (params, obs, key, step) to (actions, Behaviour, step + 1)."""

    @jax.jit
    def act(
        params: Any, obs: jax.Array, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, Behaviour, jax.Array]:
        logits, value = network.apply(params, obs)
        action = jax.random.categorical(jax.random.fold_in(key, step), logits).astype(jnp.int32)
        logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=1)[:, 0]
        return action, Behaviour(logprob, value), step + 1

    return act


def generalized_advantages(
    r_t: jax.Array, discount_t: jax.Array, lambda_: float, v_tm1: jax.Array, v_t: jax.Array
) -> jax.Array:
    """Generalized advantage estimation (https://arxiv.org/abs/1506.02438).

    Args:
      r_t: rewards [T, B].
      discount_t: discounts [T, B], 0 where the episode ended with that step.
      lambda_: mixing parameter.
      v_tm1: values of the observations before the steps [T, B].
      v_t: values of the observations after them [T, B].

    Returns:
      Advantages [T, B].
    """
    delta_t = r_t + discount_t * v_t - v_tm1

    def step(
        advantage_t: jax.Array, xs: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        delta, discount = xs
        advantage_tm1 = delta + discount * lambda_ * advantage_t
        return advantage_tm1, advantage_tm1

    _, advantages = jax.lax.scan(
        step, jnp.zeros_like(delta_t[0]), (delta_t, discount_t), reverse=True
    )
    return advantages


def minibatch_moments(values: jax.Array, mask: jax.Array) -> Moments:
    """Return number, mean and squared deviations of the unmasked values in each row of [M, n]."""
    count = mask.sum(axis=1)
    mean = (values * mask).sum(axis=1) / jnp.maximum(count, 1)
    deviations = (jnp.square(values - mean[:, None]) * mask).sum(axis=1)
    return Moments(count, mean, deviations)


def combine_moments(groups: tuple[Moments, ...]) -> Moments:
    """Combine the moments of all groups into those of the whole minibatches (Chan et al., 1979)."""
    count = tree_sum([m.count for m in groups])
    mean = tree_sum([m.count * m.mean for m in groups]) / jnp.maximum(count, 1)
    deviations = tree_sum([m.deviations + m.count * jnp.square(m.mean - mean) for m in groups])
    return Moments(count, mean, deviations)


def ppo_loss(
    logits: jax.Array,
    value: jax.Array,
    batch: Batch,
    moments: Moments,
    args: Args,
) -> Losses:
    """The clipped surrogate loss of some transitions of a minibatch, as in CleanRL.

    Args:
      logits: of the current policy [n, num_actions].
      value: of the current network [n].
      batch: the n transitions (`order` is not used).
      moments: number and advantage moments (scalars) of the whole minibatch; the transitions may be
        only a part of it.
      args: hyperparameters.

    Returns:
      Sums over the n transitions, divided by the number of transitions in the whole minibatch: the
      sums of all its parts add up to the minibatch's means.
    """
    log_probs = jax.nn.log_softmax(logits)
    logprob = jnp.take_along_axis(log_probs, batch.actions[:, None], axis=1)[:, 0]
    log_ratio = logprob - batch.logprobs
    ratio = jnp.exp(log_ratio)
    advantages = batch.advantages
    count = jnp.maximum(moments.count, 1)  # a minibatch may hold only reset steps
    if args.norm_adv and not restores(args.compat, "advantages"):
        deviation = jnp.sqrt(moments.deviations / count)
        advantages = (advantages - moments.mean) / (deviation + 1e-8)
    clipped_ratio = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)

    def mean(x: jax.Array) -> jax.Array:
        return (x * batch.mask).sum() / count

    policy_loss = mean(jnp.maximum(-advantages * ratio, -advantages * clipped_ratio))
    value_loss = mean(0.5 * jnp.square(value - batch.returns))
    entropy = mean(-(jnp.exp(log_probs) * log_probs).sum(axis=1))
    return Losses(
        loss=policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy,
        policy_loss=policy_loss,
        value_loss=value_loss,
        entropy=entropy,
        approx_kl=mean((ratio - 1) - log_ratio),
        clip_fraction=mean((jnp.abs(ratio - 1) > args.clip_coef).astype(jnp.float32)),
    )


def make_optimizer(args: Args, num_updates: int) -> tuple[optax.GradientTransformation, Callable]:
    """Return Adam after clipping, and its learning rate by update (from 0): constant within one."""

    def learning_rate(update: Any) -> Any:
        return args.learning_rate * (1.0 - update / num_updates if args.anneal_lr else 1.0)

    steps = args.update_epochs * args.num_minibatches
    optimizer = optax.chain(
        optax.clip_by_global_norm(args.max_grad_norm),
        optax.adam(lambda count: learning_rate(count // steps), eps=args.adam_eps),
    )
    if args.gradient_accumulation_steps > 1:
        optimizer = optax.MultiSteps(optimizer, args.gradient_accumulation_steps)
    return optimizer, learning_rate


def minibatches_of(args: Args) -> int:
    """Return the gradients of an epoch; `gradient_accumulation_steps` of them make an optimizer step."""
    return args.num_minibatches * args.gradient_accumulation_steps


def make_batch(network: Any, args: Args) -> Callable:
    """Return the compiled function from a group's rollout to its batch and its moments.

    It takes (params, rollout, key, update): the group's key and the number of the update decide the
    permutations, one per epoch, of the group's own transitions.
    """

    @jax.jit
    def batch_of(
        params: Any, rollout: GroupRollout, key: jax.Array, update: jax.Array
    ) -> tuple[Batch, Moments]:
        num_steps, num_envs = rollout.actions.shape
        size = num_steps * num_envs
        _, last_value = network.apply(params, rollout.obs[-1])
        values = jnp.concatenate([rollout.behaviour.value, last_value[None]])
        dones = rollout.dones.astype(jnp.float32)
        discounts = args.gamma * (1.0 - dones[1:])
        advantages = generalized_advantages(
            rollout.rewards, discounts, args.gae_lambda, values[:-1], values[1:]
        )
        mask = (
            jnp.ones_like(dones[:-1]) if restores(args.compat, "reset-steps") else 1.0 - dones[:-1]
        )
        epoch_keys = jax.random.split(jax.random.fold_in(key, update), args.update_epochs)
        order = jax.vmap(lambda k: jax.random.permutation(k, size))(epoch_keys)
        batch = Batch(
            obs=rollout.obs[:-1].reshape(size, *rollout.obs.shape[2:]),
            actions=rollout.actions.reshape(size),
            logprobs=rollout.behaviour.logprob.reshape(size),
            advantages=advantages.reshape(size),
            returns=(advantages + values[:-1]).reshape(size),
            mask=mask.reshape(size),
            order=order,
        )
        minibatches = order.reshape(args.update_epochs * minibatches_of(args), -1)
        return batch, minibatch_moments(batch.advantages[minibatches], batch.mask[minibatches])

    return batch_of


def chunk_moments(advantages: jax.Array, in_chunk: jax.Array) -> Moments:
    """Return the moments of a group's advantages in each of the original's chunks.

    Args:
      advantages: of the group [T, B].
      in_chunk: 1 where an environment is part of a chunk, else 0 [chunks, B].

    Returns:
      `Moments` of [chunks].
    """
    values = jnp.broadcast_to(advantages, (len(in_chunk), *advantages.shape))
    mask = jnp.broadcast_to(in_chunk[:, None], values.shape)
    flat = (len(in_chunk), advantages.size)
    return minibatch_moments(values.reshape(flat), mask.reshape(flat))


def normalize_by_chunk(batch: Batch, moments: Moments, chunk: jax.Array) -> Batch:
    """Normalize advantages over the environments of a chunk and all their steps, as the original does.

    Args:
      batch: of a group.
      moments: of all chunks, over all groups.
      chunk: of each of the group's environments [B].
    """
    advantages = batch.advantages.reshape(-1, len(chunk))
    deviation = jnp.sqrt(moments.deviations / moments.count)
    normalized = (advantages - moments.mean[chunk]) / (deviation[chunk] + 1e-8)
    return batch._replace(advantages=normalized.reshape(-1))


def make_chunk_normalization(
    args: Args, setup: Setup, exchange: GroupExchange
) -> Callable[[list[Batch]], list[Batch]]:
    """Return the function that normalizes the advantages of the local groups as the original does."""
    chunks = advantage_chunks(
        args.hardware, setup.placement.num_processes, setup.num_envs, args.num_minibatches
    ).reshape(setup.placement.num_groups, -1)
    local = [chunks[group] for group in setup.placement.local_groups]
    one_hot = np.arange(chunks.max() + 1)[:, None]
    moments_of = jax.jit(
        lambda batch, chunk: chunk_moments(
            batch.advantages.reshape(-1, len(chunk)), (chunk == one_hot).astype(np.float32)
        )
    )
    combine, normalize = jax.jit(combine_moments), jax.jit(normalize_by_chunk)

    def normalized(batches: list[Batch]) -> list[Batch]:
        moments = [moments_of(batch, chunk) for batch, chunk in zip(batches, local, strict=True)]
        whole = exchange.spread(combine(exchange.gather(moments)))
        return [normalize(*each) for each in zip(batches, whole, local, strict=True)]

    return normalized


def take(batch: Batch, first: jax.Array, count: int) -> Batch:
    """Take `count` transitions of a group from position `first` of its permutations, [epochs * N]."""
    indices = jax.lax.dynamic_slice(batch.order.reshape(-1), (first,), (count,))
    return jax.tree.map(lambda x: x[indices], batch._replace(order=None))


def make_gradient(network: Any, args: Args) -> Callable:
    """Return the function from (params, part, moments) to (gradient, Losses) of part of a minibatch."""

    def gradient(params: Any, part: Batch, moments: Moments) -> tuple[Any, Losses]:
        def loss(params: Any) -> tuple[jax.Array, Losses]:
            losses = ppo_loss(*network.apply(params, part.obs), part, moments, args)
            return losses.loss, losses

        return jax.grad(loss, has_aux=True)(params)

    return gradient


def make_learn(args: Args, setup: Setup, exchange: GroupExchange) -> Callable:
    """Return the function that learns from one batch: the loops over epochs, minibatches and groups.

    It takes (params, opt_state, batches, moments), with one batch and one `Moments` of the whole
    minibatches for each local group, and returns the new (params, opt_state) and the metrics of the
    last minibatch.
    """
    optimizer, _ = make_optimizer(args, setup.num_updates)
    gradient = make_gradient(setup.network, args)

    def microbatch_gradient(
        params: Any, batch: Batch, moments: Moments, minibatch: jax.Array, start: jax.Array
    ) -> tuple[Any, Losses]:
        part = take(batch, minibatch * setup.minibatch_size + start, setup.microbatch_size)
        return gradient(params, part, jax.tree.map(lambda x: x[minibatch], moments))

    def optimizer_step(
        params: Any, opt_state: Any, groups: tuple[tuple[Any, Losses], ...]
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        grads, losses = tree_sum(groups)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = losses._asdict() | {"grad_norm": optax.global_norm(grads)}
        return optax.apply_updates(params, updates), opt_state, metrics

    num_minibatches = args.update_epochs * minibatches_of(args)
    if args.reduction == "psum":
        return psum.make_learn(
            take,
            gradient,
            optimizer_step,
            exchange,
            num_minibatches=num_minibatches,
            minibatch_size=setup.minibatch_size,
            axis=0,
        )
    if setup.placement.num_groups == 1 and setup.microbatch_size == setup.minibatch_size:
        return single_gradient.make_learn(
            microbatch_gradient,
            optimizer_step,
            num_minibatches=num_minibatches,
            loop=args.portable or len(setup.spec.obs_shape) == 1,
        )
    group_gradient = sum_over_microbatches(
        microbatch_gradient, setup.minibatch_size, setup.microbatch_size
    )
    compiled_step = jax.jit(optimizer_step, donate_argnums=1)

    def learn(
        params: Any, opt_state: Any, batches: list[Batch], moments: list[Moments]
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        for epoch in range(args.update_epochs):
            for minibatch in range(minibatches_of(args)):
                index = np.int32(epoch * minibatches_of(args) + minibatch)
                # on each group's learner device, in an executable that no layout changes
                gradients = [
                    group_gradient(group_params, batch, group_moments, index)
                    for group_params, batch, group_moments in zip(
                        exchange.spread(params), batches, moments, strict=True
                    )
                ]
                # added in one fixed tree, on one device of every process
                params, opt_state, metrics = compiled_step(
                    params, opt_state, exchange.gather(gradients)
                )
        return params, opt_state, metrics

    return learn


def make_update(args: Args, setup: Setup, exchange: GroupExchange) -> Update:
    """Return the update: advantages of one rollout of every group, then all epochs and minibatches."""
    _, learning_rate = make_optimizer(args, setup.num_updates)
    batch_of = make_batch(setup.network, args)
    combine = jax.jit(combine_moments)
    learn = make_learn(args, setup, exchange)
    by_chunk = args.norm_adv and restores(args.compat, "advantages")
    normalize = make_chunk_normalization(args, setup, exchange) if by_chunk else list
    groups = setup.placement.local_groups
    keys = [
        jax.device_put(
            training.stream_key(args.seed, training.LEARNER_STREAM, group),
            exchange.device_of(group),
        )
        for group in groups
    ]

    def update(
        state: TrainState, rollouts: dict[int, GroupRollout], number: int
    ) -> tuple[TrainState, dict[str, Any]]:
        batches, moments = [], []
        for params, group, key in zip(exchange.spread(state.params), groups, keys, strict=True):
            batch, group_moments = batch_of(params, rollouts[group], key, np.int32(number))
            batches.append(batch)
            moments.append(group_moments)
        # Advantages are normalized over the whole minibatch, so each group needs the moments of all groups.
        moments = exchange.spread(combine(exchange.gather(moments)))
        params, opt_state, metrics = learn(*state, normalize(batches), moments)
        return TrainState(params, opt_state), metrics | {"learning_rate": learning_rate(number - 1)}

    return update


def prepare(args: Args) -> Setup:
    """Check the arguments and prepare the run, see `preparation.prepare_run`."""
    return prepare_run(
        args,
        name="cleanba_ppo",
        default_num_envs=120,
        units_per_env=args.num_steps,
        images_per_unit=1,
    )


def make_trainer(setup: Setup) -> Trainer:
    """Initialize the parameters, and compile what a run needs."""
    exchange = GroupExchange(setup.placement)
    params = training.initial_params(setup)
    optimizer, _ = make_optimizer(setup.args, setup.num_updates)
    state = TrainState(params, jax.jit(optimizer.init)(params))
    update = make_update(setup.args, setup, exchange)
    return Trainer(state, make_act(setup.network), update, exchange)


def repeat(run: Run) -> Repetition:
    """Prepare to make the updates of a recorded run again, see `repetition.repetition_of`."""
    return repetition_of(run, Args, prepare, make_trainer)


def main(args: Args) -> None:
    """Check the arguments, train, and save and evaluate the model if the options ask for it."""
    setup = prepare(args)
    evaluate.warn_if_cannot_upload(args.model)
    training.train(setup, make_trainer(setup))
    evaluate.show_model(setup)


if __name__ == "__main__":
    run_command_line(Args, main, "Cleanba PPO on EnvPool.")
