"""The environments of a record, simulated from its actions without a network."""

from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta

from cleanba.audit.segments import Mismatch, Replayed
from cleanba.compatibility import env_overrides, overlapping_seeds, restores
from cleanba.environments import (
    EpisodeStatistics,
    describe_env,
    env_seeds,
    make_envs,
    play,
)
from cleanba.record import Run
from cleanba.record.actions import GroupDigest, Shape, combine_digests
from cleanba.record.encoding import describe_error
from cleanba.record.schema import Count
from cleanba.run.command_line import BadInput, input_checks

LARGEST_ROLLOUT = 2**22  # steps


class Options(msgspec.Struct, kw_only=True):
    """The hyperparameters that a replay needs, and their limits, because a stranger may have written them."""

    num_steps: Annotated[int, Meta(ge=1, le=2**20)]
    num_envs: Annotated[int, Meta(ge=1, le=4096)]
    num_env_groups: Annotated[int, Meta(ge=1, le=4096)] = 1
    sync_interval: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    total_timesteps: Count
    atari_preprocessing: Literal["machado", "gym"] = "machado"
    compat: tuple[str, ...] = ()

    @property
    def rollout_steps(self) -> int:
        """Steps of each environment in a rollout."""
        return self.sync_interval or self.num_steps


class Layout(msgspec.Struct):
    """The actor threads of a record, which decide the seeds of `--compat seeds`."""

    num_actor_threads: Annotated[int, Meta(ge=1, le=4096)]
    actor_device_ids: Annotated[tuple[int, ...], Meta(min_length=1, max_length=4096)]
    num_processes: Annotated[int, Meta(ge=1, le=4096)]


def options_of(run: Run) -> Options:
    """Return what a replay needs of a record's hyperparameters.

    Raises:
      BadInput: if something is missing or out of range.
    """
    try:
        options = msgspec.convert(run.info.hyperparameters, Options)
    except msgspec.ValidationError as error:
        raise BadInput(f"{run.path}: hyperparameters: {describe_error(error)}") from None
    if options.num_envs * options.rollout_steps > LARGEST_ROLLOUT:
        raise BadInput(
            f"{run.path}: rollouts of more than {LARGEST_ROLLOUT} steps are not simulated"
        )
    if options.num_envs % options.num_env_groups:
        raise BadInput(f"{run.path}: num_envs is no multiple of num_env_groups")
    return options


def _seeds_of(run: Run) -> list[int]:
    """Return the seeds of a record's environments.

    Raises:
      BadInput: if they depend on its layout, and this is missing or out of range.
      ValueError: with one line, if the run's seed is out of range.
    """
    options = options_of(run)
    if not restores(options.compat, "seeds"):
        return env_seeds(run.info.seed, 0, options.num_envs)
    try:
        layout = msgspec.convert(run.info.hardware, Layout)
    except msgspec.ValidationError as error:
        raise BadInput(f"{run.path}: hardware: {describe_error(error)}") from None
    threads = layout.num_actor_threads * len(layout.actor_device_ids)
    return overlapping_seeds(run.info.seed, options.num_envs, threads, layout.num_processes)


def shape_of(run: Run) -> Shape:
    """Return the shape of a record's actions.

    Raises:
      BadInput: if it has no actions, or a hyperparameter is missing or out of range.
    """
    if run.info.num_actions is UNSET:
        raise BadInput(f"{run.path}: a record without actions (no 'num_actions')")
    options = options_of(run)
    return Shape(options.rollout_steps, options.num_envs, run.info.num_actions)


class Simulation:
    """The environments of a run, without its network.

    They are one pool, because their trajectories depend on seeds and actions alone.
    """

    def __init__(self, run: Run, num_threads: int):
        """Make the environments.

        Args:
          run: the record.
          num_threads: EnvPool threads.

        Raises:
          Mismatch: if the environment has another number of actions than the record.
          BadInput: if there is no such environment, or a hyperparameter is missing or out of range.
        """
        options = options_of(run)
        with input_checks():
            spec = describe_env(run.info.env_id, options.atari_preprocessing)
            seeds = _seeds_of(run)
        if spec.num_actions != run.info.num_actions:  # environments do not check actions
            raise Mismatch(f"run.json: {run.info.env_id} has {spec.num_actions} actions")
        self._envs = make_envs(
            run.info.env_id,
            seeds,
            num_threads,
            options.atari_preprocessing,
            **env_overrides(options.compat, spec.is_atari),
        )
        self._same_step = run.info.autoreset == "same_step"
        self._statistics = EpisodeStatistics(options.num_envs, self._same_step)
        self._digests = [GroupDigest() for _ in range(options.num_env_groups)]
        self._envs.async_reset()
        self._envs.recv()

    def replay(self, actions: np.ndarray) -> Replayed:
        """Step the environments through the actions [T, N] of a rollout."""
        _, rewards, dones, _ = play(self._envs, actions, self._same_step)
        groups = (np.split(x, len(self._digests), axis=1) for x in (actions, rewards, dones))
        digest = combine_digests(
            digest.update(*parts) for digest, *parts in zip(self._digests, *groups, strict=True)
        )
        return Replayed(actions, digest, self._statistics.count(rewards, dones))

    def close(self) -> None:
        """Free the environments."""
        self._envs.close()
