"""What the torch baselines write about a run: the record, TensorBoard, a line now and then."""

import contextlib
import math
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import torch

from cleanba import __version__
from cleanba.environments import EnvSpec, check_env_id, describe_env, env_seeds
from cleanba.placement import cpu_model
from cleanba.record import (
    LINE_FILES,
    RunWriter,
    check_writable,
    redact_command,
    run_name,
    source_revision,
)
from cleanba.scalar_log import TensorBoardWriter, hyperparameter_table, update_scalars

PACKAGES = ("torch", "envpool", "numpy")
SECONDS_BETWEEN_LINES = 5.0


class RunId(NamedTuple):
    """What names a run, and where its record is kept."""

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


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return the part of a record's `hardware` that every torch program can say."""
    kind = cpu_model() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return {
        "platform": device.type,
        "device_kind": kind,
        "cpu_affinity": sorted(os.sched_getaffinity(0)),
    }


def versions() -> dict[str, str]:
    """Return the versions of what a result may depend on."""
    own = {"python": platform.python_version(), "cleanba": __version__}
    return own | {p: metadata.version(p) for p in PACKAGES}


class RunLog:
    """The record of a run, TensorBoard, and a line of progress every few seconds."""

    def __init__(
        self,
        run: RunId,
        hyperparameters: Mapping[str, Any],
        hardware: Mapping[str, Any],
        *,
        total_steps: int,
        overwrite: bool,
        progress: bool,
        resume_at: tuple[int, int, float] | None = None,
    ):
        """Begin the record, or go on with it.

        Args:
          run: names it.
          hyperparameters: all that may change what is learned.
          hardware: all that may only change how fast.
          total_steps: of the whole run, for the line of progress.
          overwrite: delete the record of an earlier run of the same name.
          progress: print lines of progress.
          resume_at: version, step and wall time to go on from, with the record of a run that was ended;
            what it says of later ones is cut off.

        Raises:
          RecordError: if there is a record already, and neither says what to do with it.
        """
        header = {
            "system": run.system,
            "setting": run.setting,
            "env_id": run.env_id,
            "seed": run.seed,
            "study": run.study,
            "hyperparameters": dict(hyperparameters),
            "hardware": dict(hardware),
            "versions": versions(),
            "revision": source_revision(Path(__file__).parent),
            "command": ["python", *sys.argv],
        }
        if resume_at is not None and (run.directory / "run.json").is_file():
            note = {"hardware": header["hardware"], "revision": header["revision"]}
            note["command"] = redact_command(header["command"])
            self._record = RunWriter.resume(
                run.directory, _sizes_at(run.directory, *resume_at), note
            )
        else:
            self._record = RunWriter(run.directory, header, overwrite)
        self._board = TensorBoardWriter(run.directory / "tensorboard")
        self._board.write_text("hyperparameters", hyperparameter_table(hyperparameters))
        self._returns: deque[float] = deque(maxlen=100)
        self._total_steps = total_steps
        self._progress = progress
        self._last_line = (0.0, 0)  # time and step
        self._last_step = 0

    def write(
        self,
        update: Mapping[str, Any],
        rollouts: Sequence[Mapping[str, Any]],
        episodes: Sequence[Mapping[str, Any]],
    ) -> None:
        """Record one update, the rollouts that it learned from, and their episodes."""
        self._record.write("episodes", episodes)
        self._record.write("rollouts", rollouts)
        self._record.write("updates", [update])
        self._returns.extend(e["return"] for e in episodes)
        scalars = update_scalars(update, update["step"] - self._last_step)
        if self._returns:
            scalars["charts/avg_episodic_return"] = float(np.mean(self._returns))
        self._board.write(update["step"], scalars)
        self._last_step = update["step"]
        then, step = self._last_line
        now = update["wall_time"]
        if self._progress and now - then >= SECONDS_BETWEEN_LINES:
            speed = (update["step"] - step) / (now - then)
            mean = f"{np.mean(self._returns):.1f}" if self._returns else "none yet"
            line = (
                f"Steps {update['step']:,} of {self._total_steps:,} @ {speed:.1f} SPS. "
                f"Loss {update['loss']}. Return {mean}."
            )
            with contextlib.suppress(BrokenPipeError):  # nobody reads: not the run's end
                print(line, flush=True)
            self._last_line = (now, update["step"])

    def close(self, error: BaseException | None) -> None:
        """Close the record, with the status that the error, if any, calls for."""
        self._board.close()
        self._record.__exit__(type(error) if error else None, error, None)


def run_lengths(versions: np.ndarray) -> tuple[list[int], list[int]]:
    """Return the versions of a rollout's steps [T] without repetitions, and how often each repeats."""
    starts = np.flatnonzero(np.concatenate([[True], versions[1:] != versions[:-1]]))
    counts = np.diff(np.append(starts, len(versions)))
    return versions[starts].tolist(), counts.tolist()


def _sizes_at(directory: Path, version: int, step: int, wall_time: float) -> dict[str, int]:
    """Return the size that each file of lines of a record had when a version had been made."""
    limits: dict[str, dict[str, float]] = {
        # before the first update, episodes have the step of none
        "episodes": {"step": step, "wall_time": wall_time},
        "updates": {"version": version},
        "rollouts": {"learner_version": version - 1},
    }
    sizes = {}
    for kind in LINE_FILES:
        path, size = directory / f"{kind}.jsonl", 0
        for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
            row = orjson.loads(line) if line.endswith(b"\n") else None
            if row is None or any(row[name] > last for name, last in limits[kind].items()):
                break
            size += len(line)
        sizes[path.name] = size
    return sizes


def check_numbers(
    args: Any,
    flag: Callable[[str], str],
    *,
    counts: Sequence[str] = (),
    positive: Sequence[str] = (),
    not_negative: Sequence[str] = (),
    shares: Sequence[str] = (),
) -> None:
    """Refuse numbers that no run can be made with; None is left to be chosen.

    Args:
      args: the command line.
      flag: from the name of a field to its flag.
      counts: fields that are to be 1 or more.
      positive: fields that are to be more than 0.
      not_negative: fields that are to be 0 or more.
      shares: fields that are to be from 0 to 1.

    Raises:
      ValueError: with one line, for the first such field.
    """
    for names, what, good in (
        (counts, "1 or more", lambda value: value >= 1),
        (positive, "more than 0", lambda value: value > 0),
        (not_negative, "0 or more", lambda value: value >= 0),
        (shares, "from 0 to 1", lambda value: 0 <= value <= 1),
    ):
        for name in names:
            value = getattr(args, name)
            if value is not None and not (math.isfinite(value) and good(value)):
                raise ValueError(f"{flag(name)} {value}: must be {what}")


def dashed_flag(field: str) -> str:
    """Return the flag of a field, as most command lines spell it."""
    return f"--{field.replace('_', '-')}"


def check_options(
    args: Any,
    ranges: Mapping[str, Sequence[str]],
    *,
    name: str = "setting",
    flag: Callable[[str], str] = dashed_flag,
) -> None:
    """Refuse options that no run can be made with, whatever its environment.

    Args:
      args: the command line.
      ranges: fields by what they are to be, as arguments of `check_numbers`.
      name: field that becomes part of the folder's name.
      flag: from the name of a field to its flag.

    Raises:
      ValueError: with one line, for the first such option.
    """
    check_numbers(args, flag, **ranges)
    check_name(getattr(args, name), flag(name))
    for widths in ("channels", "hiddens"):
        if min(getattr(args, widths, None) or (1,)) < 1:
            raise ValueError(f"{flag(widths)} {min(getattr(args, widths))}: must be 1 or more")


def check_name(name: str | None, flag: str) -> None:
    """Refuse a name that would lead to another folder.

    Raises:
      ValueError: with one line.
    """
    if name is not None and (not name or "/" in name or name.startswith(".")):
        raise ValueError(f"{flag} {name}: is part of a folder's name, without '/'")


def check_new(run: RunId, num_envs: int, *, overwrite: bool, exists: bool = False) -> None:
    """Check that a run can begin, whatever is learned in it.

    Args:
      run: names it.
      num_envs: its environments.
      overwrite: whether an earlier record may be deleted.
      exists: whether the record is there already, and is to be.

    Raises:
      ValueError: with one line, for an unknown environment or a seed out of range.
      RecordError: if there is a record already, and `overwrite` is not given.
    """
    env_seeds(run.seed, 0, num_envs)
    check_env_id(run.env_id)
    if not exists:
        check_writable(run.directory, overwrite)


def check_run(
    run: RunId, num_envs: int, *, overwrite: bool, preprocessing: str, exists: bool = False
) -> EnvSpec:
    """Do what `check_new` does; return the `EnvSpec` of an environment with discrete actions.

    Raises:
      ValueError, RecordError: as `check_new` does, and if the actions are of another kind.
    """
    check_new(run, num_envs, overwrite=overwrite, exists=exists)
    return describe_env(run.env_id, preprocessing)


def choose_network(name: str, spec: EnvSpec) -> str:
    """Return the name of a network that fits an environment; `auto` chooses.

    Raises:
      ValueError: with one line, if it does not fit.
    """
    images = len(spec.obs_shape) == 3
    if images and min(spec.obs_shape[1:]) < 36:  # what the Nature CNN's convolutions need
        raise ValueError(
            f"{spec.env_id}: its images are {spec.obs_shape}; no network here takes those"
        )
    if name == "auto":
        return "resnet" if images else "mlp"
    if images == (name == "mlp"):
        fits = "resnet or nature" if images else "mlp"
        raise ValueError(f"--network {name}: observations are {spec.obs_shape}; choose {fits}")
    return name


def save_parameters(network: torch.nn.Module, path: Path) -> None:
    """Save parameters so that nothing needs to be unpickled to load them (.npz)."""
    arrays = {name: value.detach().cpu().numpy() for name, value in network.state_dict().items()}
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, **arrays)
    os.replace(temporary, path)


def load_parameters(network: torch.nn.Module, path: Path) -> None:
    """Load what `save_parameters` wrote.

    Raises:
      ValueError: with one line, if the file does not fit the network.
    """
    with np.load(path, allow_pickle=False) as arrays:
        state = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None


class Clock:
    """Seconds since the run started; the same in all processes forked from it."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self) -> float:
        """Return the seconds."""
        return time.monotonic() - self._start
