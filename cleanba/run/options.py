"""Options of a run that are no hyperparameters, and the checks that every system makes of them.

A system's command line nests those that it implements, so that no flag is shown that does nothing.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from cleanba.environments import check_env_id, env_seeds
from cleanba.record import check_writable, run_name
from cleanba.record.schema import LONGEST_NAME, is_name
from cleanba.run.arguments import Count, CountOrZero

LONGEST_FOLDER = 240  # bytes of a folder's name; file systems allow 255


@dataclass(frozen=True)
class RunOptions:
    """Where the run is recorded."""

    runs_dir: str = "runs"
    """Folder of the run records."""
    study: str = "default"
    """Study that the run belongs to: its record is in <runs-dir>/<study>/."""
    exp_name: str | None = None
    """Name of the system in the record; by default the trainer's own."""
    setting: str | None = None
    """Name of the hardware setting; by default made from the settings themselves."""
    overwrite: bool = False
    """Delete the record of an earlier run of the same name."""
    progress: bool = True
    """Report progress while training."""


@dataclass(frozen=True)
class LogOptions:
    """How much is logged."""

    log_frequency: Count = 10
    """Updates between two points in TensorBoard and Weights & Biases (the record has every update)."""
    fingerprint_every: Count = 10
    """Updates between two fingerprints (SHA-256) of the parameters in the record."""


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints."""

    checkpoint_every: CountOrZero = 0
    """Updates between two checkpoints; 0 for none."""
    num_checkpoints: CountOrZero = 0
    """Least number of checkpoints, evenly spaced over the run, instead of --checkpoint-every; 0 for none."""
    keep_checkpoints: Count | Literal["all"] = 2
    """Number of the newest checkpoints to keep, or `all`."""


@dataclass(frozen=True)
class ResumeOptions:
    """Resuming from checkpoints."""

    resume: bool = False
    """Resume a run from its newest checkpoint, bit-identical to an uninterrupted run; start it if it
    has no checkpoint yet."""


@dataclass(frozen=True)
class TrackingOptions:
    """Tracking with Weights & Biases."""

    track: bool = False
    """Track the run with Weights & Biases (offline where no API key is set)."""
    wandb_project_name: str = "cleanba"
    """Project in Weights & Biases."""
    wandb_entity: str | None = None
    """Entity (team) in Weights & Biases."""


@dataclass(frozen=True)
class ModelOptions:
    """What happens to the trained model."""

    save_model: bool = False
    """Save the final parameters, and evaluate them."""
    capture_video: bool = False
    """Record a video of the trained agent's first evaluation episode."""
    upload_model: bool = False
    """Upload the saved model to the Hugging Face Hub (needs huggingface_hub and a token)."""
    hf_entity: str = ""
    """User or organization on the Hugging Face Hub."""


def checkpoint_interval(options: CheckpointOptions, num_updates: int) -> int:
    """Return the updates between two checkpoints; 0 for no checkpoints.

    Args:
      options: which give the interval itself, or the number of checkpoints over the whole run.
      num_updates: of the whole run.

    Raises:
      ValueError: with one line, if they give both.
    """
    if options.checkpoint_every and options.num_checkpoints:
        raise ValueError("--checkpoint-every and --num-checkpoints: give one of them")
    if not options.num_checkpoints:
        return options.checkpoint_every
    return max(1, num_updates // options.num_checkpoints)


class RunId(NamedTuple):
    """What names a run and its folder."""

    system: str
    setting: str
    env_id: str
    seed: int
    study: str
    runs_dir: str

    @property
    def directory(self) -> Path:
        """Folder of the record."""
        name = run_name(self.system, self.setting, self.env_id, self.seed)
        return Path(self.runs_dir) / self.study / name


def run_id(system: str, env_id: str, seed: int, options: RunOptions, default_setting: str) -> RunId:
    """Name a run; system and setting are those given by its options, else the defaults."""
    setting = default_setting if options.setting is None else options.setting
    system = system if options.exp_name is None else options.exp_name
    return RunId(system, setting, env_id, seed, options.study, options.runs_dir)


def check_run(
    run: RunId,
    num_envs: int,
    *,
    overwrite: bool,
    new: bool = True,
    check_env_id: Callable[[str], None] = check_env_id,
) -> None:
    """Check the name, seed and environment of a run, and that its folder is free.

    Args:
      run: the run.
      num_envs: its environments, each of which needs a seed of its own.
      overwrite: whether an earlier record may be deleted.
      new: false where the record may exist already, because this run resumes or joins it.
      check_env_id: refuses an environment that is unknown, by default to EnvPool.

    Raises:
      ValueError: with one line, for a bad name, an unknown environment, a seed out of range, or a
        `runs_dir` that is not a writable folder.
      RecordError: if there is a record already and `overwrite` is not given.
    """
    check_name("--study", run.study)
    check_name("--setting", run.setting)
    check_name("--exp-name", run.system)
    name = run.directory.name
    if len(name.encode()) > LONGEST_FOLDER:
        raise ValueError(f"--setting: the folder's name, {name[:40]}..., is too long ({len(name)})")
    env_seeds(run.seed, 0, num_envs)
    check_env_id(run.env_id)
    if new or not os.path.exists(run.directory):
        _check_folder(run)
    if new:
        check_writable(run.directory, overwrite)


def _check_folder(run: RunId) -> None:
    """Refuse a folder of records in which no folder can be made."""
    # os.path.exists is false below a folder that cannot be entered; Path.exists raises an error
    there = next(path for path in run.directory.absolute().parents if os.path.exists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "not writable" if there.is_dir() else "not a folder"
        raise ValueError(f"--runs-dir {run.runs_dir}: {there} is {what}")


def check_name(flag: str, name: str) -> None:
    """Refuse a name that would lead to another folder, or be shown as something else than it is.

    Raises:
      ValueError: with one line.
    """
    if not name or "/" in name or "\\" in name or name.startswith("."):
        raise ValueError(
            f"{flag} {name!r}: becomes part of a folder's name; it cannot be empty, begin with '.' "
            "or contain a slash"
        )
    if not is_name(name):
        raise ValueError(
            f"{flag} {name[:40]!r}: must have at most {LONGEST_NAME} characters, and none that controls, "
            "breaks or reorders text"
        )
