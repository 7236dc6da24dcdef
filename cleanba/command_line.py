"""Command lines: options that every trainer has, one-line errors, exit codes.

Exit codes: 0 completed, 1 failed, 2 bad input (nothing was trained or written), 130 interrupted by
Ctrl-C, 143 ended by SIGTERM.
"""

import contextlib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tyro

from cleanba.record import RecordError

Args = TypeVar("Args")


class BadInput(ValueError):
    """Input that cannot be trained with; the message is one line."""


@dataclass(frozen=True)
class RunOptions:
    """Where a run is recorded, and what else is kept of it."""

    runs_dir: str = "runs"
    """Folder of the run records."""
    study: str = "default"
    """Study that the run belongs to: its record is in <runs-dir>/<study>/."""
    setting: str | None = None
    """Name of the hardware setting; by default the layout, such as a0-l1,2-d1-t2."""
    overwrite: bool = False
    """Delete the record of an earlier run of the same name."""
    checkpoint_every: int = 0
    """Updates between two checkpoints; 0 for none."""
    keep_checkpoints: int = 2
    """Checkpoints to keep, the newest; 0 keeps all."""
    resume: bool = False
    """Go on with a run that was killed, from its newest checkpoint, to the same bits as if it had not
    been; start it if there is none."""
    progress: bool = True
    """Show a progress bar."""
    log_frequency: int = 1
    """Updates between two points in TensorBoard and Weights & Biases (the record has them all)."""
    fingerprint_every: int = 10
    """Updates between two fingerprints (SHA-256) of the parameters in the record."""
    track: bool = False
    """Track the run with Weights & Biases (offline where no API key is set)."""
    wandb_project_name: str = "cleanba"
    """Project in Weights & Biases."""
    wandb_entity: str | None = None
    """Entity (team) in Weights & Biases."""
    capture_video: bool = False
    """Record a video of the trained agent's first evaluation episode."""
    save_model: bool = False
    """Save the final parameters, and evaluate them."""
    upload_model: bool = False
    """Upload the saved model to the Hugging Face Hub (needs huggingface_hub and a token)."""
    hf_entity: str = ""
    """User or organisation on the Hugging Face Hub."""


def _one_line(console_text: str) -> str:
    """Reduce what tyro prints for wrong arguments to one line."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", console_text)
    lines = [line.strip(" │╭╮╰╯─|") for line in text.splitlines()]
    lines = [line for line in lines if line and not line.lower().startswith("for full helptext")]
    return re.sub(r"\s+", " ", "; ".join(lines))


def parse(args_class: Callable[..., Args], argv: Sequence[str], description: str) -> Args:
    """Parse a command line into a dataclass; wrong arguments are one line and exit code 2."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(args_class, args=list(argv), description=description)
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise BadInput(_one_line(printed.getvalue()) or "wrong arguments") from None


def _on_sigterm(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


def _deliver_again(ignored: Any) -> None:
    """Send a signal again whose exception was raised where Python ignores exceptions.

    Such a place is a callback of the garbage collector, and jax has one: a signal that arrives there would
    end nothing. (A hook of `sys.unraisablehook`; what is raised in it is ignored too, hence a moment later.)
    """
    sys.__unraisablehook__(ignored)
    number = {SystemExit: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}.get(ignored.exc_type)
    if number is not None:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()


def run_command_line(
    args_class: Callable[..., Args], main: Callable[[Args], None], description: str
) -> None:
    """Run a program's `main` on its command line, and end the process with the right exit code.

    Args:
      args_class: dataclass of the command line.
      main: the program.
      description: text of `--help`.
    """
    signal.signal(signal.SIGTERM, _on_sigterm)
    sys.unraisablehook = _deliver_again
    # Shells start background jobs with SIGINT ignored; a launcher's SIGINT is to be heard there too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        main(parse(args_class, sys.argv[1:], description))
    except (BadInput, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
    except Exception:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # Threads of a failed run may still be inside XLA or EnvPool, where the interpreter's orderly
        # end would wait for them or abort. The record is closed by now.
        os._exit(code)
