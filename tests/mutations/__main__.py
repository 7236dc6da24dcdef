"""Make small changes to the code, one at a time, and report those that no test notices.

    python -m tests.mutations                      # all of mutations.toml, in a copy of the source
    python -m tests.mutations --only replicates    # those of one function

The working tree is not touched: the tracked files are copied to a temporary folder. A change that no longer
applies, because the code has moved on, is an error too.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cleanba.run.command_line import BadInput, run_command_line

ROOT = Path(__file__).resolve().parents[2]
SECONDS_PER_CHANGE = 180  # after which the tests are taken to hang, which is noticed


class Mutation(msgspec.Struct, forbid_unknown_fields=True):
    """A change of one place."""

    file: str
    function: str
    change: str
    old: str
    new: str
    tests: str  # arguments of pytest


class Mutations(msgspec.Struct, forbid_unknown_fields=True):
    """The content of mutations.toml."""

    mutations: list[Mutation]


@dataclass(frozen=True)
class Args:
    """Which changes to make."""

    only: tuple[str, ...] = ()
    """Functions or files; by default all."""


def read() -> list[Mutation]:
    """Return the changes of mutations.toml."""
    text = Path(__file__).with_name("mutations.toml").read_bytes()
    return msgspec.toml.decode(text, type=Mutations).mutations


def copy_source(folder: Path) -> None:
    """Copy the tracked files of the checkout to a folder."""
    names = subprocess.check_output(["git", "-C", ROOT, "ls-files", "-z"], text=True).split("\0")
    for name in filter(None, names):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)


def is_noticed(mutation: Mutation, folder: Path) -> bool:
    """Make a change in a copy of the source, run its tests there, and take the change back."""
    path = folder / mutation.file
    source = path.read_text()
    path.write_text(source.replace(mutation.old, mutation.new))
    options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not soak", *shlex.split(mutation.tests))
    pytest = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = pytest.wait(SECONDS_PER_CHANGE)
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(source)
        with contextlib.suppress(ProcessLookupError):  # what it started, and itself if it hangs
            os.killpg(pytest.pid, signal.SIGKILL)
    if 1 < code < 128:  # pytest itself failed, or selected no test; 128 + a signal is a crash
        raise BadInput(f"{mutation.tests}: pytest ends with exit code {code}")
    return code != 0


def main(args: Args) -> None:
    """Make the changes, print the outcome of each, and exit with 1 if one was not noticed."""
    chosen = [m for m in read() if not args.only or {m.function, m.file} & set(args.only)]
    if not chosen:
        raise BadInput(f"--only {' '.join(args.only)}: no change is in this function or file")
    stale = [m for m in chosen if (ROOT / m.file).read_text().count(m.old) != 1]
    for m in stale:
        print(f"does not apply  {m.file} {m.function}: {m.change}")
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        copy_source(Path(temporary))
        for m in chosen:
            if m not in stale:
                noticed = is_noticed(m, Path(temporary))
                unnoticed += not noticed
                print(
                    f"{'noticed' if noticed else 'NOT NOTICED'}  {m.file} {m.function}: {m.change}"
                )
    if stale or unnoticed:
        raise SystemExit(1)


if __name__ == "__main__":
    run_command_line(Args, main, "Do the tests notice small changes of the code?")
