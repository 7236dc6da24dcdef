"""Check a study's flags before its first run, by the programs' own declarations of names, types and ranges.

Reading a program's declarations imports the program, and with it jax, torch or Ray. This happens in a process
of its own, started once per study:

    python -m experiments.flag_check < commands.json

The input is a list of `Command`. The output is one line for the first flags that a program
refuses, or nothing.
"""

import importlib
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from cleanba.run.command_line import BadInput, parse
from experiments import systems
from experiments.study import PlannedRun, StudyError


class Command(msgspec.Struct, frozen=True):
    """A run's flags.

    Attributes:
      run: name of the run.
      module: the program's, with a dataclass `Args` of its flags.
      flags: the words of its command line.
    """

    run: str
    module: str
    flags: list[str]


def check_flags(runs: Sequence[PlannedRun]) -> None:
    """Refuse runs whose flags their programs would refuse: unknown ones, wrong types, values out of range.

    Runs that differ by environment and seed alone are checked once. Programs that do not come with the
    toolkit check their own flags when they start.

    Raises:
      StudyError: for the first such run.
    """
    commands = list(_commands(runs))
    if not commands:
        return
    done = subprocess.run(
        [sys.executable, "-m", "experiments.flag_check"],
        input=msgspec.json.encode(commands),
        capture_output=True,
        cwd=systems.ROOT,
    )
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise StudyError(f"the flags of the programs cannot be checked: {last}")
    if line := done.stdout.decode().strip():
        raise StudyError(line)


def _commands(runs: Iterable[PlannedRun]) -> Iterable[Command]:
    seen = set()
    for run in runs:
        kind = (run.system, msgspec.json.encode((run.setting, dict(run.hyperparameters))))
        if kind in seen or not _is_ours(run.program.script):
            continue
        seen.add(kind)
        module = run.program.script.removesuffix(".py").replace("/", ".")
        yield Command(run.name, module, systems.arguments(run))


def _is_ours(script: str) -> bool:
    return not Path(script).is_absolute() and Path(script).parts[0] in ("cleanba", "baselines")


def first_refusal(commands: Iterable[Command]) -> str:
    """Return a line about the first flags that a program refuses, or ''."""
    for command in commands:
        try:
            parse(importlib.import_module(command.module).Args, command.flags)
        except BadInput as error:
            return f"{command.run}: {error}"
    return ""


if __name__ == "__main__":
    print(first_refusal(msgspec.json.decode(sys.stdin.buffer.read(), type=list[Command])))
