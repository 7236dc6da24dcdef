"""The options of a run, the schemes of the paper as presets of them, and their checks."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch

from baselines.torch_networks import choose_network, make_network
from baselines.worker_schemes import agents, sac
from baselines.worker_schemes.agents import Agent, Algorithm
from baselines.worker_schemes.schemes import AGENTS, SCHEMES, Link, Scheme
from cleanba.environments import EnvSpec, check_env_id, describe_env, make_envs
from cleanba.run.arguments import (
    Count,
    CountOrZero,
    Hyper,
    Nested,
    NotHyper,
    NotNegative,
    Positive,
    PositiveShare,
    Share,
    check_args,
)
from cleanba.run.command_line import BadInput, input_checks
from cleanba.run.options import RunId, RunOptions, check_run, run_id


@dataclass(frozen=True)
class Hardware:
    """Hardware settings."""

    ray_address: str | None = None
    """Ray cluster to run on, e.g. `auto`; by default one is started on this machine."""
    local_nodes: Count = 1
    """Ray nodes to start on this machine, to imitate a cluster."""
    cpus_per_worker: Positive = 1.0
    """Cores that Ray reserves for each worker."""


@dataclass(frozen=True)
class Args:
    """An agent, a scheme, and hardware settings.

    Hyperparameters are those of the paper's tables 1 and 2, but for SAC's environments (8, not 1).
    """

    env_id: NotHyper[str] = "Breakout-v5"
    """EnvPool environment."""
    seed: NotHyper[int] = 1
    """Seed of the run: environments, initial parameters, actions, minibatches."""
    agent: Hyper[Literal[AGENTS]] = "ppo"
    """PPO with GAE, IMPALA with V-trace, or SAC, which is for continuous actions."""
    scheme: Hyper[Literal[tuple(SCHEMES)]] = "single-threaded"
    """Numbers of workers and links by the name of the work that introduced them; each can be set below."""
    gradient_workers: Hyper[CountOrZero | None] = None
    """Workers that compute gradients; 0 for one in the process of the update worker."""
    collection_workers: Hyper[CountOrZero | None] = None
    """Workers that collect rollouts for each gradient worker; 0 for one in its process."""
    gradients: Hyper[Link | None] = None
    """Apply the mean gradient of all gradient workers, or each gradient as it arrives."""
    collection: Hyper[Link | None] = None
    """Wait for the rollouts of all collection workers, or use the first that is ready."""
    preemption_threshold: Hyper[PositiveShare | None] = None
    """Preemption threshold of DD-PPO: share of workers that must finish their rollouts before the others
    are told to end theirs early, after a quarter of their steps at least."""
    total_timesteps: Hyper[Count] = 10_000_000
    """Agent steps to learn from."""
    num_envs: Hyper[Count] = 8
    """Environments of each collection worker."""
    num_steps: Hyper[Count | None] = None
    """Steps of each environment in a rollout; by default 128 (PPO, SAC) or 20 (IMPALA)."""
    learning_rate: Hyper[Positive | None] = None
    """Learning rate; by default 2.5e-4 (PPO), 6e-4 (IMPALA) or 1e-3 (SAC's critics)."""
    optimizer_eps: Hyper[NotNegative | None] = None
    """Epsilon of the optimiser; by default 1e-5 (Adam of PPO) or 0.01 (RMSProp of IMPALA)."""
    anneal: Hyper[bool] = True
    """Anneal the learning rate, and PPO's clipping, linearly to 0; never SAC's."""
    gamma: Hyper[Share | None] = None
    """Discount factor; by default 0.99, of SAC 0.98."""
    max_grad_norm: Hyper[Positive | None] = None
    """Largest global norm of what is applied; by default 0.5 (PPO), 40 (IMPALA), none (SAC)."""
    ent_coef: Hyper[NotNegative] = 0.01
    """Coefficient of the entropy (PPO, IMPALA)."""
    vf_coef: Hyper[NotNegative | None] = None
    """Coefficient of the value loss; by default 1 (PPO) or 0.5 (IMPALA)."""
    gae_lambda: Hyper[Share] = 0.95
    """PPO: lambda of generalised advantage estimation."""
    clip_coef: Hyper[Positive] = 0.15
    """PPO: clipping of the probability ratio."""
    update_epochs: Hyper[Count] = 3
    """PPO: epochs over what was collected."""
    num_minibatches: Hyper[Count] = 4
    """PPO: minibatches of an epoch, each a gradient."""
    reward_clipping: Hyper[Literal["abs_one", "none"]] = "abs_one"
    """PPO, IMPALA: clip rewards to [-1, 1] for learning, or not."""
    policy_lr: Hyper[Positive] = 1e-4
    """SAC: learning rate of the policy."""
    alpha_lr: Hyper[Positive] = 1e-5
    """SAC: learning rate of the temperature."""
    initial_alpha: Hyper[Positive] = 0.2
    """SAC: first temperature."""
    polyak: Hyper[Share] = 0.995
    """SAC: share of themselves that target critics keep at each update."""
    replay_size: Hyper[Count] = 1_500_000
    """SAC: transitions that each gradient worker keeps."""
    batch_size: Hyper[Count] = 256
    """SAC: transitions in a batch."""
    priority_exponent: Hyper[NotNegative | None] = None
    """SAC: draw transitions in proportion to this power of their last errors; 0 draws evenly. By default 0.6
    with the scheme ape-x, else 0."""
    importance_exponent: Hyper[NotNegative] = 0.4
    """SAC: power of the weights that make up for uneven draws."""
    start_steps: Hyper[CountOrZero] = 10_000
    """SAC: steps before the first update, over all workers, with random actions; at least a batch."""
    num_updates: Hyper[Count] = 32
    """SAC: gradients after each rollout."""
    network: Hyper[Literal["auto", "resnet", "nature", "mlp"]] = "auto"
    """Network; auto takes the Nature CNN for images, else the MLP (of SAC with ReLU)."""
    hiddens: Hyper[tuple[Count, ...] | None] = None
    """Widths of the dense layers; by default the network's own, of SAC 256 and 256."""
    atari_preprocessing: Hyper[Literal["machado", "gym"]] = "machado"
    """Atari wrappers: those of the Cleanba paper (after Machado et al., 2018), or gym's."""
    hardware: Nested[Hardware] = Hardware()
    run: Nested[RunOptions] = RunOptions()


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


class Plan(NamedTuple):
    """A run that has been checked and may begin."""

    args: Args  # with the values chosen for those that were None
    scheme: Scheme
    run: RunId
    agent: Agent
    network: str


def choose_scheme(args: Args) -> Scheme:
    """Return the scheme of a name, with the values that other flags override."""
    given = {name: getattr(args, name) for name in Scheme._fields}
    chosen = {name: value for name, value in given.items() if value is not None}
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
    """Make a network whose initial parameters depend on a seed alone, in whichever process."""
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
    name = choose_network(args.network, spec, images="nature")
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
    algorithm = Algorithm(loss, make_optimizer, agents.no_target_networks)
    seeded = partial(make_seeded, make, args.seed)
    return Agent(seeded, agents.act_by_logits, make_storage, algorithm), name


@input_checks()
def prepare(args: Args) -> Plan:
    """Check everything that can be wrong with a run; nothing is written yet.

    Raises:
      BadInput: with one line.
      RecordError: if there is a record already and it may not be overwritten.
    """
    check_args(args)
    chosen = {k: v for k, v in DEFAULTS[args.agent].items() if getattr(args, k) is None}
    args = replace(args, **chosen)
    scheme = choose_scheme(args)
    threshold = scheme.preemption_threshold
    if threshold < 1 and "asynchronous" in (scheme.gradients, scheme.collection):
        raise BadInput(f"--preemption-threshold {threshold}: only for synchronous workers")
    if args.hardware.ray_address is not None and args.hardware.local_nodes > 1:
        raise BadInput("--local-nodes: starts a cluster on this machine, so not with --ray-address")
    if args.priority_exponent and args.agent != "sac":
        raise BadInput(
            f"--priority-exponent {args.priority_exponent}: of SAC's replay buffer; --agent {args.agent} "
            "has none"
        )
    batch = args.num_steps * args.num_envs
    if args.agent == "ppo" and args.num_minibatches > batch // 8:
        raise BadInput(
            f"--num-minibatches {args.num_minibatches}: too many for the {batch} steps of a rollout"
        )
    if args.total_timesteps < batch:
        raise BadInput(f"--total-timesteps {args.total_timesteps}: a rollout holds {batch} steps")
    system = f"schemes_{args.agent}-{args.scheme}"
    setting = f"g{scheme.gradient_workers}-c{scheme.collection_workers}"
    run = run_id(system, args.env_id, args.seed, args.run, setting)
    workers = max(scheme.gradient_workers, 1) * max(scheme.collection_workers, 1)
    check_run(run, workers * args.num_envs, overwrite=args.run.overwrite)
    agent, network = make_agent(args, scheme)
    return Plan(args, scheme, run, agent, network)
