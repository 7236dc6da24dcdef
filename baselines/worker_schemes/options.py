"""The options of a run, and their checks; schemes.py has the presets of the paper."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from baselines.worker_schemes.agents import make_agent
from baselines.worker_schemes.parts import Agent
from baselines.worker_schemes.schemes import (
    ACTORS,
    AGENTS,
    ALGORITHMS,
    SCHEMES,
    STORAGES,
    Link,
    Scheme,
    choose_part,
)
from baselines.worker_schemes.workers import SMALLEST_SHARE
from cleanba.run.arguments import (
    LARGEST,
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

Finite = Annotated[float, Meta(ge=-LARGEST, le=LARGEST, description="a finite number")]


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

    Hyperparameters of PPO and SAC are those of the paper's tables 1 and 2, but for SAC's environments (8, not
    1); of the others, those of the works that introduced them.
    """

    env_id: NotHyper[str] = "Breakout-v5"
    """EnvPool environment."""
    seed: NotHyper[int] = 1
    """Seed of the run: environments, initial parameters, actions, minibatches."""
    agent: Hyper[Literal[AGENTS]] = "ppo"
    """Algorithm. DDPG, TD3, SAC, MPO and MPC are for continuous actions."""
    storage: Hyper[Literal[STORAGES] | None] = None
    """On-policy: advantages from GAE, from plain returns, or with V-trace. Off-policy: a replay buffer,
    sampled evenly, by priority (per), with an emphasis on recent experience (ere), or evenly with goals in
    hindsight (her). By default that of the algorithm; with the scheme ape-x, per."""
    actor: Hyper[Literal[ACTORS] | None] = None
    """How actions are chosen. By default as the algorithm does; with the scheme ape-x and action values, each
    environment has its own constant epsilon (ape-x). noisy puts noisy layers into the network; cem plans."""
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
    """Steps of each environment in a rollout; by default 128 (PPO, continuous actions), 40 (R2D2), 20
    (IMPALA), 16 (DQN, Rainbow) or 5 (A2C)."""
    learning_rate: Hyper[Positive | None] = None
    """Learning rate, with continuous actions of the critics; by default 2.5e-4 (PPO), 6e-4 (IMPALA), 7e-4
    (A2C), 1e-4 (DQN, R2D2, MPO), 6.25e-5 (Rainbow) or 1e-3 (DDPG, TD3, SAC; MPC's models)."""
    optimizer_eps: Hyper[NotNegative | None] = None
    """Epsilon of the optimizer; by default 1e-5 (Adam of PPO, RMSProp of A2C), 0.01 (RMSProp of IMPALA),
    1e-8 (Adam of DQN and of continuous actions), 1.5e-4 (Adam of Rainbow) or 1e-3 (Adam of R2D2)."""
    anneal: Hyper[bool] = True
    """Anneal the learning rate, and PPO's clipping, linearly to 0; never with a replay buffer."""
    gamma: Hyper[Share | None] = None
    """Discount factor; by default 0.99, of SAC 0.98, of R2D2 0.997."""
    max_grad_norm: Hyper[Positive | None] = None
    """Largest global norm of an applied gradient; by default 0.5 (PPO, A2C), 40 (IMPALA, MPO, R2D2) or, of
    the others, 1e9, which clips nothing."""
    ent_coef: Hyper[NotNegative] = 0.01
    """Coefficient of the entropy (PPO, IMPALA, A2C)."""
    vf_coef: Hyper[NotNegative | None] = None
    """Coefficient of the value loss; by default 1 (PPO) or 0.5 (IMPALA, A2C)."""
    gae_lambda: Hyper[Share] = 0.95
    """PPO, A2C: lambda of generalized advantage estimation."""
    clip_coef: Hyper[Positive] = 0.15
    """PPO: clipping of the probability ratio."""
    update_epochs: Hyper[Count | None] = None
    """PPO, A2C: epochs over what was collected; by default 3, of A2C 1."""
    num_minibatches: Hyper[Count | None] = None
    """PPO, A2C: minibatches of an epoch, each a gradient; by default 4, of A2C 1."""
    reward_clipping: Hyper[Literal["abs_one", "none"]] = "abs_one"
    """Clip rewards to [-1, 1] for learning, or not; never with continuous actions, and not of R2D2, which
    rescales values instead."""
    policy_lr: Hyper[Positive | None] = None
    """DDPG, TD3, SAC, MPO: learning rate of the policy; by default 1e-4, of TD3 1e-3."""
    alpha_lr: Hyper[Positive | None] = None
    """SAC, MPO: learning rate of the temperature and of MPO's multipliers; by default 1e-5, of MPO 1e-2."""
    initial_alpha: Hyper[Positive] = 0.2
    """SAC: first temperature."""
    polyak: Hyper[Share | None] = None
    """DDPG, TD3, SAC: share of themselves that targets keep as they move; by default 0.995, of DDPG 0.999."""
    action_noise: Hyper[NotNegative] = 0.1
    """DDPG, TD3: standard deviation of the noise in actions, in units of half their range."""
    target_noise: Hyper[NotNegative] = 0.2
    """TD3: standard deviation of the noise in target actions, in the same unit."""
    noise_clip: Hyper[NotNegative] = 0.5
    """TD3: largest noise in target actions, in the same unit."""
    policy_every: Hyper[Count] = 2
    """TD3: updates of the critics per update of the policy and the targets."""
    action_samples: Hyper[Count] = 20
    """MPO: actions that are drawn for each observation."""
    mpo_epsilon: Hyper[Positive] = 0.1
    """MPO: largest divergence of the reweighted actions from the policy, which sets the temperature."""
    mpo_epsilon_mean: Hyper[Positive] = 2.5e-3
    """MPO: largest divergence of each component by the change of its mean."""
    mpo_epsilon_std: Hyper[Positive] = 1e-6
    """MPO: largest divergence of each component by the change of its standard deviation."""
    members: Hyper[Count] = 5
    """MPC: models in the ensemble."""
    horizon: Hyper[Count] = 15
    """MPC: steps of a plan."""
    plans: Hyper[Count] = 200
    """MPC: plans that are tried in each iteration of the cross-entropy method."""
    elites: Hyper[Count] = 20
    """MPC: best plans, from which the next iteration is drawn; fewer than plans."""
    iterations: Hyper[Count] = 4
    """MPC: iterations of the cross-entropy method for each step."""
    double: Hyper[bool | None] = None
    """DQN: choose next actions by the online network; by default with the scheme ape-x and of Rainbow."""
    dueling: Hyper[bool | None] = None
    """DQN: streams for values and advantages; by default with the scheme ape-x and of Rainbow."""
    num_atoms: Hyper[Count | None] = None
    """DQN: atoms of the distributions of returns; 1 for expected returns. By default 1, of Rainbow 51."""
    value_range: Hyper[tuple[Finite, Finite]] = (-10.0, 10.0)
    """DQN: smallest and largest return of a distribution."""
    target_every: Hyper[Count | None] = None
    """DQN, R2D2, MPO: updates between two copies into the target networks; by default 250, of R2D2 2500, of
    MPO 100."""
    lstm_width: Hyper[Count] = 512
    """R2D2: width of the LSTM."""
    burn_in: Hyper[CountOrZero] = 40
    """R2D2: first steps of a sequence, which only bring the stored state up to date."""
    unroll: Hyper[Count] = 40
    """R2D2: steps of a sequence that are learned from; as many as a rollout has, or a divisor of them."""
    last_epsilon: Hyper[Share] = 0.01
    """--actor epsilon-greedy: epsilon after it was annealed from 1."""
    exploration_share: Hyper[PositiveShare] = 0.1
    """--actor epsilon-greedy: share of all steps in which epsilon is annealed."""
    n_step: Hyper[Count | None] = None
    """Replay buffers: most steps of a return; by default 1, of Rainbow and of DQN with the scheme ape-x 3, of
    R2D2 and MPO 5. With --storage her and of MPC always 1."""
    replay_size: Hyper[Count | None] = None
    """Replay buffers: transitions that each gradient worker keeps, hindsight's copies included; by default
    1,500,000 (SAC), 1,000,000 (DDPG, TD3, MPO, MPC) or 100,000 (DQN, Rainbow, R2D2)."""
    batch_size: Hyper[Count | None] = None
    """Replay buffers: transitions in a batch, of R2D2 sequences; by default 256 (SAC, MPO, MPC), 100
    (TD3), 64 (DDPG, R2D2) or 32 (DQN, Rainbow)."""
    priority_exponent: Hyper[NotNegative | None] = None
    """--storage per: transitions are drawn in proportion to this power of their last errors; by default 0.6,
    of Rainbow 0.5, of R2D2 0.9."""
    importance_exponent: Hyper[NotNegative | None] = None
    """--storage per: power of the weights that make up for uneven draws; by default 0.4, of R2D2 0.6."""
    first_priorities: Hyper[Literal["actors", "largest"] | None] = None
    """--storage per: priorities of new transitions: from the actors' action values, by default with the
    scheme ape-x and DQN or Rainbow, and of R2D2; otherwise the largest so far."""
    ere_eta: Hyper[PositiveShare] = 0.996
    """--storage ere: batch k of K is drawn from the newest eta^(1000 k / K) of the transitions."""
    hindsight_goals: Hyper[Count] = 4
    """--storage her: copies of each transition, with goals achieved later in its episode (k)."""
    start_steps: Hyper[CountOrZero] = 10_000
    """Replay buffers: steps before the first update, over all workers, with random actions if they are
    continuous; at least a batch."""
    num_updates: Hyper[Count] = 32
    """Replay buffers: gradients for each rollout."""
    network: Hyper[Literal["auto", "resnet", "nature", "mlp"]] = "auto"
    """Network; auto takes the Nature CNN for images, else an MLP."""
    hiddens: Hyper[tuple[Count, ...] | None] = None
    """Widths of the dense layers; by default the network's own; of SAC, TD3 and MPO 256 and 256, of DDPG
    400 and 300, of MPC's models 200 and 200, of an MLP of action values 120 and 84."""
    atari_preprocessing: Hyper[Literal["machado", "gym"]] = "machado"
    """Atari wrappers: those of the Cleanba paper (after Machado et al., 2018), or gym's."""
    hardware: Nested[Hardware] = Hardware()
    run: Nested[RunOptions] = RunOptions()


_ON_POLICY = {"gamma": 0.99, "update_epochs": 3, "num_minibatches": 4}
_REPLAY = {
    "max_grad_norm": 1e9, "vf_coef": 1.0, "update_epochs": 1, "num_minibatches": 1, "gamma": 0.99,
    "optimizer_eps": 1e-8, "n_step": 1, "priority_exponent": 0.6, "importance_exponent": 0.4,
}  # fmt: skip
_CONTROL = _REPLAY | {
    "num_steps": 128, "learning_rate": 1e-3, "policy_lr": 1e-4, "alpha_lr": 1e-5, "polyak": 0.995,
    "replay_size": 1_000_000, "batch_size": 256, "hiddens": (256, 256),
}  # fmt: skip
_VALUES = _REPLAY | {
    "num_steps": 16, "replay_size": 100_000, "batch_size": 32, "learning_rate": 1e-4, "target_every": 250,
    "double": False, "dueling": False, "num_atoms": 1,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "ppo": _ON_POLICY | {
        "num_steps": 128, "learning_rate": 2.5e-4, "optimizer_eps": 1e-5, "max_grad_norm": 0.5,
        "vf_coef": 1.0,
    },
    "impala": _ON_POLICY | {
        "num_steps": 20, "learning_rate": 6e-4, "optimizer_eps": 0.01, "max_grad_norm": 40.0, "vf_coef": 0.5,
    },
    "a2c": _ON_POLICY | {
        "num_steps": 5, "learning_rate": 7e-4, "optimizer_eps": 1e-5, "max_grad_norm": 0.5, "vf_coef": 0.5,
        "update_epochs": 1, "num_minibatches": 1,
    },
    "dqn": _VALUES,
    "rainbow": _VALUES | {
        "learning_rate": 6.25e-5, "optimizer_eps": 1.5e-4, "double": True, "dueling": True, "num_atoms": 51,
        "n_step": 3, "priority_exponent": 0.5,
    },
    "r2d2": _VALUES | {
        "num_steps": 40, "optimizer_eps": 1e-3, "double": True, "dueling": True, "n_step": 5, "gamma": 0.997,
        "priority_exponent": 0.9, "importance_exponent": 0.6, "first_priorities": "actors", "batch_size": 64,
        "target_every": 2500, "max_grad_norm": 40.0,
    },
    "ddpg": _CONTROL | {"batch_size": 64, "polyak": 0.999, "hiddens": (400, 300)},
    "td3": _CONTROL | {"batch_size": 100, "policy_lr": 1e-3},
    "sac": _CONTROL | {"replay_size": 1_500_000, "gamma": 0.98},
    "mpo": _CONTROL | {
        "learning_rate": 1e-4, "alpha_lr": 1e-2, "n_step": 5, "target_every": 100, "max_grad_norm": 40.0,
    },
    "mpc": _CONTROL | {"hiddens": (200, 200)},
}  # fmt: skip
# Ape-X's DQN is double and dueling, with returns of three steps and priorities from the actors.
APE_X_DEFAULTS = {
    "dqn": {"double": True, "dueling": True, "n_step": 3, "first_priorities": "actors"},
}
# Least steps of a minibatch: some only reset an environment, and PPO normalizes over the others.
LEAST_STEPS = {"ppo": 8, "a2c": 2}
OF_PRIORITIES = ("priority_exponent", "importance_exponent", "first_priorities")


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
    return SCHEMES[args.scheme]._replace(**chosen)


def complete(args: Args) -> Args:
    """Return the options with a value for each that is None and concerns the agent.

    Raises:
      ValueError: with one line, if the parts of an agent do not fit each other.
    """
    agent = args.agent
    storage = choose_part(agent, "storage", args.storage, args.scheme)
    actor = choose_part(agent, "actor", args.actor, args.scheme)
    if storage != "per":
        for name in OF_PRIORITIES:
            if (value := getattr(args, name)) is not None:
                raise ValueError(f"--{name.replace('_', '-')} {value}: only with --storage per")
    values = {"first_priorities": "largest"} | DEFAULTS[agent]
    if args.scheme == "ape-x":
        values |= APE_X_DEFAULTS.get(agent, {})
    if (args.num_atoms or values.get("num_atoms", 1)) > 1:
        # Learners of distributions have divergences as priorities, on another scale than the actors' errors.
        values["first_priorities"] = "largest"
        if args.first_priorities == "actors":
            raise ValueError(
                "--first-priorities actors: only without a distribution (--num-atoms 1)"
            )
    if storage != "per":
        values = {name: value for name, value in values.items() if name not in OF_PRIORITIES}
    for flag, given in (("--storage her", storage == "her"), ("--agent mpc", agent == "mpc")):
        if given:
            values["n_step"] = 1
            if args.n_step not in (None, 1):
                raise ValueError(f"--n-step {args.n_step}: must be 1 with {flag}")
    if args.first_priorities == "actors" and ALGORITHMS[agent].continuous:
        raise ValueError(f"--first-priorities actors: --agent {agent} has no action values")
    chosen = {name: value for name, value in values.items() if getattr(args, name) is None}
    return replace(args, storage=storage, actor=actor, **chosen)


@input_checks()
def prepare(args: Args) -> Plan:
    """Check everything that can be wrong with a run; nothing is written yet.

    Raises:
      BadInput: with one line.
      RecordError: if there is a record already and it may not be overwritten.
    """
    check_args(args)
    args = complete(args)
    scheme = choose_scheme(args)
    threshold = scheme.preemption_threshold
    if threshold < 1 and "asynchronous" in (scheme.gradients, scheme.collection):
        raise BadInput(f"--preemption-threshold {threshold}: only for synchronous workers")
    if args.hardware.ray_address is not None and args.hardware.local_nodes > 1:
        raise BadInput("--local-nodes: starts a cluster on this machine, so not with --ray-address")
    batch = args.num_steps * args.num_envs
    shortest = batch if threshold == 1 else int(batch * SMALLEST_SHARE)
    if args.agent in LEAST_STEPS and args.num_minibatches > shortest // LEAST_STEPS[args.agent]:
        raise BadInput(
            f"--num-minibatches {args.num_minibatches}: too many for the {shortest} steps of the shortest "
            "rollout"
        )
    if (scheme.gradient_workers or scheme.collection_workers) and find_spec("ray") is None:
        raise BadInput(f"--scheme {args.scheme}: Ray is not installed (pip install .[ray])")
    if args.agent == "r2d2" and args.num_steps % args.unroll:
        raise BadInput(f"--num-steps {args.num_steps}: not a multiple of --unroll {args.unroll}")
    if args.elites > args.plans:
        raise BadInput(f"--elites {args.elites}: more than --plans {args.plans}")
    smallest, largest = args.value_range
    if smallest >= largest:
        raise BadInput(f"--value-range {smallest:g} {largest:g}: the first must be smaller")
    if args.total_timesteps < batch:
        raise BadInput(f"--total-timesteps {args.total_timesteps}: a rollout holds {batch} steps")
    system = f"schemes_{args.agent}-{args.scheme}"
    setting = f"g{scheme.gradient_workers}-c{scheme.collection_workers}"
    run = run_id(system, args.env_id, args.seed, args.run, setting)
    workers = max(scheme.gradient_workers, 1) * max(scheme.collection_workers, 1)
    check_run(run, workers * args.num_envs, overwrite=args.run.overwrite)
    agent, network = make_agent(args, max(scheme.gradient_workers, 1))
    return Plan(args, scheme, run, agent, network)
