"""The options of moolib's example, the presets of the Cleanba paper, and what is checked of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

import tyro

from baselines import run_log
from baselines.run_log import RunId
from cleanba.command_line import BadInput
from cleanba.environments import EnvSpec

# The hardware settings of the Cleanba paper (section 5 and appendix C).
PRESETS: Mapping[str, Mapping[str, int]] = {
    "base": {"num_peers": 1, "actor_batch_size": 128},  # 256 environments
    "workstation": {"num_peers": 8, "actor_batch_size": 16},  # 256 in all
    # moolib's instructions to scale: 2,048 environments, and the scores of appendix C with them
    "mistake": {"num_peers": 8, "actor_batch_size": 128},
}


@dataclass(frozen=True)
class Args:
    """Options of moolib's example, with its values."""

    env: Annotated[str, tyro.conf.arg(aliases=["--env-id"])] = "Breakout-v5"
    """EnvPool environment."""
    seed: int = 1
    """Seed of the environments, the initial parameters and the actions. It does not make a run
    reproducible: which policy acts when is decided by the machine."""
    total_steps: int = 50_000_000
    """Agent steps to learn from, over all peers."""
    preset: Literal["base", "workstation", "mistake", "none"] = "none"
    """Peers and environments of the Cleanba paper: 1 peer (base), 8 peers with as many environments in all
    (workstation), or 8 peers with as many each (mistake, its appendix C)."""
    num_peers: int = 1
    """Peers, each a process with its own environments and model."""
    num_actor_batches: int = 2
    """Batches of environments of a peer, stepped in turn."""
    actor_batch_size: int = 128
    """Environments in each of them."""
    num_actor_cpus: int = 10
    """Threads that step a batch of environments."""
    unroll_length: int = 20
    """Steps of an unroll."""
    batch_size: int = 32
    """Unrolls in a learning batch."""
    virtual_batch_size: int = 32
    """Unrolls, over all peers, from which on the optimisers step."""
    learning_rate: float = 6e-4
    """Learning rate of Adam, annealed linearly to 0 by the steps that virtual batches of just that size
    would have; it ends above 0 where they come out larger, as in moolib."""
    adam_epsilon: float = 1e-8
    """Epsilon of Adam."""
    entropy_cost: float = 0.0006
    """Coefficient of the entropy."""
    baseline_cost: float = 0.5
    """Coefficient of the value loss."""
    discounting: float = 0.99
    """Discount factor."""
    grad_norm_clipping: float = 40.0
    """Largest global norm of a gradient."""
    reward_clip: float = 1.0
    """Rewards are clipped to this for learning; 0 leaves them."""
    network: Literal["auto", "resnet", "nature", "mlp"] = "auto"
    """Network: IMPALA ResNet (with fixup initialisation), Nature CNN or MLP; auto takes the ResNet for
    images, else the MLP."""
    atari_preprocessing: Literal["machado", "gym"] = "machado"
    """Atari wrappers: those of the Cleanba paper (after Machado et al., 2018), or gym's, which is moolib's
    default (appendix D)."""
    transport: Literal["torch", "moolib"] = "torch"
    """What moves gradients: torch.distributed (gloo, or nccl where each peer has a GPU), or the moolib
    library itself."""
    max_restarts: int = 0
    """How often a peer that was killed is started again, in all. The others go on without it."""
    checkpoint_interval: float = 600.0
    """Seconds of training between two checkpoints of the leader, each in place of the last."""
    checkpoint_history_interval: float = 3600.0
    """Seconds of training between two checkpoints that are kept."""
    disable_cuda: bool = False
    """Train on the CPU even if there is a GPU."""
    torch_threads: int | None = None
    """Threads of torch in each peer; by default several peers share the cores of their machine, and one
    takes torch's own choice."""
    setting: str | None = None
    """Name of the hardware setting; by default peers and environments."""
    study: str = "default"
    """Study that the run belongs to: its record is in <runs-dir>/<study>/."""
    runs_dir: str = "runs"
    """Folder of the run records."""
    overwrite: bool = False
    """Delete the record of an earlier run of the same name."""
    progress: bool = True
    """Print a line every few seconds."""


RANGES = {
    "counts": (
        "total_steps", "num_peers", "num_actor_batches", "actor_batch_size", "num_actor_cpus",
        "unroll_length", "batch_size", "virtual_batch_size", "torch_threads",
    ),
    "positive": (
        "learning_rate", "adam_epsilon", "grad_norm_clipping", "checkpoint_interval",
        "checkpoint_history_interval",
    ),
    "not_negative": ("max_restarts", "entropy_cost", "baseline_cost", "reward_clip"),
    "shares": ("discounting",),
}  # fmt: skip

# Hyperparameters are what may change what is learned: all but these.
HARDWARE = ("num_peers", "num_actor_cpus", "torch_threads", "transport")
NOT_HYPERPARAMETERS = {
    *HARDWARE, "preset", "max_restarts", "checkpoint_interval", "checkpoint_history_interval",
    "disable_cuda", "setting", "study", "runs_dir", "overwrite", "progress", "env", "seed",
}  # fmt: skip


class Torchrun(NamedTuple):
    """What torchrun says to each process that it starts."""

    rank: int
    world_size: int
    attempt: int  # how often it has started them all again
    resumes: bool  # an attempt before has begun the record


class Plan(NamedTuple):
    """A run that has been checked and may begin."""

    args: Args
    run: RunId
    spec: EnvSpec
    network: str


def prepare(args: Args, torchrun: Torchrun | None = None) -> Plan:
    """Check everything that can be wrong with a run; nothing is written yet.

    Args:
      args: the command line.
      torchrun: what has started this process, if it has: as many peers as it has processes.

    Raises:
      BadInput: with one line.
    """
    if args.transport == "moolib":
        try:
            import moolib  # noqa: F401
        except ImportError:
            raise BadInput(
                "--transport moolib: the moolib library is not installed (it is in no package "
                "registry: github.com/facebookresearch/moolib); --transport torch needs nothing more"
            ) from None
    args = replace(args, **PRESETS.get(args.preset, {}))
    if torchrun is not None:
        args = replace(args, num_peers=torchrun.world_size)
    try:
        run_log.check_options(args, RANGES)
    except ValueError as error:
        raise BadInput(str(error)) from None
    environments = args.num_peers * args.num_actor_batches * args.actor_batch_size
    setting = args.setting or f"peers{args.num_peers}-envs{environments}"
    run = RunId("moolib", setting, args.env, args.seed, args.study, args.runs_dir)
    try:
        spec = run_log.check_run(
            run,
            environments,
            overwrite=args.overwrite,
            preprocessing=args.atari_preprocessing,
            # by the first process of torchrun, or before it started them all again
            exists=torchrun is not None and (torchrun.rank > 0 or torchrun.resumes),
        )
        network = run_log.choose_network(args.network, spec)
    except ValueError as error:
        raise BadInput(str(error)) from None
    return Plan(args, run, spec, network)
