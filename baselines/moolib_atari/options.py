"""The options of moolib's example, the presets of the Cleanba paper, and their checks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

import tyro

from baselines.torch_networks import choose_network
from cleanba.environments import EnvSpec, describe_env
from cleanba.run.arguments import (
    Count,
    CountOrZero,
    Hyper,
    Nested,
    NotHyper,
    NotNegative,
    Positive,
    Share,
    check_args,
)
from cleanba.run.command_line import BadInput, input_checks
from cleanba.run.options import RunId, RunOptions, check_run, run_id

# The hardware settings of the Cleanba paper (section 5 and appendix C).
PRESETS: Mapping[str, Mapping[str, int]] = {
    "base": {"num_peers": 1, "actor_batch_size": 128},  # 256 environments
    "workstation": {"num_peers": 8, "actor_batch_size": 16},  # 256 in all
    # moolib's instructions to scale: 2,048 environments, and the scores of appendix C with them
    "mistake": {"num_peers": 8, "actor_batch_size": 128},
}


@dataclass(frozen=True)
class Hardware:
    """Hardware settings."""

    num_peers: Count = 1
    """Peers, each a process with its own environments and model."""
    num_actor_cpus: Count = 10
    """Threads that step a batch of environments."""
    transport: Literal["torch", "moolib"] = "torch"
    """Library that exchanges gradients: torch.distributed (gloo, or nccl if each peer has a GPU), or
    moolib itself."""
    torch_threads: Count | None = None
    """Threads of torch in each peer; by default several peers share the cores of their machine, and one
    takes torch's own choice."""
    disable_cuda: bool = False
    """Train on the CPU even if there is a GPU."""


@dataclass(frozen=True)
class Recovery:
    """Restarts of killed peers, and checkpoints."""

    max_restarts: CountOrZero = 0
    """Killed peers that are restarted, in all. The others continue meanwhile."""
    checkpoint_interval: Positive = 600.0
    """Seconds of training between two checkpoints of the leader, each of which replaces the last."""
    checkpoint_history_interval: Positive = 3600.0
    """Seconds of training between two checkpoints that are kept."""
    peer_timeout: Positive = 2.0
    """With --transport moolib: seconds without a ping after which a peer counts as lost (moolib's default
    is 10). Must exceed the time of a gradient. Without moolib, a lost peer is detected by its closed
    connection."""


@dataclass(frozen=True)
class Args:
    """Options of moolib's example, with its values."""

    env: Annotated[NotHyper[str], tyro.conf.arg(aliases=["--env-id"])] = "Breakout-v5"
    """EnvPool environment."""
    seed: NotHyper[int] = 1
    """Seed of the environments, the initial parameters and the actions. With several peers it does not make
    a run reproducible: timing decides which policy acts when."""
    total_steps: Hyper[Count] = 50_000_000
    """Agent steps to learn from, over all peers."""
    preset: NotHyper[Literal["base", "workstation", "mistake", "none"]] = "none"
    """Peers and environments of the Cleanba paper: 1 peer (base), 8 peers with as many environments in all
    (workstation), or 8 peers with as many each (mistake, its appendix C)."""
    num_actor_batches: Hyper[Count] = 2
    """Batches of environments of a peer, stepped in turn."""
    actor_batch_size: Hyper[Count] = 128
    """Environments in each of them."""
    unroll_length: Hyper[Count] = 20
    """Steps of an unroll."""
    batch_size: Hyper[Count] = 32
    """Unrolls in a learning batch."""
    virtual_batch_size: Hyper[Count] = 32
    """Unrolls, over all peers, after which the optimizers step."""
    learning_rate: Hyper[Positive] = 6e-4
    """Learning rate of Adam, annealed linearly to 0 over the steps of virtual batches of exactly that
    size; if they come out larger, it ends above 0, as in moolib."""
    adam_epsilon: Hyper[Positive] = 1e-8
    """Epsilon of Adam."""
    entropy_cost: Hyper[NotNegative] = 0.0006
    """Coefficient of the entropy."""
    baseline_cost: Hyper[NotNegative] = 0.5
    """Coefficient of the value loss."""
    discounting: Hyper[Share] = 0.99
    """Discount factor."""
    grad_norm_clipping: Hyper[Positive] = 40.0
    """Largest global norm of a gradient."""
    reward_clip: Hyper[NotNegative] = 1.0
    """Bound that rewards are clipped to for learning; 0 does not clip."""
    network: Hyper[Literal["auto", "resnet", "nature", "mlp"]] = "auto"
    """Network: IMPALA ResNet (with fixup initialization), Nature CNN or MLP; auto takes the ResNet for
    images, else the MLP."""
    atari_preprocessing: Hyper[Literal["machado", "gym"]] = "machado"
    """Atari wrappers: those of the Cleanba paper (after Machado et al., 2018), or gym's, which do not
    press FIRE (appendix D)."""
    hardware: Nested[Hardware] = Hardware()
    recovery: Nested[Recovery] = Recovery()
    run: Nested[RunOptions] = RunOptions()


class Torchrun(NamedTuple):
    """What torchrun tells each process that it starts."""

    rank: int
    world_size: int
    attempt: int  # number of times that it has restarted all processes
    resumes: bool  # an earlier attempt has begun the record
    one_machine: bool  # all processes are on this machine


class Plan(NamedTuple):
    """A run that has been checked and may begin."""

    args: Args
    run: RunId
    spec: EnvSpec
    network: str


@input_checks()
def prepare(args: Args, torchrun: Torchrun | None = None) -> Plan:
    """Check everything that can be wrong with a run; nothing is written yet.

    Args:
      args: the command line.
      torchrun: of this process, if torchrun started it: then there are as many peers as processes.

    Raises:
      BadInput: with one line.
      RecordError: if there is a record already and it may not be overwritten.
    """
    check_args(args)
    if args.hardware.transport == "moolib":
        try:
            import moolib  # noqa: F401
        except ImportError:
            raise BadInput(
                "--transport moolib: the moolib library is not installed (it is in no package "
                "registry: github.com/facebookresearch/moolib); --transport torch needs nothing more"
            ) from None
        if torchrun is not None and not torchrun.one_machine:
            raise BadInput("--transport moolib: its broker serves the peers of one machine only")
    num_peers = args.hardware.num_peers
    if args.preset != "none":
        preset = PRESETS[args.preset]
        num_peers = preset["num_peers"]
        args = replace(args, actor_batch_size=preset["actor_batch_size"])
    if torchrun is not None:
        num_peers = torchrun.world_size
    args = replace(args, hardware=replace(args.hardware, num_peers=num_peers))
    environments = num_peers * args.num_actor_batches * args.actor_batch_size
    setting = f"peers{num_peers}-envs{environments}"
    run = run_id("moolib", args.env, args.seed, args.run, setting)
    # The first process of torchrun makes the record, or an earlier attempt has made it.
    new = torchrun is None or (torchrun.rank == 0 and not torchrun.resumes)
    check_run(run, environments, overwrite=args.run.overwrite, new=new)
    spec = describe_env(args.env, args.atari_preprocessing)
    return Plan(args, run, spec, choose_network(args.network, spec))
