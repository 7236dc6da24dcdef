"""Command lines: parsing, one-line errors, signals, exit codes.

Exit codes: 0 completed, 1 failed, 2 bad input (nothing was trained or written), 130 interrupted by
Ctrl-C, 143 terminated by SIGTERM, 129 by SIGHUP.
"""

import contextlib
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any, TextIO, TypeVar

import tyro

from cleanba.record import RecordError

Args = TypeVar("Args")


class BadInput(ValueError):
    """Input that no run can be made with; the message is one line."""


@contextlib.contextmanager
def input_checks() -> Iterator[None]:
    """Turn the ValueErrors of checks into `BadInput`; also a decorator of a function that checks."""
    try:
        yield
    except ValueError as error:
        raise BadInput(str(error)) from None


def _one_line(console_text: str) -> str:
    """Reduce what tyro prints for wrong arguments to one line."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", console_text)
    lines = [line.strip(" │╭╮╰╯─|") for line in text.splitlines()]
    lines = [line for line in lines if line and not line.lower().startswith("for full helptext")]
    # a title that its first line repeats
    lines = lines[1:] if len(lines) > 1 and lines[1].startswith(lines[0]) else lines
    return re.sub(r"\s+", " ", "; ".join(lines))


def parse(args_class: Callable[..., Args], argv: Sequence[str], description: str = "") -> Args:
    """Parse a command line into a dataclass.

    Args:
      args_class: the dataclass; it may have a mapping FLAG_ALIASES from other names of flags to their
        own, such as those that an original implementation uses.
      argv: the arguments, without the program.
      description: text of `--help`.

    Raises:
      BadInput: with one line, for wrong arguments, or a number out of its declared range.
      SystemExit: for `--help`, with code 0.
    """
    aliases = getattr(args_class, "FLAG_ALIASES", {})
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        words.append(aliases.get(name, name) + equals + value)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            args = tyro.cli(args_class, args=words, description=description)
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise BadInput(_one_line(printed.getvalue()) or "wrong arguments") from None
    if is_dataclass(args):
        from cleanba.run.arguments import check_ranges  # which imports this module

        check_ranges(args)
    return args


class _Signals:
    """Turns SIGTERM, SIGHUP and SIGINT into exceptions of the main thread that are not lost.

    Python ignores exceptions in some places, such as callbacks of the garbage collector, and jax has one:
    a signal that arrives there would have no effect. `hook`, a `sys.unraisablehook`, sends it again.
    Exceptions in the hook itself are ignored too, so a signal that arrives there raises none.
    """

    SECONDS = 0.05  # until a signal is sent again

    def __init__(self) -> None:
        self._in_hook = False
        self._arrived: int | None = None  # signal that arrived during the hook
        self._raised = 0  # exceptions raised

    def install(self) -> None:
        """Handle the signals from here on."""
        signal.signal(signal.SIGTERM, self.handle)
        # Shells start background jobs with SIGINT ignored; a launcher's SIGINT must work there too.
        signal.signal(signal.SIGINT, self.handle)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # set by nohup
            signal.signal(signal.SIGHUP, self.handle)
        sys.unraisablehook = self.hook

    def handle(self, number: int, frame: Any) -> None:
        """Raise the exception of a signal."""
        if self._in_hook:
            self._arrived = number
            return
        self._raised += 1
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def hook(self, ignored: Any) -> None:
        """Report an ignored exception as usual; if it was that of a signal, send the signal again."""
        self._in_hook = True
        sys.__unraisablehook__(ignored)
        number = None
        if isinstance(ignored.exc_value, KeyboardInterrupt):
            number = signal.SIGINT
        elif isinstance(ignored.exc_value, SystemExit) and isinstance(ignored.exc_value.code, int):
            number = ignored.exc_value.code - 128
        number, self._arrived = number or self._arrived, None
        if number is not None:
            threading.Thread(target=self._send, args=(number,), daemon=True).start()
        self._in_hook = False

    def _send(self, number: int) -> None:
        """Send a signal until it has raised its exception.

        Once may not be enough: CPython 3.11 can enter a blocking call just after the signal has arrived,
        and handles it only when that returns, or is interrupted by the next one.
        """
        before = self._raised
        while self._raised == before:
            time.sleep(self.SECONDS)
            if self._raised == before:
                os.kill(os.getpid(), number)


class _Printed:
    """A standard stream whose reader may leave, as in `| head`: the rest is dropped, and training goes on."""

    def __init__(self, stream: TextIO):
        """Print to a stream."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        with self._without_reader():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what was written, or drop it."""
        with self._without_reader():
            self._stream.flush()

    @contextlib.contextmanager
    def _without_reader(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        """Everything else is the stream's."""
        return getattr(self._stream, name)


def exit_code(
    args_class: Callable[..., Args],
    main: Callable[[Args], None],
    argv: Sequence[str],
    description: str = "",
) -> int:
    """Run a program's `main` on a command line; print its error, if any, and return its exit code.

    Args:
      args_class: dataclass of the command line.
      main: the program.
      argv: the arguments, without the program.
      description: text of `--help`.
    """
    try:
        main(parse(args_class, argv, description))
    except (BadInput, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
    except Exception:
        import traceback

        traceback.print_exc()
        return 1
    return 0


def run_command_line(
    args_class: Callable[..., Args], main: Callable[[Args], None], description: str
) -> None:
    """Run a program's `main` on its own command line, and end the process with its exit code.

    SIGTERM and SIGHUP raise SystemExit, and SIGINT KeyboardInterrupt, in the main thread, so that a run log
    or record used as a context manager is closed as interrupted. A reader of the output that leaves ends
    nothing.

    Args:
      args_class: dataclass of the command line.
      main: the program.
      description: text of `--help`.
    """
    _Signals().install()
    sys.stdout, sys.stderr = _Printed(sys.stdout), _Printed(sys.stderr)
    code = exit_code(args_class, main, sys.argv[1:], description)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # Threads of a failed run may still be inside XLA or EnvPool, where the interpreter's orderly
        # shutdown would wait for them or abort. The record is closed by now.
        os._exit(code)
