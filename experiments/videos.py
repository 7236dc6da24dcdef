"""Records a video of each system of a study: `python -m experiments.videos quickstart`.

The first completed run of each system, in the order of names, plays in new environments
(`cleanba.evaluate`, `baselines.evaluate`). The video of its first game is written to `videos/<env_id>.mp4`
in its record, where the study's page finds it. A run that has a video already keeps it.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cleanba.record import RecordError, Run, find_runs, read_run
from cleanba.record.folder import VIDEOS
from cleanba.run.command_line import BadInput, parse


@dataclass(frozen=True)
class Args:
    """Command line."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Name of the study."""
    runs: str | None = None
    """Folder with its run records; by default runs/<name>."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 if a system has no video, or 2 for bad input."""
    try:
        args = parse(Args, sys.argv[1:] if argv is None else argv, "Record videos of a study.")
        chosen = first_runs(Path(args.runs or f"runs/{args.name}"))
    except (BadInput, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(not all([record(run) for run in chosen]))


def first_runs(runs: Path) -> list[Run]:
    """Return the first completed run of each system, in the order of names.

    Raises:
      BadInput: if there is none.
    """
    chosen: dict[str, Run] = {}
    for path in find_runs(runs):
        run = read_run(path)
        if run.completed:
            chosen.setdefault(run.info.system, run)
    if not chosen:
        raise BadInput(f"{runs}: no completed run there")
    return list(chosen.values())


def record(run: Run) -> bool:
    """Record a video of a run, unless it has one; print its file, or why there is none.

    Returns:
      Whether the run has a video.
    """
    there = sorted(run.path.glob(VIDEOS))
    if there:
        print(f"{there[0]} (kept)")
        return True
    video = run.path / "videos" / f"{run.info.env_id.replace('/', '-')}.mp4"
    program = "baselines.evaluate" if "torch" in run.info.versions else "cleanba.evaluate"
    command = [sys.executable, "-m", program, str(run.path), "--video", str(video)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)  # errors are printed
    if done.returncode:
        print(f"{run.path}: no video")
        return False
    print(f"{video}: {done.stdout.strip()}")
    return True


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit silently on a closed pipe (`| head`)
    sys.exit(main())
