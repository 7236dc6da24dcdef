"""The Cleanba trainers against the ceilings of the machine, and portable arithmetic against XLA's own.

For each case the parts of a trainer are timed alone, in a fresh process and at the trainer's own shapes:
EnvPool with random actions, the inference call, and the gradient call. Parts that take turns allow

    ceiling = 1 / (1 / environments + 1 / forward + gradients per step / gradient)   steps per second;

a trainer that overlaps them can exceed it. The optimizer's step and the Python between the calls are not
parts, so they lower the ratio of a trainer to the ceiling. `torch` is the gradient of the same network and
number of images in torch.

The trainer is timed in the Cleanba architecture, synchronous, and synchronous without portable arithmetic,
one after the other.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cleanba.run.arguments import Positive
from cleanba.run.flags import flags
from experiments.benchmarks import speed
from experiments.benchmarks.case import Case, Column, Values

ROOT = Path(__file__).parents[2]
WARM_UP_UPDATES = 2  # in which a trainer compiles


class Workload(NamedTuple):
    """What a trainer is timed on: 16 environments x 20 steps, 4 minibatches (PPO: 4 epochs)."""

    name: str
    algorithm: str
    env_id: str
    network: str
    updates: int  # that the trainer is timed for, after `WARM_UP_UPDATES`
    num_groups: int = 1
    num_envs: int = 16
    num_steps: int = 20

    @property
    def script(self) -> Path:
        """The trainer."""
        return ROOT / "cleanba" / f"cleanba_{self.algorithm}.py"

    def options(self) -> dict[str, Any]:
        """Return the trainer's options, see `cleanba.run.flags`."""
        return {
            "env_id": self.env_id,
            "network": self.network,
            "num_envs": self.num_envs,
            "num_env_groups": self.num_groups,
            "num_steps": self.num_steps,
            "num_actor_threads": 1,
            "total_timesteps": self.num_envs * self.num_steps * (self.updates + WARM_UP_UPDATES),
            "fingerprint_every": 1_000_000,
            "progress": False,
        }


WORKLOADS = (
    Workload("impala-breakout-nature", "impala", "Breakout-v5", "nature", 30),
    Workload("ppo-breakout-nature", "ppo", "Breakout-v5", "nature", 10),
    Workload("impala-breakout-resnet", "impala", "Breakout-v5", "resnet", 6),
    Workload("impala-cartpole", "impala", "CartPole-v1", "mlp", 300),
    Workload("ppo-cartpole", "ppo", "CartPole-v1", "mlp", 200),
)


def _gradient_call(
    trainer: Any, setup: Any, params: Any, rollout: Any
) -> tuple[Callable[[], Any], int, float]:
    """Return one gradient call of a trainer. Only this function depends on how trainers learn.

    Args:
      trainer: the trainer's module.
      setup: its checked run.
      params: parameters.
      rollout: of one group.

    Returns:
      The call, the observations (images) that it takes the gradient of, and their number per agent step
      in a whole update.
    """
    import jax

    args, size = setup.args, setup.microbatch_size
    take = jax.jit(trainer.take, static_argnums=2)
    gradient = jax.jit(trainer.make_gradient(setup.network, args))
    if setup.name == "cleanba_ppo":
        batch_of = trainer.make_batch(setup.network, args)
        batch, moments = batch_of(params, rollout, jax.random.key(0), np.int32(1))
        inputs = (take(batch, np.int32(0), size), jax.tree.map(lambda x: x[0], moments))
        images, per_step = size, float(args.update_epochs)
    else:
        inputs = (take(rollout, np.int32(0), size),)
        images, per_step = size * (args.num_steps + 1), (args.num_steps + 1) / args.num_steps
    return lambda: jax.block_until_ready(gradient(params, *inputs)), images, per_step


def measure_parts(workload: Workload, seconds: float) -> dict[str, float]:
    """Time the parts of a trainer, each alone, in this process.

    Args:
      workload: environment and shapes.
      seconds: to time each part for.

    Returns:
      `env` in steps, `forward` in observations and `gradient` in images per second, and
      `gradients_per_step`, images per step.
    """
    import importlib

    import jax

    from cleanba import training
    from cleanba.actor_learner import GroupRollout
    from cleanba.run.command_line import parse

    trainer = importlib.import_module(f"cleanba.cleanba_{workload.algorithm}")
    with tempfile.TemporaryDirectory() as folder:
        options = workload.options() | {"runs_dir": folder}
        setup = trainer.prepare(parse(trainer.Args, flags(options), ""))
    device = jax.local_devices()[0]
    params = jax.device_put(training.initial_params(setup), device)
    rng = np.random.default_rng(0)
    shape = (workload.num_steps, setup.group_size)
    obs = speed.random_observations(setup.spec, shape[0] + 1, shape[1])

    act = trainer.make_act(setup.network)
    key, step = jax.device_put((jax.random.key(0), np.int32(0)), device)
    forward = speed.calls_per_second(lambda: np.asarray(act(params, obs[0], key, step)[0]), seconds)

    _, behaviour, _ = act(params, obs[0], key, step)
    rollout = GroupRollout(
        obs=obs,
        dones=np.zeros((shape[0] + 1, shape[1]), bool),
        actions=rng.integers(0, setup.spec.num_actions, shape).astype(np.int32),
        rewards=rng.normal(size=shape).astype(np.float32),
        behaviour=jax.tree.map(lambda x: np.stack([x] * shape[0]), behaviour),
    )
    call, images, per_step = _gradient_call(trainer, setup, params, jax.device_put(rollout, device))
    return {
        "env": speed.environment_speed(
            workload.env_id, workload.num_envs, workload.num_groups, seconds
        ),
        "forward": forward * setup.group_size,
        "gradient": speed.calls_per_second(call, seconds) * images,
        "gradients_per_step": per_step,
    }


def torch_gradients(workload: Workload, seconds: float) -> float:
    """Return the images (observations) per second of torch's gradient of the same network, in this process.

    The loss is monobeast's for PPO too: it takes a small part of the time.
    """
    from baselines.torch_networks import make_network
    from cleanba.environments import describe_env

    spec = describe_env(workload.env_id)
    network = make_network(workload.network, spec.obs_shape, spec.num_actions)
    bootstrap = 1 if workload.algorithm == "impala" else 0
    shape = (workload.num_steps + bootstrap, workload.num_envs // 4)  # a minibatch
    return speed.torch_gradients(network, spec, shape, seconds)


def trainer_speed(workload: Workload, options: dict[str, Any], folder: Path) -> float:
    """Train, recording into a folder, and return the steps per second after the first updates."""
    options = workload.options() | options | {"runs_dir": str(folder)}
    run = speed.run_and_read([sys.executable, str(workload.script), *flags(options)], folder)
    return speed.steps_per_second(run.updates()[WARM_UP_UPDATES - 1 :])


def measure(workload: Workload, seconds: float) -> Values:
    """Measure one case: the parts, and the trainer in three ways."""

    def timed(**options: Any) -> float:
        with tempfile.TemporaryDirectory() as folder:
            return trainer_speed(workload, options, Path(folder))

    parts = speed.in_fresh_process(measure_parts, workload, seconds)
    torch_gradient = speed.in_fresh_process(torch_gradients, workload, seconds)
    cleanba = timed(concurrency=True)
    synchronous = timed(concurrency=False)
    not_portable = timed(concurrency=False, portable=False, xla_cpu_pool_size=speed.cores())
    ceiling = speed.ceiling(parts)
    return {
        **parts,
        "torch_gradient": torch_gradient,
        "gradient_ratio": parts["gradient"] / torch_gradient,
        "ceiling": ceiling,
        "cleanba": cleanba,
        "cleanba_ratio": cleanba / ceiling,
        "synchronous": synchronous,
        "synchronous_ratio": synchronous / ceiling,
        "not_portable": not_portable,
        "portable_ratio": synchronous / not_portable,
    }


@dataclass(frozen=True)
class Trainers:
    """The Cleanba trainers against the ceilings of the machine, and with XLA's own arithmetic."""

    seconds: Positive = 1.5
    """Seconds that each part is timed for."""

    columns = (
        Column("env", "env"),
        Column("forward", "forward"),
        Column("gradient", "gradient"),
        Column("torch_gradient", "torch"),
        Column("gradient_ratio", "ratio", ".2f", ratio="gradients / torch's"),
        Column("ceiling", "ceiling"),
        Column("cleanba", "Cleanba"),
        Column("cleanba_ratio", "ratio", ".2f", ratio="Cleanba / ceiling"),
        Column("synchronous", "synchronous"),
        Column("synchronous_ratio", "ratio", ".2f", ratio="synchronous / ceiling"),
        Column("not_portable", "--no-portable"),
        Column("portable_ratio", "ratio", ".2f", ratio="portable / --no-portable"),
    )

    def title(self) -> str:
        """Return the line above the table."""
        return f"Steps per second; ratios to the ceiling. {Workload.__doc__}"

    def cases(self) -> list[Case]:
        """Return a case for each workload."""
        return [
            Case(workload.name, partial(measure, workload, self.seconds)) for workload in WORKLOADS
        ]
