"""Everything that is checked and decided about a run before it begins."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

from cleanba.compatibility import (
    advantage_chunks,
    depends_on_layout,
    overlapping_seeds,
    restores,
)
from cleanba.environments import EnvSpec, describe_env, env_seeds
from cleanba.exact import placement
from cleanba.exact.placement import Hardware, Placement
from cleanba.networks import check_fits, default_network, make_network
from cleanba.play import check_imageio
from cleanba.record import RecordError, check_idle, check_writable, checkpoints, read_run
from cleanba.record.actions import Shape
from cleanba.record.checkpoints import Checkpoint
from cleanba.run.arguments import check_args, hyperparameters
from cleanba.run.command_line import input_checks
from cleanba.run.log import versions
from cleanba.run.options import (
    CheckpointOptions,
    LogOptions,
    ModelOptions,
    ResumeOptions,
    RunId,
    RunOptions,
    TrackingOptions,
    check_run,
    checkpoint_interval,
    run_id,
)

# Most images that one call of a gradient function takes on a CPU: XLA computes convolution gradients
# fastest in batches of 16 to 64 images there (`make bench`).
CPU_IMAGES_PER_GRADIENT = 64

# Recorded, and the same for a run and its resumption.
PACKAGES = ("jax", "jaxlib", "flax", "optax", "rlax", "envpool", "numpy")


class CommonArgs(Protocol):
    """The hyperparameters and options that every trainer's command line has."""

    env_id: str
    seed: int
    total_timesteps: int
    num_envs: int | None
    local_num_envs: int | None
    num_env_groups: int | None
    num_steps: int
    num_minibatches: int
    gradient_accumulation_steps: int
    concurrency: bool
    network: str
    channels: tuple[int, ...] | None
    hiddens: tuple[int, ...] | None
    atari_preprocessing: str
    microbatch_size: int | None
    reduction: str
    portable: bool
    compat: tuple[str, ...]
    hardware: Hardware
    run: RunOptions
    logging: LogOptions
    checkpoints: CheckpointOptions
    resuming: ResumeOptions
    tracking: TrackingOptions
    model: ModelOptions


class Setup(NamedTuple):
    """A run that has been checked and may begin."""

    name: str  # of the trainer
    run: RunId
    args: CommonArgs  # the trainer's command line
    hyperparameters: dict[str, Any]  # as recorded: with the values chosen for those that are None
    spec: EnvSpec
    network: Any
    placement: Placement
    num_envs: int
    env_seeds: list[int]  # of all environments of the run
    num_updates: int
    minibatch_size: int  # units (transitions or environments) that a group has in a minibatch
    microbatch_size: int  # units in one call of the gradient function
    checkpoint: Checkpoint | None  # to resume from

    @property
    def directory(self) -> Path:
        """Folder of the record."""
        return self.run.directory

    @property
    def group_size(self) -> int:
        """Environments of one group."""
        return self.num_envs // self.placement.num_groups

    @property
    def batch_size(self) -> int:
        """Steps that one update learns from."""
        return self.num_envs * self.args.num_steps

    @property
    def actions_shape(self) -> Shape:
        """Shape of the recorded actions."""
        return Shape(self.args.num_steps, self.num_envs, self.spec.num_actions)

    @property
    def updates_done(self) -> int:
        """Updates that the run had made at the checkpoint that it resumes from; 0 for a new run."""
        return self.checkpoint.update if self.checkpoint else 0


def resolve_num_envs(
    num_envs: int | None, local_num_envs: int | None, hardware: Hardware, default: int
) -> int:
    """Return the environments of the whole run.

    Args:
      num_envs: the number itself, independent of the layout.
      local_num_envs: environments of each actor thread, as in the Cleanba README.
      hardware: the layout that multiplies `local_num_envs`.
      default: used when neither is given.

    Raises:
      ValueError: with one line, if both are given and disagree.
    """
    _, processes = placement.slurm_processes(hardware)
    if local_num_envs is None:
        total = default if num_envs is None else num_envs
    else:
        threads = hardware.num_actor_threads * len(hardware.actor_device_ids) * processes
        total = local_num_envs * threads
        if num_envs not in (None, total):
            raise ValueError(
                f"--local-num-envs {local_num_envs} on {threads} actor threads makes {total} "
                f"environments, but --num-envs is {num_envs}: give one of them"
            )
    return total


def cut_into_groups(args: CommonArgs, num_envs: int, units_per_env: int) -> tuple[int, int]:
    """Return the number of environment groups, and the units that a group has in a minibatch.

    Args:
      args: the command line.
      num_envs: environments of the run.
      units_per_env: what minibatches are cut from, per environment: its steps (PPO) or itself, 1
        (IMPALA).

    Raises:
      ValueError: with one line, if the environments or a group's units cannot be divided.
    """
    gradients = args.num_minibatches * args.gradient_accumulation_steps
    groups = args.num_env_groups or placement.default_num_env_groups(
        num_envs, units_per_env, gradients
    )
    if num_envs % groups:
        raise ValueError(f"--num-env-groups {groups}: must divide the {num_envs} environments")
    group_units = num_envs // groups * units_per_env
    if group_units % gradients:
        what = "environments" if units_per_env == 1 else "transitions"
        steps = args.gradient_accumulation_steps
        cut = f" x --gradient-accumulation-steps {steps}" if steps > 1 else ""
        raise ValueError(
            f"--num-minibatches {args.num_minibatches}{cut}: must divide the {group_units} {what} of a "
            f"group ({num_envs} environments in {groups} groups)"
        )
    return groups, group_units // gradients


@input_checks()
def prepare_run(
    args: CommonArgs,
    *,
    name: str,
    default_num_envs: int,
    units_per_env: int,
    images_per_unit: int,
) -> Setup:
    """Check everything that can be wrong with a run, start jax, and lay the run out.

    Divisibility: the number of groups divides `num_envs`, the number of minibatches divides the
    units of a group, the number of processes divides the number of groups, and there are no more
    actor threads or learner devices than groups of a process.

    Args:
      args: the command line.
      name: of the trainer.
      default_num_envs: environments if the command line does not give a number.
      units_per_env: what minibatches are cut from, per environment: its steps (PPO) or itself, 1
        (IMPALA).
      images_per_unit: forward passes that one unit needs in the gradient.

    Returns:
      The run, ready to begin. Nothing has been written yet.

    Raises:
      BadInput: with one line.
      RecordError: if there is a record that is neither overwritten nor resumed, or cannot be resumed.
    """
    check_args(args)
    resume = args.resuming.resume
    if args.run.overwrite and resume:
        raise ValueError("--overwrite deletes the earlier run, --resume continues it: give one")
    if args.model.capture_video:
        check_imageio("--capture-video")
    num_envs = resolve_num_envs(args.num_envs, args.local_num_envs, args.hardware, default_num_envs)
    batch_size = num_envs * args.num_steps
    if args.total_timesteps < batch_size:
        raise ValueError(
            f"--total-timesteps {args.total_timesteps}: one update learns from {batch_size} steps "
            f"({num_envs} environments x {args.num_steps} steps)"
        )
    num_updates = args.total_timesteps // batch_size
    every = checkpoint_interval(args.checkpoints, num_updates)
    args = replace(
        args, checkpoints=replace(args.checkpoints, checkpoint_every=every, num_checkpoints=0)
    )
    groups, minibatch_size = cut_into_groups(args, num_envs, units_per_env)
    process, num_processes = placement.slurm_processes(args.hardware)
    placed = placement.plan(args.hardware, groups, process, num_processes)
    seeds = seeds_of_environments(args, num_envs, placed)
    if restores(args.compat, "advantages"):
        advantage_chunks(args.hardware, num_processes, num_envs, args.num_minibatches)
    learners = len(args.hardware.learner_device_ids) * num_processes
    if args.reduction == "psum" and groups % learners:
        raise ValueError(
            f"--reduction psum: {groups} environment groups cannot be shared evenly by {learners} "
            "learner devices"
        )
    system = name if args.concurrency else f"{name}-sync"
    layout_name = placement.layout_of(args.hardware, num_processes).name
    run = run_id(system, args.env_id, args.seed, args.run, layout_name)
    new = process == 0 and not resume
    check_run(run, num_envs, overwrite=args.run.overwrite, new=new)
    spec = describe_env(args.env_id, args.atari_preprocessing)
    network_name = args.network
    if network_name == "auto":
        network_name = default_network(spec.obs_shape)
    check_fits(network_name, spec.obs_shape)
    placement.start_jax(args.hardware, args.portable)
    on_cpu = jax.local_devices()[0].platform == "cpu"
    args = replace(args, portable=args.portable and on_cpu)
    network = make_network(
        network_name, spec.num_actions, args.channels, args.hiddens, portable=args.portable
    )
    microbatch_size = choose_microbatch_size(
        args.microbatch_size, minibatch_size, images_per_unit, spec
    )
    recorded = hyperparameters(args) | {
        "num_envs": num_envs,
        "num_env_groups": groups,
        "network": network_name,
        "microbatch_size": microbatch_size,
    }
    if on_cpu and not args.portable:
        recorded["xla_cpu_pool_size"] = placement.cpu_pool_size(args.hardware, portable=False)
    checkpoint = None
    if resume:
        # The first process checks everything; `train` makes sure that the others found the same.
        checkpoint = (
            checkpoints.newest(run.directory)
            if process
            else _find_checkpoint(run.directory, pinned(recorded, placed))
        )
    return Setup(
        name=name,
        run=run,
        args=args,
        hyperparameters=recorded,
        spec=spec,
        network=network,
        placement=placed,
        num_envs=num_envs,
        env_seeds=seeds,
        num_updates=num_updates,
        minibatch_size=minibatch_size,
        microbatch_size=microbatch_size,
        checkpoint=checkpoint,
    )


def seeds_of_environments(args: CommonArgs, num_envs: int, placed: Placement) -> list[int]:
    """Return the seeds of all environments of the run.

    Raises:
      ValueError: with one line, if the original's seeds do not fit the layout.
    """
    if not restores(args.compat, "seeds"):
        return env_seeds(args.seed, 0, num_envs)
    threads = len(placed.actors)
    if placed.num_groups % (threads * placed.num_processes):
        raise ValueError(
            f"--compat seeds: {placed.num_groups} environment groups cannot be divided among "
            f"{placed.num_processes} processes x {threads} actor threads"
        )
    return overlapping_seeds(args.seed, num_envs, threads, placed.num_processes)


def pinned(hyperparameters: Mapping[str, Any], placed: Placement) -> dict[str, dict[str, Any]]:
    """Return what must be equal in a run and its resumption for the bits to be the same."""
    hardware = placement.pinned_hardware(hyperparameters["portable"])
    if hyperparameters["reduction"] == "psum" or depends_on_layout(hyperparameters["compat"]):
        hardware["learner_device_ids"] = list(placed.learner_device_ids)
        hardware["num_processes"] = placed.num_processes
    if depends_on_layout(hyperparameters["compat"]):
        devices = [actor.device_id for actor in placed.actors]
        hardware["actor_device_ids"] = list(dict.fromkeys(devices))
        hardware["num_actor_threads"] = len(devices) // len(set(devices))
    return {
        "hyperparameters": dict(hyperparameters),
        "versions": versions(PACKAGES),
        "hardware": hardware,
    }


def _find_checkpoint(directory: Path, now: Mapping[str, Any]) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None if the run starts from the beginning.

    Raises:
      RecordError: with one line, if the record cannot be resumed.
    """
    try:
        run = read_run(directory)
    except RecordError:
        check_writable(directory, overwrite=False)  # nothing there, or something else
        return None
    info = run.info
    check_idle(directory)
    if run.completed:
        raise RecordError(f"{directory} is completed: there is nothing to resume")
    then = {
        "hyperparameters": info.hyperparameters,
        "versions": info.versions,
        "hardware": {k: info.hardware.get(k) for k in now["hardware"]},
    }
    checkpoints.check_same(then, now, str(directory))
    checkpoint = checkpoints.newest(directory)
    if checkpoint is not None:
        checkpoints.check_same(checkpoint.pinned, now, str(checkpoint.folder))
        return checkpoint
    # Without a checkpoint, the run starts over by itself only if at most one checkpoint interval is lost.
    every, updates = info.checkpoint_every or 0, len(run.updates())
    if not every:
        why = "was not run with --checkpoint-every"
    elif updates > every or info.resumed:
        why = f"has {updates} updates"
    else:
        return None
    raise RecordError(f"{directory} has no checkpoint, and {why}: --overwrite starts it over")


def choose_microbatch_size(
    requested: int | None, minibatch_size: int, images_per_unit: int, spec: EnvSpec
) -> int:
    """Return the units of one gradient call, a divisor of a group's part of a minibatch.

    Args:
      requested: value of `--microbatch-size`, if given.
      minibatch_size: units of a group in a minibatch.
      images_per_unit: forward passes that one unit needs in the gradient.
      spec: the environment.

    Raises:
      ValueError: with one line, if the requested size does not divide.
    """
    if requested is not None:
        if minibatch_size % requested:
            raise ValueError(
                f"--microbatch-size {requested}: must divide the {minibatch_size} that a group "
                "has in a minibatch"
            )
        return requested
    largest = minibatch_size
    if jax.local_devices()[0].platform == "cpu" and len(spec.obs_shape) == 3:
        largest = min(largest, max(1, CPU_IMAGES_PER_GRADIENT // images_per_unit))
    return max(size for size in range(1, largest + 1) if minibatch_size % size == 0)
