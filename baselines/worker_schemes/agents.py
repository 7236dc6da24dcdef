"""Agents put together: the network, actor, storage and algorithm that a run's options name."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from baselines.torch_networks import choose_network, make_network
from baselines.worker_schemes import actors
from baselines.worker_schemes.algorithms.a2c import a2c_loss
from baselines.worker_schemes.algorithms.dqn import dqn_loss
from baselines.worker_schemes.algorithms.impala import vtrace_loss
from baselines.worker_schemes.algorithms.ppo import ppo_loss
from baselines.worker_schemes.algorithms.sac import sac_loss
from baselines.worker_schemes.algorithms.td3 import td3_loss
from baselines.worker_schemes.control import ActionBounds, DeterministicNetwork, SACNetwork
from baselines.worker_schemes.on_policy import GAEStorage, VTraceStorage
from baselines.worker_schemes.optimizers import make_actor_critic_adam, make_adam, make_rmsprop
from baselines.worker_schemes.parts import Agent, Algorithm, Storage
from baselines.worker_schemes.q_networks import DQNNetwork, QNetwork
from baselines.worker_schemes.replay import ReplayStorage
from baselines.worker_schemes.schemes import ALGORITHMS
from baselines.worker_schemes.targets import move_targets, move_targets_every, no_target_networks
from cleanba.environments import EnvSpec, check_env_id, describe_env, make_envs

if TYPE_CHECKING:
    from baselines.worker_schemes.options import Args

# Widths of the dense layers of a network of action values: those of Mnih et al. (2015), of IMPALA's large
# network, and of CleanRL's dqn.py.
Q_HIDDENS = {"nature": (512,), "resnet": (256,), "mlp": (120, 84)}


def describe_control(agent: str, env_id: str, preprocessing: str) -> tuple[EnvSpec, ActionBounds]:
    """Return shapes and action bounds of an environment with continuous actions.

    Raises:
      ValueError: if it is unknown, or of another kind.
    """
    check_env_id(env_id)
    envs = make_envs(env_id, [0], preprocessing=preprocessing)
    actions, observations = envs.action_space, envs.observation_space
    if hasattr(actions, "n") or not hasattr(observations, "shape"):
        raise ValueError(f"--agent {agent}: {env_id} needs to have continuous actions")
    bounds = ActionBounds(tuple(actions.low.tolist()), tuple(actions.high.tolist()))
    if not np.isfinite([*bounds.low, *bounds.high]).all():
        raise ValueError(f"--agent {agent}: the actions of {env_id} have no bounds")
    steps = int(envs.spec.config.max_episode_steps)
    shape = tuple(observations.shape)
    return EnvSpec(env_id, shape, np.dtype(np.float32), len(bounds.low), False, steps), bounds


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
    if ALGORITHMS[args.agent].continuous:
        make, algorithm, network = _control(args)
    elif args.agent in ("dqn", "rainbow"):
        make, algorithm, network = _values(args)
    else:
        make, algorithm, network = _actor_critic(args)
    agent = Agent(
        partial(make_seeded, make, args.seed),
        _actor(args),
        _storage(args, num_gradient_workers),
        algorithm,
    )
    return agent, network


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
    support = np.linspace(*args.value_range, args.num_atoms) if args.num_atoms > 1 else [0.0]
    online = partial(
        QNetwork,
        name,
        spec.obs_shape,
        spec.num_actions,
        args.hiddens or Q_HIDDENS[name],
        dueling=args.dueling,
        noisy=args.actor == "noisy",
        support=tuple(float(atom) for atom in support),
    )
    algorithm = Algorithm(
        partial(dqn_loss, double=args.double),
        partial(make_adam, learning_rate=args.learning_rate, eps=args.optimizer_eps),
        partial(move_targets_every, every=args.target_every),
    )
    return partial(_with_target, online), algorithm, name


def _with_target(make_online: Callable[[], QNetwork]) -> DQNNetwork:
    return DQNNetwork(make_online())


def _control(args: "Args") -> tuple[Callable[[], nn.Module], Algorithm, str]:
    spec, bounds = describe_control(args.agent, args.env_id, args.atari_preprocessing)
    if args.network not in ("auto", "mlp"):
        raise ValueError(f"--network {args.network}: --agent {args.agent} has an mlp")
    size, hiddens = int(np.prod(spec.obs_shape)), args.hiddens
    rates = {"critic_lr": args.learning_rate, "policy_lr": args.policy_lr}
    if args.agent == "sac":
        make = partial(SACNetwork, size, bounds, hiddens, args.initial_alpha)
        return (
            make,
            Algorithm(
                sac_loss,
                partial(make_actor_critic_adam, alpha_lr=args.alpha_lr, **rates),
                partial(move_targets, polyak=args.polyak),
            ),
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
        partial(make_actor_critic_adam, **rates),
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
    return {
        "softmax": actors.act_by_logits,
        "ape-x": actors.act_with_own_epsilons,
        "noisy": actors.act_with_noisy_layers,
        "squashed-gaussian": actors.act_by_squashed_gaussian,
    }[args.actor]


def _storage(args: "Args", num_gradient_workers: int) -> Callable[[int], Storage]:
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
    return partial(
        ReplayStorage,
        capacity=args.replay_size,
        first=max(args.start_steps // num_gradient_workers, args.batch_size),
        batch_size=args.batch_size,
        num_updates=args.num_updates,
        gamma=args.gamma,
        n_step=args.n_step,
        clip_rewards=clip_rewards and not ALGORITHMS[args.agent].continuous,
        priority_exponent=args.priority_exponent if args.storage == "per" else 0.0,
        importance_exponent=args.importance_exponent,
        actor_priorities=args.first_priorities == "actors",
        ere_eta=args.ere_eta if args.storage == "ere" else 1.0,
    )
