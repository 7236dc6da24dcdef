"""Cleanba IMPALA: all of the algorithm, in one file.

Importance-weighted actor-learner (https://arxiv.org/abs/1802.01561) with V-trace from rlax, under the
Cleanba or the synchronous architecture (https://arxiv.org/abs/2310.00036), on EnvPool. Read from top to
bottom: hyperparameters, acting, loss, the loops of an update, command line. Next files to read:
training.py (the loop over updates), actor_learner.py (actor threads and their queues),
exact/groups.py (gradients of environment groups, summed in one order).

    python cleanba/cleanba_impala.py --env-id Breakout-v5
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rlax

from cleanba import evaluate, training
from cleanba.actor_learner import Act, GroupRollout
from cleanba.compatibility import restores
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
    """Hyperparameters (of the original code) and, after them, hardware settings and logging."""

    env_id: Hyper[str] = "Breakout-v5"
    """EnvPool environment."""
    seed: Hyper[int] = 1
    """Seed of the run: environments, initial parameters, actions."""
    total_timesteps: Hyper[Count] = 50_000_000
    """Agent steps over all environments (200M Atari frames)."""
    learning_rate: Hyper[Positive] = 6e-4
    """Learning rate of RMSProp."""
    anneal_lr: Hyper[bool] = True
    """Anneal the learning rate linearly to 0."""
    num_envs: Hyper[Count | None] = None
    """Environments of the whole run, on any layout; 128 by default."""
    local_num_envs: NotHyper[Count | None] = None
    """Environments of each actor thread, as in the original Cleanba; the layout multiplies them."""
    num_env_groups: Hyper[Count | None] = None
    """Environment groups, the unit of computation; by default the largest divisor up to 8."""
    num_steps: Hyper[Count] = 20
    """Steps of each environment in a rollout."""
    gamma: Hyper[Share] = 0.99
    """Discount factor."""
    num_minibatches: Hyper[Count] = 4
    """Minibatches of an update; each has the same number of environments of every group."""
    gradient_accumulation_steps: Hyper[Count] = 1
    """Number of gradients averaged per optimizer step; each minibatch is split into as many parts."""
    rho_clip: Hyper[NotNegative] = 1.0
    """Clipping of the importance ratios in the V-trace targets (rho; that of c is 1, as in rlax)."""
    pg_rho_clip: Hyper[NotNegative] = 1.0
    """Clipping of the importance ratios in the policy gradient."""
    vtrace_lambda: Hyper[Share] = 1.0
    """Mixing parameter of V-trace."""
    ent_coef: Hyper[NotNegative] = 0.01
    """Coefficient of the entropy bonus."""
    vf_coef: Hyper[NotNegative] = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: Hyper[Positive] = 40.0
    """Largest global norm of a gradient."""
    rmsprop_decay: Hyper[Share] = 0.99
    """Decay of RMSProp."""
    rmsprop_eps: Hyper[NotNegative] = 0.01
    """Epsilon of RMSProp, outside the root."""
    concurrency: Hyper[bool] = True
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
    """Environments of a group in one call of the gradient function. Part of the arithmetic, not of the
    algorithm. By default at most 64 images on a CPU, else the group's whole part of a minibatch."""
    reduction: Hyper[Literal["groups", "psum"]] = "groups"
    """How gradients are summed: by environment group, bit-identical on every layout; or by device with
    `lax.psum`, whose bits depend on the number of learner devices."""
    portable: Hyper[bool] = True
    """On a CPU, compute the same bits on every processor and with any number of threads. It needs AVX2 and
    FMA on x86-64, and a C++ compiler. On a GPU it has no effect, and is recorded as off."""
    compat: Hyper[
        tuple[
            Literal["original", "alignment", "mask", "gradient-scale", "no-ops", "seeds"],
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


class Losses(NamedTuple):
    """Sums over the unmasked steps of a minibatch, and their number."""

    loss: jax.Array
    policy_loss: jax.Array
    value_loss: jax.Array
    entropy: jax.Array
    count: jax.Array


def make_act(network: Any) -> Act:
    """Return the compiled inference call, from (params, obs, key, step) to (actions, logits, step + 1)."""

    @jax.jit
    def act(
        params: Any, obs: jax.Array, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits, _ = network.apply(params, obs)
        action = jax.random.categorical(jax.random.fold_in(key, step), logits).astype(jnp.int32)
        return action, logits, step + 1

    return act


class Transitions(NamedTuple):
    """What a rollout's actions led to, [T, B] each."""

    r_t: jax.Array  # rewards
    discount_t: jax.Array
    mask: jax.Array  # 0 where there is nothing to learn


def transitions(rollout: GroupRollout, args: Args) -> Transitions:
    """Pair each action with the reward and the end that follow it, and mask those that only reset.

    As in the original (impala_loss at d1f8979), `--compat alignment` pairs it with the reward
    and the end that came with its observation, so that the value of an observation includes that reward, and
    `--compat mask` masks the first step of an episode, and not the step that only resets its environment.
    """
    dones = rollout.dones.astype(jnp.float32)
    r_t, done_t, masked = rollout.rewards, dones[1:], dones[:-1]
    if restores(args.compat, "alignment"):
        r_t = jnp.concatenate([rollout.entry.rewards, rollout.rewards[:-1]])
        done_t = dones[:-1]
    if restores(args.compat, "mask"):
        masked = jnp.concatenate([rollout.entry.firsts.astype(jnp.float32), dones[:-2]])
    return Transitions(r_t, args.gamma * (1.0 - done_t), 1.0 - masked)


def impala_loss(
    logits_tm1: jax.Array, values: jax.Array, rollout: GroupRollout, args: Args
) -> Losses:
    """The V-trace actor-critic loss, summed over unmasked steps.

    Args:
      logits_tm1: of the current policy [T, B, num_actions].
      values: of the current network [T + 1, B], the last one for bootstrapping.
      rollout: the steps, with the logits of the behaviour policy.
      args: hyperparameters.

    Returns:
      The sums; `entropy` and `count` give the mean entropy.
    """
    v_tm1, v_t = values[:-1], values[1:]
    r_t, discount_t, mask = transitions(rollout, args)
    rho_tm1 = rlax.categorical_importance_sampling_ratios(
        logits_tm1, rollout.behaviour, rollout.actions
    )
    vtrace = jax.vmap(
        lambda *x: rlax.vtrace_td_error_and_advantage(
            *x,
            clip_rho_threshold=args.rho_clip,
            clip_pg_rho_threshold=args.pg_rho_clip,
            lambda_=args.vtrace_lambda,
        ),
        in_axes=1,
        out_axes=1,
    )(v_tm1, v_t, r_t, discount_t, rho_tm1)
    log_probs = jax.nn.log_softmax(logits_tm1)
    logprob = jnp.take_along_axis(log_probs, rollout.actions[..., None], axis=-1)[..., 0]
    policy_loss = -(logprob * jax.lax.stop_gradient(vtrace.pg_advantage) * mask).sum()
    value_loss = 0.5 * (jnp.square(vtrace.errors) * mask).sum()
    entropy = -((jnp.exp(log_probs) * log_probs).sum(axis=-1) * mask).sum()
    return Losses(
        loss=policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy,
        policy_loss=policy_loss,
        value_loss=value_loss,
        entropy=entropy,
        count=mask.sum(),
    )


def make_optimizer(args: Args, num_updates: int) -> tuple[optax.GradientTransformation, Callable]:
    """Return RMSProp after clipping, and its learning rate by update (from 0): constant within one."""

    def learning_rate(update: Any) -> Any:
        return args.learning_rate * (1.0 - update / num_updates if args.anneal_lr else 1.0)

    optimizer = optax.chain(
        optax.clip_by_global_norm(args.max_grad_norm),
        optax.rmsprop(
            lambda count: learning_rate(count // args.num_minibatches),
            decay=args.rmsprop_decay,
            eps=args.rmsprop_eps,
            eps_in_sqrt=False,
        ),
    )
    if args.gradient_accumulation_steps > 1:
        optimizer = optax.MultiSteps(optimizer, args.gradient_accumulation_steps)
    return optimizer, learning_rate


def take(rollout: GroupRollout, first: jax.Array, count: int) -> GroupRollout:
    """Take `count` environments of a group from environment `first` on, with all their steps."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, count, axis=1), rollout)


def make_gradient(network: Any, args: Args) -> Callable:
    """Return the function from (params, part) to (gradient, Losses) of part of a minibatch."""

    def gradient(params: Any, part: GroupRollout) -> tuple[Any, Losses]:
        def loss(params: Any) -> tuple[jax.Array, Losses]:
            length, num_envs = part.dones.shape
            obs = part.obs.reshape(length * num_envs, *part.obs.shape[2:])
            logits, values = network.apply(params, obs)
            logits = logits.reshape(length, num_envs, -1)[:-1]
            losses = impala_loss(logits, values.reshape(length, num_envs), part, args)
            return losses.loss, losses

        return jax.grad(loss, has_aux=True)(params)

    return gradient


def make_learn(args: Args, setup: Setup, exchange: GroupExchange) -> Callable:
    """Return the function that learns from one rollout: the loops over minibatches and groups.

    It takes (params, opt_state, rollouts), with one rollout for each local group, and returns the new
    (params, opt_state) and the metrics of the last minibatch.
    """
    optimizer, _ = make_optimizer(args, setup.num_updates)
    gradient = make_gradient(setup.network, args)
    num_minibatches = args.num_minibatches * args.gradient_accumulation_steps

    def microbatch_gradient(
        params: Any, rollout: GroupRollout, minibatch: jax.Array, start: jax.Array
    ) -> tuple[Any, Losses]:
        first = minibatch * setup.minibatch_size + start
        return gradient(params, take(rollout, first, setup.microbatch_size))

    def optimizer_step(
        params: Any, opt_state: Any, groups: tuple[tuple[Any, Losses], ...]
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        grads, losses = tree_sum(groups)
        if restores(args.compat, "gradient-scale"):
            # the original averages the sums of its learner devices
            learners = len(setup.placement.learner_device_ids) * setup.placement.num_processes
            grads = jax.tree.map(lambda g: g / learners, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = losses._asdict() | {"grad_norm": optax.global_norm(grads)}
        metrics["entropy"] = losses.entropy / jnp.maximum(metrics.pop("count"), 1)
        return optax.apply_updates(params, updates), opt_state, metrics

    if args.reduction == "psum":
        return psum.make_learn(
            take,
            gradient,
            optimizer_step,
            exchange,
            num_minibatches=num_minibatches,
            minibatch_size=setup.minibatch_size,
            axis=1,
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
        params: Any, opt_state: Any, rollouts: list[GroupRollout]
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        for minibatch in map(np.int32, range(num_minibatches)):
            # on each group's learner device, in an executable that no layout changes
            gradients = [
                group_gradient(group_params, rollout, minibatch)
                for group_params, rollout in zip(exchange.spread(params), rollouts, strict=True)
            ]
            # added in one fixed tree, on one device of every process
            params, opt_state, metrics = compiled_step(
                params, opt_state, exchange.gather(gradients)
            )
        return params, opt_state, metrics

    return learn


def make_update(args: Args, setup: Setup, exchange: GroupExchange) -> Update:
    """Return the update: all minibatches of one rollout of every group."""
    _, learning_rate = make_optimizer(args, setup.num_updates)
    learn = make_learn(args, setup, exchange)

    def update(
        state: TrainState, rollouts: dict[int, GroupRollout], number: int
    ) -> tuple[TrainState, dict[str, Any]]:
        data = [rollouts[group] for group in setup.placement.local_groups]
        params, opt_state, metrics = learn(*state, data)
        return TrainState(params, opt_state), metrics | {"learning_rate": learning_rate(number - 1)}

    return update


def prepare(args: Args) -> Setup:
    """Check the arguments and prepare the run, see `preparation.prepare_run`."""
    return prepare_run(
        args,
        name="cleanba_impala",
        default_num_envs=128,
        units_per_env=1,
        images_per_unit=args.num_steps + 1,
    )


def make_trainer(setup: Setup) -> Trainer:
    """Initialise the parameters, and compile what a run needs."""
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
    run_command_line(Args, main, "Cleanba IMPALA on EnvPool.")
