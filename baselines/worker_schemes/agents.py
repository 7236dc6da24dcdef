"""Agents put together: the network, actor, storage and algorithm that a run's options name."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from baselines.torch_networks import choose_network, make_network
from baselines.worker_schemes import actors
from baselines.worker_schemes.algorithms.a2c import a2c_loss
from baselines.worker_schemes.algorithms.dqn import dqn_loss
from baselines.worker_schemes.algorithms.impala import vtrace_loss
from baselines.worker_schemes.algorithms.mpc import model_loss
from baselines.worker_schemes.algorithms.mpo import mpo_loss
from baselines.worker_schemes.algorithms.ppo import ppo_loss
from baselines.worker_schemes.algorithms.r2d2 import r2d2_loss
from baselines.worker_schemes.algorithms.sac import sac_loss
from baselines.worker_schemes.algorithms.td3 import td3_loss
from baselines.worker_schemes.control import (
    ActionBounds,
    DeterministicNetwork,
    GaussianNetwork,
    SACNetwork,
)
from baselines.worker_schemes.dynamics import DynamicsEnsemble
from baselines.worker_schemes.goals import GOALS, goal_task, hindsight_transitions
from baselines.worker_schemes.on_policy import GAEStorage, VTraceStorage
from baselines.worker_schemes.optimizers import make_actor_critic_adam, make_adam, make_rmsprop
from baselines.worker_schemes.parts import Agent, Algorithm, Storage
from baselines.worker_schemes.q_networks import DQNNetwork, QNetwork, RecurrentQNetwork
from baselines.worker_schemes.replay import ReplayStorage, Transitions, n_step_transitions
from baselines.worker_schemes.schemes import ALGORITHMS
from baselines.worker_schemes.sequences import Sequences, cut_sequences
from baselines.worker_schemes.targets import move_targets, move_targets_every, no_target_networks
from cleanba.environments import check_env_id, describe_env, make_envs

if TYPE_CHECKING:
    from baselines.worker_schemes.options import Args

# Widths of the dense layers of a network of action values: those of Mnih et al. (2015), of IMPALA's large
# network, and of CleanRL's dqn.py.
Q_HIDDENS = {"nature": (512,), "resnet": (256,), "mlp": (120, 84)}


class Control(NamedTuple):
    """An environment with continuous actions."""

    obs_size: int
    bounds: ActionBounds
    goal_size: int  # 0 if it has no goals


def describe_control(agent: str, env_id: str, preprocessing: str) -> Control:
    """Return the sizes and action bounds of an environment with continuous actions.

    Raises:
      ValueError: if it is unknown, or of another kind.
    """
    check_env_id(env_id)
    envs = make_envs(env_id, [0], preprocessing=preprocessing)
    actions, observations = envs.action_space, envs.observation_space
    has_goals = isinstance(observations, Mapping) and set(GOALS) <= set(observations)
    if hasattr(actions, "n") or (getattr(observations, "shape", None) is None and not has_goals):
        raise ValueError(f"--agent {agent}: {env_id} needs to have continuous actions")
    bounds = ActionBounds(tuple(actions.low.tolist()), tuple(actions.high.tolist()))
    if not np.isfinite([*bounds.low, *bounds.high]).all():
        raise ValueError(f"--agent {agent}: the actions of {env_id} have no bounds")
    if not has_goals:
        return Control(int(np.prod(observations.shape)), bounds, 0)
    sizes = {name: int(np.prod(space.shape)) for name, space in observations.items()}
    return Control(sum(sizes.values()), bounds, sizes["desired_goal"])


def make_seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make a network whose initial parameters depend on a seed alone, in whichever process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def make_agent(args: "Args", num_gradient_workers: int) -> tuple[Agent, str]:
    """Return the parts of an agent, and the name of its network.

    Args:
      args: with all values chosen.
      num_gradient_workers: of the run.

    Raises:
      ValueError: with one line, if something does not fit the environment.
    """
    continuous = ALGORITHMS[args.agent].continuous
    if continuous:
        control = describe_control(args.agent, args.env_id, args.atari_preprocessing)
        make, algorithm, network = _control(args, control)
    else:
        control = None
        values = args.agent in ("dqn", "rainbow", "r2d2")
        make, algorithm, network = (_values if values else _actor_critic)(args)
    agent = Agent(
        partial(make_seeded, make, args.seed),
        _actor(args),
        _storage(args, control, num_gradient_workers),
        algorithm,
        state_size=_state_size(args, control),
        overlap=args.burn_in if args.agent == "r2d2" else 0,
    )
    return agent, network


def _state_size(args: "Args", control: Control | None) -> int:
    if args.agent == "r2d2":
        return 2 * args.lstm_width
    return args.horizon * len(control.bounds.low) if args.agent == "mpc" else 0


def _actor_critic(args: "Args") -> tuple[Callable[[], nn.Module], Algorithm, str]:
    spec = describe_env(args.env_id, args.atari_preprocessing)
    name = choose_network(args.network, spec, images="nature")
    make = partial(make_network, name, spec.obs_shape, spec.num_actions, hiddens=args.hiddens)
    coefficients = {"ent_coef": args.ent_coef, "vf_coef": args.vf_coef}
    optimizer = {"learning_rate": args.learning_rate, "eps": args.optimizer_eps}
    clip_rewards = args.reward_clipping == "abs_one"
    if args.agent == "ppo":
        loss = partial(ppo_loss, clip_coef=args.clip_coef, **coefficients)
        make_optimizer = partial(make_adam, **optimizer)
    elif args.agent == "a2c":
        loss = partial(a2c_loss, **coefficients)
        make_optimizer = partial(make_rmsprop, **optimizer)
    else:
        loss = partial(vtrace_loss, gamma=args.gamma, clip_rewards=clip_rewards, **coefficients)
        make_optimizer = partial(make_rmsprop, **optimizer)
    return make, Algorithm(loss, make_optimizer, no_target_networks), name


def _values(args: "Args") -> tuple[Callable[[], nn.Module], Algorithm, str]:
    spec = describe_env(args.env_id, args.atari_preprocessing)
    name = choose_network(args.network, spec, images="nature")
    hiddens = args.hiddens or Q_HIDDENS[name]
    after_step = partial(move_targets_every, every=args.target_every)
    make_optimizer = partial(make_adam, learning_rate=args.learning_rate, eps=args.optimizer_eps)
    if args.agent == "r2d2":
        online = partial(
            RecurrentQNetwork, name, spec.obs_shape, spec.num_actions, hiddens, args.lstm_width
        )
        loss = partial(r2d2_loss, burn_in=args.burn_in)
        return partial(_with_target, online), Algorithm(loss, make_optimizer, after_step), name
    support = np.linspace(*args.value_range, args.num_atoms) if args.num_atoms > 1 else [0.0]
    online = partial(
        QNetwork,
        name,
        spec.obs_shape,
        spec.num_actions,
        hiddens,
        dueling=args.dueling,
        noisy=args.actor == "noisy",
        support=tuple(float(atom) for atom in support),
    )
    loss = partial(dqn_loss, double=args.double)
    return partial(_with_target, online), Algorithm(loss, make_optimizer, after_step), name


def _with_target(make_online: Callable[[], QNetwork | RecurrentQNetwork]) -> DQNNetwork:
    return DQNNetwork(make_online())


def _control(args: "Args", control: Control) -> tuple[Callable[[], nn.Module], Algorithm, str]:
    if args.network not in ("auto", "mlp"):
        raise ValueError(f"--network {args.network}: --agent {args.agent} has an mlp")
    size, bounds, hiddens = control.obs_size, control.bounds, args.hiddens
    if args.agent == "mpc":
        make_optimizer = partial(
            make_adam, learning_rate=args.learning_rate, eps=args.optimizer_eps
        )
        make = partial(DynamicsEnsemble, size, bounds, hiddens, args.members)
        return make, Algorithm(model_loss, make_optimizer, no_target_networks), "mlp"
    optimizer = {
        "critic_lr": args.learning_rate,
        "policy_lr": args.policy_lr,
        "eps": args.optimizer_eps,
    }
    if args.agent == "mpo":
        loss = partial(
            mpo_loss,
            epsilon=args.mpo_epsilon,
            epsilon_mean=args.mpo_epsilon_mean,
            epsilon_std=args.mpo_epsilon_std,
        )
        make_optimizer = partial(make_actor_critic_adam, alpha_lr=args.alpha_lr, **optimizer)
        after_step = partial(move_targets_every, every=args.target_every)
        make = partial(GaussianNetwork, size, bounds, hiddens)
        return make, Algorithm(loss, make_optimizer, after_step), "mlp"
    if args.agent == "sac":
        make_optimizer = partial(make_actor_critic_adam, alpha_lr=args.alpha_lr, **optimizer)
        make = partial(SACNetwork, size, bounds, hiddens, args.initial_alpha)
        return (
            make,
            Algorithm(sac_loss, make_optimizer, partial(move_targets, polyak=args.polyak)),
            "mlp",
        )
    twins = args.agent == "td3"
    make = partial(DeterministicNetwork, size, bounds, hiddens, 2 if twins else 1)
    every = args.policy_every if twins else 1
    algorithm = Algorithm(
        partial(
            td3_loss,
            target_noise=args.target_noise if twins else 0.0,
            noise_clip=args.noise_clip,
            policy_every=every,
        ),
        partial(make_actor_critic_adam, **optimizer),
        partial(move_targets_every, every=every, polyak=args.polyak),
    )
    return make, algorithm, "mlp"


def _actor(args: "Args") -> Callable[..., Any]:
    if args.actor == "epsilon-greedy":
        steps = args.exploration_share * args.total_timesteps
        return partial(
            actors.act_with_annealed_epsilon, last_epsilon=args.last_epsilon, anneal_steps=steps
        )
    if args.actor == "gaussian":
        return partial(actors.act_with_gaussian_noise, action_noise=args.action_noise)
    if args.actor == "cem":
        return partial(
            actors.act_by_planning, plans=args.plans, elites=args.elites, iterations=args.iterations
        )
    return {
        "softmax": actors.act_by_logits,
        "ape-x": actors.act_with_own_epsilons,
        "noisy": actors.act_with_noisy_layers,
        "squashed-gaussian": actors.act_by_sampling,
        "clipped-gaussian": actors.act_by_sampling,
    }[args.actor]


def _storage(
    args: "Args", control: Control | None, num_gradient_workers: int
) -> Callable[[int], Storage]:
    clip_rewards = args.reward_clipping == "abs_one"
    if args.storage == "v-trace":
        return VTraceStorage
    if args.storage in ("gae", "returns"):
        return partial(
            GAEStorage,
            gamma=args.gamma,
            gae_lambda=args.gae_lambda if args.storage == "gae" else 1.0,
            num_epochs=args.update_epochs,
            num_minibatches=args.num_minibatches,
            clip_rewards=clip_rewards,
        )
    make_batch, length, copies = Transitions, 1, 1
    if args.agent == "r2d2":
        make_batch, length = Sequences, args.unroll
        cut = partial(
            cut_sequences, burn_in=args.burn_in, unroll=args.unroll, n=args.n_step, gamma=args.gamma
        )
    elif args.storage == "her":
        task = goal_task(args.env_id)
        if task is None or not control.goal_size:
            raise ValueError(f"--storage her: {args.env_id} has no sparse rewards for goals")
        copies += args.hindsight_goals
        cut = partial(
            hindsight_transitions,
            task=task,
            size=control.goal_size,
            copies=args.hindsight_goals,
            gamma=args.gamma,
        )
    else:
        cut = partial(n_step_transitions, n=args.n_step, gamma=args.gamma)
    draws = {"mpo": args.action_samples, "mpc": args.members, "sac": 2, "td3": 2, "ddpg": 2}
    return partial(
        ReplayStorage,
        cut=cut,
        make_batch=make_batch,
        num_draws=draws.get(args.agent, 0),
        capacity=max(args.replay_size // length, 1),
        first=max(args.start_steps * copies // (num_gradient_workers * length), args.batch_size),
        batch_size=args.batch_size,
        num_updates=args.num_updates,
        clip_rewards=clip_rewards and control is None and args.agent != "r2d2",
        priority_exponent=args.priority_exponent if args.storage == "per" else 0.0,
        importance_exponent=args.importance_exponent,
        actor_priorities=args.first_priorities == "actors",
        ere_eta=args.ere_eta if args.storage == "ere" else 1.0,
    )
