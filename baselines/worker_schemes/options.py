"""The options of a run, the schemes of the paper as choices of them, and what is checked."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch

from baselines import run_log
from baselines.run_log import RunId
from baselines.torch_networks import make_network
from baselines.worker_schemes import agents, sac
from baselines.worker_schemes.agents import Agent, Algorithm
from cleanba.command_line import BadInput
from cleanba.environments import EnvSpec, check_env_id, describe_env, make_envs

Link = Literal["synchronous", "asynchronous"]


class Scheme(NamedTuple):
    """How many workers there are, and how they wait for each other (figure 5 of the paper)."""

    gradient_workers: int  # 0: one, in the process of the update worker
    collection_workers: int  # of each gradient worker; 0: one, in its process
    gradients: Link
    collection: Link
    enough: float = 1.0  # share of workers that end their rollouts before the others are told to
    priority_exponent: float = 0.0  # of a replay buffer


SCHEMES: Mapping[str, Scheme] = {
    "single-threaded": Scheme(0, 0, "synchronous", "synchronous"),
    "dppo": Scheme(2, 0, "synchronous", "synchronous"),
    # of two workers; DD-PPO has 0.6, of many
    "ddppo": Scheme(2, 0, "synchronous", "synchronous", enough=0.5),
    "appo": Scheme(2, 0, "asynchronous", "synchronous"),
    "impala": Scheme(0, 2, "synchronous", "asynchronous"),
    "ape-x": Scheme(0, 2, "synchronous", "asynchronous", priority_exponent=0.6),
    "rapid": Scheme(2, 2, "synchronous", "asynchronous"),
    "async-rapid": Scheme(2, 2, "asynchronous", "asynchronous"),
}


@dataclass(frozen=True)
class Args:
    """An agent, a scheme, and hardware settings; hyperparameters as in the paper's tables 1 and 2."""

    env_id: str = "Breakout-v5"
    """EnvPool environment."""
    seed: int = 1
    """Seed of the run: environments, initial parameters, actions, minibatches."""
    agent: Literal["ppo", "impala", "sac"] = "ppo"
    """PPO with GAE, IMPALA with V-trace, or SAC, which is for continuous actions."""
    scheme: Literal[tuple(SCHEMES)] = "single-threaded"
    """Numbers of workers and links by the name of the work that introduced them; each can be set below."""
    gradient_workers: int | None = None
    """Workers that compute gradients; 0 for one in the process of the update worker."""
    collection_workers: int | None = None
    """Workers that collect rollouts for each gradient worker; 0 for one in its process."""
    gradients: Link | None = None
    """Apply the mean gradient of all gradient workers, or each gradient as it comes."""
    collection: Link | None = None
    """Wait for the rollouts of all collection workers, or go on with the first."""
    enough: float | None = None
    """Preemption threshold of DD-PPO: share of workers that are waited for while rollouts are collected;
    the others then end theirs, at a quarter of their length at least."""
    total_timesteps: int = 10_000_000
    """Agent steps to learn from."""
    num_envs: int = 8
    """Environments of each collection worker."""
    num_steps: int | None = None
    """Steps of each environment in a rollout; by default 128 (PPO, SAC) or 20 (IMPALA)."""
    learning_rate: float | None = None
    """Learning rate; by default 2.5e-4 (PPO), 6e-4 (IMPALA) or 1e-3 (SAC's critics)."""
    optimizer_eps: float | None = None
    """Epsilon of the optimiser; by default 1e-5 (Adam of PPO) or 0.01 (RMSProp of IMPALA)."""
    anneal: bool = True
    """Let the learning rate, and PPO's clipping, fall linearly to 0; never SAC's."""
    gamma: float | None = None
    """Discount factor; by default 0.99, of SAC 0.98."""
    max_grad_norm: float | None = None
    """Largest global norm of what is applied; by default 0.5 (PPO), 40 (IMPALA), none (SAC)."""
    ent_coef: float = 0.01
    """Coefficient of the entropy (PPO, IMPALA)."""
    vf_coef: float | None = None
    """Coefficient of the value loss; by default 1 (PPO) or 0.5 (IMPALA)."""
    gae_lambda: float = 0.95
    """PPO: lambda of generalised advantage estimation."""
    clip_coef: float = 0.15
    """PPO: clipping of the probability ratio."""
    update_epochs: int = 3
    """PPO: epochs over what was collected."""
    num_minibatches: int = 4
    """PPO: minibatches of an epoch, each a gradient."""
    reward_clipping: Literal["abs_one", "none"] = "abs_one"
    """PPO, IMPALA: clip rewards to [-1, 1] for learning, or not."""
    policy_lr: float = 1e-4
    """SAC: learning rate of the policy."""
    alpha_lr: float = 1e-5
    """SAC: learning rate of the temperature."""
    initial_alpha: float = 0.2
    """SAC: first temperature."""
    polyak: float = 0.995
    """SAC: share of themselves that target critics keep at each update."""
    replay_size: int = 1_500_000
    """SAC: transitions that each gradient worker keeps."""
    batch_size: int = 256
    """SAC: transitions in a batch."""
    priority_exponent: float | None = None
    """SAC: draw transitions in proportion to this power of their last errors; 0 draws evenly. By default 0.6
    with the scheme ape-x, else 0."""
    importance_exponent: float = 0.4
    """SAC: power of the weights that make up for uneven draws."""
    start_steps: int = 10_000
    """SAC: steps before the first update, over all workers, with random actions; at least a batch."""
    num_updates: int = 32
    """SAC: gradients after each rollout."""
    network: Literal["auto", "resnet", "nature", "mlp"] = "auto"
    """Network; auto takes the Nature CNN for images, else the MLP (of SAC with ReLU)."""
    hiddens: tuple[int, ...] | None = None
    """Widths of the dense layers; by default the network's own, of SAC 256 and 256."""
    atari_preprocessing: Literal["machado", "gym"] = "machado"
    """Atari wrappers: those of the Cleanba paper (after Machado et al., 2018), or gym's."""
    ray_address: str | None = None
    """Ray cluster to run on, e.g. `auto`; by default one is started on this machine."""
    local_nodes: int = 1
    """Ray nodes to start on this machine, as if they were so many."""
    cpus_per_worker: float = 1.0
    """Cores that Ray reserves for each worker."""
    runs_dir: str = "runs"
    """Folder of the run records."""
    study: str = "default"
    """Study that the run belongs to: its record is in <runs-dir>/<study>/."""
    setting: str | None = None
    """Name of the hardware setting; by default the numbers of workers."""
    overwrite: bool = False
    """Delete the record of an earlier run of the same name."""
    progress: bool = True
    """Print a line of progress every few seconds."""


DEFAULTS = {
    "ppo": {
        "num_steps": 128, "learning_rate": 2.5e-4, "optimizer_eps": 1e-5, "gamma": 0.99,
        "max_grad_norm": 0.5, "vf_coef": 1.0,
    },
    "impala": {
        "num_steps": 20, "learning_rate": 6e-4, "optimizer_eps": 0.01, "gamma": 0.99,
        "max_grad_norm": 40.0, "vf_coef": 0.5,
    },
    "sac": {
        "num_steps": 128, "learning_rate": 1e-3, "optimizer_eps": 1e-8, "gamma": 0.98,
        "max_grad_norm": 1e9, "vf_coef": 1.0,
    },
}  # fmt: skip
RANGES = {
    "counts": (
        "total_timesteps", "num_envs", "num_steps", "update_epochs", "num_minibatches", "replay_size",
        "batch_size", "num_updates", "local_nodes",
    ),
    "positive": (
        "learning_rate", "max_grad_norm", "clip_coef", "policy_lr", "alpha_lr", "initial_alpha",
        "cpus_per_worker", "enough",
    ),
    "not_negative": (
        "optimizer_eps", "ent_coef", "vf_coef", "gradient_workers", "collection_workers", "start_steps",
        "priority_exponent", "importance_exponent",
    ),
    "shares": ("gamma", "gae_lambda", "polyak", "enough"),
}  # fmt: skip
HARDWARE = ("ray_address", "local_nodes", "cpus_per_worker")
NOT_HYPERPARAMETERS = {
    *HARDWARE, "runs_dir", "study", "setting", "overwrite", "progress", "env_id", "seed",
}  # fmt: skip


class Plan(NamedTuple):
    """A run that has been checked and may begin."""

    args: Args  # with what was chosen where they said None
    scheme: Scheme
    run: RunId
    agent: Agent
    network: str


def choose_scheme(args: Args) -> Scheme:
    """Return the scheme that was named, with what was set apart from it."""
    said = {name: getattr(args, name) for name in Scheme._fields}
    chosen = {name: value for name, value in said.items() if value is not None}
    scheme = SCHEMES[args.scheme]._replace(**chosen)
    # only SAC has a replay buffer
    return scheme if args.agent == "sac" else scheme._replace(priority_exponent=0.0)


def describe_control(env_id: str, preprocessing: str) -> tuple[EnvSpec, sac.ActionBounds]:
    """Return shapes and action bounds of an environment with continuous actions.

    Raises:
      ValueError: if it is unknown, or of another kind.
    """
    check_env_id(env_id)
    envs = make_envs(env_id, [0], preprocessing=preprocessing)
    actions, observations = envs.action_space, envs.observation_space
    if hasattr(actions, "n") or not hasattr(observations, "shape"):
        raise ValueError(f"--agent sac: {env_id} needs to have continuous actions")
    bounds = sac.ActionBounds(tuple(actions.low.tolist()), tuple(actions.high.tolist()))
    if not np.isfinite([*bounds.low, *bounds.high]).all():
        raise ValueError(f"--agent sac: the actions of {env_id} have no bounds")
    steps = int(envs.spec.config.max_episode_steps)
    shape = tuple(observations.shape)
    return EnvSpec(env_id, shape, np.dtype(np.float32), len(bounds.low), False, steps), bounds


def make_seeded(make: partial, seed: int) -> torch.nn.Module:
    """Make a network whose initial parameters are those of a seed, wherever it is made."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def make_agent(args: Args, scheme: Scheme) -> tuple[Agent, str]:
    """Return the parts of an agent, and the name of its network.

    Raises:
      ValueError: with one line, if something does not fit the environment.
    """
    if args.agent == "sac":
        spec, bounds = describe_control(args.env_id, args.atari_preprocessing)
        if args.network not in ("auto", "mlp"):
            raise ValueError(f"--network {args.network}: SAC has an mlp")
        size, hiddens = int(np.prod(spec.obs_shape)), args.hiddens or (256, 256)
        make = partial(sac.SACNetwork, size, bounds, hiddens, args.initial_alpha)
        workers = max(scheme.gradient_workers, 1)
        agent = Agent(
            partial(make_seeded, make, args.seed),
            sac.act,
            partial(
                sac.ReplayStorage,
                capacity=args.replay_size,
                first=max(args.start_steps // workers, args.batch_size),
                batch_size=args.batch_size,
                num_updates=args.num_updates,
                priority_exponent=scheme.priority_exponent,
                importance_exponent=args.importance_exponent,
            ),
            Algorithm(
                partial(sac.sac_loss, gamma=args.gamma),
                partial(
                    sac.make_optimizer,
                    policy_lr=args.policy_lr,
                    critic_lr=args.learning_rate,
                    alpha_lr=args.alpha_lr,
                ),
                partial(sac.move_targets, polyak=args.polyak),
            ),
        )
        return agent, "mlp"
    spec = describe_env(args.env_id, args.atari_preprocessing)
    images = len(spec.obs_shape) == 3
    name = "nature" if args.network == "auto" and images else args.network
    name = run_log.choose_network(name, spec)
    make = partial(make_network, name, spec.obs_shape, spec.num_actions, hiddens=args.hiddens)
    clip_rewards = args.reward_clipping == "abs_one"
    coefficients = {"ent_coef": args.ent_coef, "vf_coef": args.vf_coef}
    optimizer = {"learning_rate": args.learning_rate, "eps": args.optimizer_eps}
    if args.agent == "ppo":
        make_storage = partial(
            agents.GAEStorage,
            gamma=args.gamma,
            gae_lambda=args.gae_lambda,
            num_epochs=args.update_epochs,
            num_minibatches=args.num_minibatches,
            clip_rewards=clip_rewards,
        )
        loss = partial(agents.ppo_loss, clip_coef=args.clip_coef, **coefficients)
        make_optimizer = partial(agents.make_adam, **optimizer)
    else:
        make_storage = agents.VTraceStorage
        loss = partial(
            agents.vtrace_loss, gamma=args.gamma, clip_rewards=clip_rewards, **coefficients
        )
        make_optimizer = partial(agents.make_rmsprop, **optimizer)
    algorithm = Algorithm(loss, make_optimizer, agents.nothing_follows)
    seeded = partial(make_seeded, make, args.seed)
    return Agent(seeded, agents.act_by_logits, make_storage, algorithm), name


def prepare(args: Args) -> Plan:
    """Check everything that can be wrong with a run; nothing is written yet.

    Raises:
      BadInput: with one line.
    """
    try:
        run_log.check_options(args, RANGES)
    except ValueError as error:
        raise BadInput(str(error)) from None
    chosen = {k: v for k, v in DEFAULTS[args.agent].items() if getattr(args, k) is None}
    args = replace(args, **chosen)
    scheme = choose_scheme(args)
    try:
        if scheme.enough < 1 and "asynchronous" in (scheme.gradients, scheme.collection):
            raise ValueError(f"--enough {scheme.enough}: only synchronous workers are waited for")
        if args.ray_address is not None and args.local_nodes > 1:
            raise ValueError("--local-nodes: for a cluster on this machine, not with --ray-address")
        if args.priority_exponent and args.agent != "sac":
            raise ValueError(
                f"--priority-exponent {args.priority_exponent}: of SAC's replay buffer; --agent {args.agent} "
                "has none"
            )
        batch = args.num_steps * args.num_envs
        if args.agent == "ppo" and args.num_minibatches > batch // 8:
            raise ValueError(
                f"--num-minibatches {args.num_minibatches}: too many for the {batch} steps of a rollout"
            )
        if args.total_timesteps < batch:
            raise ValueError(
                f"--total-timesteps {args.total_timesteps}: a rollout holds {batch} steps"
            )
        system = f"schemes_{args.agent}-{args.scheme}"
        setting = args.setting or f"g{scheme.gradient_workers}-c{scheme.collection_workers}"
        run = RunId(system, setting, args.env_id, args.seed, args.study, args.runs_dir)
        everyone = max(scheme.gradient_workers, 1) * max(scheme.collection_workers, 1)
        run_log.check_new(run, everyone * args.num_envs, overwrite=args.overwrite)
        agent, network = make_agent(args, scheme)
    except ValueError as error:
        raise BadInput(str(error)) from None
    return Plan(args, scheme, run, agent, network)
