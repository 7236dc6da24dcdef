"""Cleanba IMPALA: all of the algorithm, in one file.

Importance-weighted actor-learner (https://arxiv.org/abs/1802.01561) with V-trace from rlax, under the
Cleanba or the synchronous architecture (https://arxiv.org/abs/2310.00036), on EnvPool. Read from top
to bottom: hyperparameters, acting, loss, update, command line. Where environment groups are computed
is decided in placement.py, how groups are added in groupwise.py, who waits for whom in
actor_learner.py.

    python cleanba/cleanba_impala.py --env-id Breakout-v5
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import rlax
import tyro

from cleanba import evaluate, training
from cleanba.actor_learner import Act, GroupRollout
from cleanba.command_line import RunOptions, run_command_line
from cleanba.groupwise import GroupExchange
from cleanba.placement import Hardware
from cleanba.preparation import Setup, prepare_run
from cleanba.reduction import Minibatches, make_learn
from cleanba.training import TrainState, Update


@dataclass(frozen=True)
class Args:
    """Hyperparameters (the paper's table 3) and, after them, hardware settings and logging."""

    env_id: str = "Breakout-v5"
    """EnvPool environment."""
    seed: int = 1
    """Seed of the run: environments, initial parameters, actions."""
    total_timesteps: int = 50_000_000
    """Agent steps over all environments (200M Atari frames)."""
    learning_rate: float = 6e-4
    """Learning rate of RMSProp."""
    anneal_lr: bool = True
    """Anneal the learning rate linearly to 0."""
    num_envs: int | None = None
    """Environments of the whole run, on any layout; 128 by default."""
    local_num_envs: int | None = None
    """Environments of each actor thread, so that the layout multiplies them (60 in the README)."""
    num_env_groups: int | None = None
    """Environment groups, the unit of computation; by default the largest divisor up to 8."""
    num_steps: int = 20
    """Steps of each environment in a rollout."""
    gamma: float = 0.99
    """Discount factor."""
    num_minibatches: int = 4
    """Minibatches of an update; each takes as many environments of every group."""
    rho_clip: float = 1.0
    """Clipping of the importance ratios in the V-trace targets (rho; that of c is 1, as in rlax)."""
    pg_rho_clip: float = 1.0
    """Clipping of the importance ratios in the policy gradient."""
    vtrace_lambda: float = 1.0
    """Mixing parameter of V-trace."""
    ent_coef: float = 0.01
    """Coefficient of the entropy."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    max_grad_norm: float = 40.0
    """Largest global norm of a gradient."""
    rmsprop_decay: float = 0.99
    """Decay of RMSProp."""
    rmsprop_eps: float = 0.01
    """Epsilon of RMSProp, outside the root."""
    concurrency: bool = True
    """Cleanba architecture: the actors are one policy behind. Synchronous without it."""
    network: Literal["auto", "resnet", "nature", "mlp"] = "auto"
    """Network: IMPALA ResNet, Nature CNN or MLP; auto takes the ResNet for images, else the MLP."""
    channels: tuple[int, ...] | None = None
    """Channels of the convolutional stages; by default the network's own."""
    hiddens: tuple[int, ...] | None = None
    """Widths of the dense layers; by default the network's own."""
    atari_preprocessing: Literal["machado", "gym"] = "machado"
    """Atari wrappers: those of the paper (after Machado et al., 2018), or gym's (appendix D)."""
    microbatch_size: int | None = None
    """Environments of a group in one call of the gradient function. Part of the arithmetic, not of the
    algorithm. By default up to 64 images on a CPU, else the group's whole part of a minibatch."""
    reduction: Literal["groups", "psum"] = "groups"
    """How gradients are added: by environment group, to the same bits on every layout, or by device
    and `lax.psum`, to other bits for other numbers of learner devices."""
    xla_cpu_pool_size: int = 8
    """Threads of XLA on a CPU, whatever its cores: convolutions and matrix products are split by it, so
    it is part of the arithmetic. The largest number of devices that a CPU can pretend to be."""
    hardware: Annotated[Hardware, tyro.conf.arg(name="")] = Hardware()
    run: Annotated[RunOptions, tyro.conf.arg(name="")] = RunOptions()


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
    dones = rollout.dones.astype(jnp.float32)
    discount_t = args.gamma * (1.0 - dones[1:])
    mask = 1.0 - dones[:-1]  # a step from a terminal observation only resets its environment
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
    )(v_tm1, v_t, rollout.rewards, discount_t, rho_tm1)
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
    return optimizer, learning_rate


def make_minibatches(args: Args, setup: Setup) -> tuple[Minibatches, Callable]:
    """Return how an update cuts rollouts up and learns from the parts, and the learning rate."""
    optimizer, learning_rate = make_optimizer(args, setup.num_updates)

    def take(rollout: GroupRollout, first: jax.Array, count: int) -> GroupRollout:
        """Take some environments of a group, with all their steps."""
        return jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, first, count, axis=1), rollout
        )

    def gradient(params: Any, part: GroupRollout, _: Any) -> tuple[Any, Losses]:
        def loss(params: Any) -> tuple[jax.Array, Losses]:
            length, num_envs = part.dones.shape
            obs = part.obs.reshape(length * num_envs, *part.obs.shape[2:])
            logits, values = setup.network.apply(params, obs)
            logits = logits.reshape(length, num_envs, -1)[:-1]
            losses = impala_loss(logits, values.reshape(length, num_envs), part, args)
            return losses.loss, losses

        return jax.grad(loss, has_aux=True)(params)

    def apply(
        params: Any, opt_state: Any, sums: tuple[Any, Losses]
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        grads, losses = sums
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = losses._asdict() | {"grad_norm": optax.global_norm(grads)}
        metrics["entropy"] = losses.entropy / jnp.maximum(metrics.pop("count"), 1)
        return optax.apply_updates(params, updates), opt_state, metrics

    minibatches = Minibatches(
        count=args.num_minibatches,
        size=setup.minibatch_size,
        microbatch_size=setup.microbatch_size,
        take=take,
        axis=1,
        gradient=gradient,
        apply=apply,
        loop=len(setup.spec.obs_shape) == 1,
    )
    return minibatches, learning_rate


def make_update(args: Args, setup: Setup, exchange: GroupExchange) -> Update:
    """Return the update: all minibatches of one rollout of every group."""
    minibatches, learning_rate = make_minibatches(args, setup)
    learn = make_learn(args.reduction, minibatches, exchange)

    def update(
        state: TrainState, rollouts: dict[int, GroupRollout], number: int
    ) -> tuple[TrainState, dict[str, Any]]:
        data = [rollouts[g] for g in setup.layout.local_groups]
        nothing = [()] * len(data)  # no loss of IMPALA depends on the rest of its minibatch
        params, opt_state, metrics = learn(*state, data, nothing)
        return TrainState(params, opt_state), metrics | {"learning_rate": learning_rate(number - 1)}

    return update


def main(args: Args) -> None:
    """Check the arguments, train, and keep what was asked for."""
    setup = prepare_run(
        args,
        name="cleanba_impala",
        default_num_envs=128,
        units_per_env=1,
        images_per_unit=args.num_steps + 1,
    )
    evaluate.announce_upload(args.run.upload_model)
    exchange = GroupExchange(setup.layout)
    params = training.initial_params(setup)
    optimizer, _ = make_optimizer(args, setup.num_updates)
    state = TrainState(params, jax.jit(optimizer.init)(params))
    update = make_update(args, setup, exchange)
    training.train(setup, state, make_act(setup.network), update, exchange)
    evaluate.show_model(setup)


if __name__ == "__main__":
    run_command_line(Args, main, "Cleanba IMPALA on EnvPool.")
