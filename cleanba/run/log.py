"""Everything that is written about a run: its record, TensorBoard, Weights & Biases, progress."""

import contextlib
import os
import platform
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import UNSET, UnsetType
from tqdm import tqdm

from cleanba import __version__
from cleanba.record import (
    Episode,
    Resumption,
    Rollout,
    RunInfo,
    RunWriter,
    Update,
    now_utc,
    read_run,
    source_revision,
    tensorboard,
)
from cleanba.run.command_line import BadInput
from cleanba.run.options import RunId, TrackingOptions

SECONDS_BETWEEN_LINES = 5.0  # of progress
RETURNS_AVERAGED = 100  # newest episodes in the mean return of TensorBoard and progress


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, this project, the C library (of sin and cos) and some packages."""
    own = {"python": platform.python_version(), "cleanba": __version__}
    name, version = platform.libc_ver()
    own |= {name: version} if name else {}
    return own | {package: metadata.version(package) for package in packages}


def run_info(
    run: RunId,
    *,
    program: str,
    hyperparameters: Mapping[str, Any],
    hardware: Mapping[str, Any],
    packages: Iterable[str],
) -> RunInfo:
    """Describe a run for its record.

    Args:
      run: what names it.
      program: its module, without the packages.
      hyperparameters: everything that may change what is learned.
      hardware: everything that may only change how fast.
      packages: those whose versions the result may depend on.
    """
    return RunInfo(
        system=run.system,
        setting=run.setting,
        env_id=run.env_id,
        seed=run.seed,
        study=run.study,
        program=program,
        hyperparameters=dict(hyperparameters),
        hardware=dict(hardware),
        versions=versions(packages),
        revision=source_revision(Path(__file__).parent),
        command=["python", *sys.argv],
    )


def run_lengths(versions: np.ndarray) -> list[tuple[int, int]]:
    """Return the run lengths of a rollout's policy versions, as `Rollout.versions` has them.

    Args:
      versions: version that chose the action of each step [T].

    Returns:
      Pairs of a version and the number of consecutive steps that it took.
    """
    starts = np.flatnonzero(np.concatenate([[True], versions[1:] != versions[:-1]]))
    counts = np.diff(np.append(starts, len(versions)))
    return list(zip(versions[starts].tolist(), counts.tolist(), strict=True))


class ResumePoint(NamedTuple):
    """Where a record is resumed."""

    sizes: Mapping[str, int]  # bytes of each file of the record at the checkpoint
    step: int  # agent steps learned from by then
    update: int | UnsetType = UNSET  # number of the checkpoint's update, for `run.json`


class RunLog:
    """Writes a run's record, TensorBoard, Weights & Biases and progress.

    A context manager: leaving it closes everything, and the record with the status that the exception,
    if any, calls for.
    """

    def __init__(
        self,
        run: RunId,
        info: RunInfo,
        *,
        total_steps: int,
        overwrite: bool = False,
        progress: Literal["bar", "lines"] | None = None,
        log_frequency: int = 1,
        tracking: TrackingOptions | None = None,
        resume: ResumePoint | None = None,
    ):
        """Begin the record, or resume it.

        Args:
          run: what names the run.
          info: what `run.json` says of it.
          total_steps: agent steps of the whole run.
          overwrite: delete the record of an earlier run of the same name.
          progress: a progress bar on stderr, a line on stdout every few seconds, or nothing.
          log_frequency: updates between two points in TensorBoard and Weights & Biases.
          tracking: options of Weights & Biases; not used if None or not asked for.
          resume: where to resume the record; what was written later is deleted.

        Raises:
          RecordError: if there is a record already and it is neither overwritten nor resumed, or if
            the record cannot be resumed.
        """
        self.directory = run.directory
        self._total_steps, self._log_frequency = total_steps, log_frequency
        self._returns: deque[float] = deque(maxlen=RETURNS_AVERAGED)
        self._lengths: deque[int] = deque(maxlen=RETURNS_AVERAGED)
        self._last_step = resume.step if resume else 0
        tracks = tracking is not None and tracking.track
        # Before the record begins: a failure here leaves none behind that looks as if it were running.
        self._wandb = _start_wandb(tracking, info, run.runs_dir) if tracks else None
        if resume is None:
            self.record = RunWriter(self.directory, info, overwrite)
            self._board = tensorboard.TensorBoardWriter(self.directory / "tensorboard")
            table = tensorboard.hyperparameter_table(info.hyperparameters)
            self._board.write_text("hyperparameters", table)
        else:
            note = Resumption(
                at=now_utc(),
                update=resume.update,
                hardware=info.hardware,
                revision=info.revision,
                command=info.command,
            )
            self.record = RunWriter.resume(self.directory, resume.sizes, note)
            self._board = tensorboard.TensorBoardWriter(self.directory / "tensorboard")
            self._remember(read_run(self.directory).episodes()[-RETURNS_AVERAGED:])
        styles = {"bar": ProgressBar, "lines": ProgressLines}
        self._progress = styles[progress](self._last_step, total_steps) if progress else None

    def write(
        self, update: Update, rollouts: Sequence[Rollout], episodes: Sequence[Episode]
    ) -> None:
        """Log one update, the rollouts that it learned from, and the episodes that ended in them."""
        self.record.write(*episodes, *rollouts, update)
        self._remember(episodes)
        last = update.step >= self._total_steps
        if last or (update.version - 1) % self._log_frequency == 0:
            scalars = tensorboard.update_scalars(update, update.step - self._last_step)
            if self._returns:
                scalars["charts/avg_episodic_return"] = float(np.mean(self._returns))
                scalars["charts/avg_episodic_length"] = float(np.mean(self._lengths))
            self._board.write(update.step, scalars)
            if self._wandb is not None:
                self._wandb.log(scalars | {"global_step": update.step}, step=update.step)
        self._last_step = update.step
        if self._progress is not None:
            mean = f"{np.mean(self._returns):.1f}" if self._returns else "none yet"
            self._progress.show(update, rollouts, mean)

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file, by its path in the record, all of it safely on disk."""
        board = self._board.path.relative_to(self.directory).as_posix()
        return self.record.sizes() | {board: self._board.size()}

    def note_hardware(self, facts: Mapping[str, Any]) -> None:
        """Add what is known only now to the hardware of the run, or of its last resumption."""
        info = self.record.info
        (info.resumed[-1] if info.resumed else info).hardware.update(facts)

    def _remember(self, episodes: Sequence[Episode]) -> None:
        self._returns.extend(e.episode_return for e in episodes if e.episode_return is not None)
        self._lengths.extend(e.length for e in episodes)

    def __enter__(self) -> "RunLog":
        """Return the log itself."""
        self.record.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Close everything; the exception, if any, decides the record's status."""
        try:
            if self._progress is not None:
                self._progress.close()
            self._board.close()
            if self._wandb is not None:  # it uploads, which may fail or be interrupted
                self._wandb.finish(exit_code=int(error is not None))
        finally:
            self.record.__exit__(kind, error, trace)
        if error is None:
            _print(f"completed: {shlex.quote(str(self.directory))}")


def _print(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # a closed reader, such as `head`, fails no run
        # One write, also where Python's output is unbuffered: lines of other processes stay whole.
        print(f"{line}\n", end="", flush=True)


class ProgressBar:
    """A progress bar on stderr: steps, mean return, policy lag, and which side waits."""

    def __init__(self, step: int, total_steps: int):
        """Begin at a step."""
        self._step = step
        self._bar = tqdm(
            initial=step, total=total_steps, unit="step", unit_scale=True, dynamic_ncols=True,
            mininterval=0.5,
        )  # fmt: skip

    def show(self, update: Update, rollouts: Sequence[Rollout], mean_return: str) -> None:
        """Move the bar to an update."""
        parts = [f"return {mean_return}"]
        if rollouts:
            parts.append(f"lag {rollouts[0].learner_version - rollouts[0].version_first}")
        learner = update.rollout_queue_get_time or 0.0
        actors = update.params_queue_get_time or 0.0
        if learner or actors:
            parts.append(f"waiting: {'learner' if learner > actors else 'actors'}")
        self._bar.set_postfix_str(", ".join(parts), refresh=False)
        self._bar.update(update.step - self._step)
        self._step = update.step

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


class ProgressLines:
    """A line on stdout every few seconds, in the words of monobeast."""

    def __init__(self, step: int, total_steps: int):
        """Begin at a step."""
        self._last_time, self._last_step, self._total_steps = time.monotonic(), step, total_steps

    def show(self, update: Update, rollouts: Sequence[Rollout], mean_return: str) -> None:
        """Print a line, if the last one is long enough ago."""
        seconds = time.monotonic() - self._last_time
        if seconds < SECONDS_BETWEEN_LINES:
            return
        speed = (update.step - self._last_step) / max(seconds, 1e-9)
        line = (
            f"Steps {update.step:,} of {self._total_steps:,} @ {speed:.1f} SPS. "
            f"Loss {update.loss}. Return {mean_return}."
        )
        _print(line)
        self._last_time, self._last_step = time.monotonic(), update.step

    def close(self) -> None:
        """Nothing to close."""


def _start_wandb(options: TrackingOptions, info: RunInfo, runs_dir: str) -> Any:
    try:
        import wandb
    except ImportError:
        raise BadInput("--track: wandb is not installed (pip install .[track])") from None
    mode = os.environ.get("WANDB_MODE")
    if mode is None and not wandb.login(prompt=False):
        print("no Weights & Biases API key: tracking offline (wandb sync uploads it later)")
        mode = "offline"
    return wandb.init(
        project=options.wandb_project_name,
        entity=options.wandb_entity,
        name=f"{info.env_id}__{info.system}__{info.seed}",
        config=info.hyperparameters | {"setting": info.setting, "seed": info.seed},
        dir=runs_dir,  # not in the record: W&B notes user and host
        mode=mode,
    )
