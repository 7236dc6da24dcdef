"""Programs called in this process, as their command lines call them."""

from collections.abc import Callable
from typing import Any

from cleanba.run.command_line import exit_code, parse


def words(**values: Any) -> list[str]:
    """Flags of some values: `num_envs=8, anneal_lr=False` is `--num-envs=8 --no-anneal-lr`."""
    found = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            found += [f"--{flag}", *map(str, value)]
        else:
            found.append(f"--{flag}={value}")
    return found


def parsed(args_class: type, **values: Any) -> Any:
    """The command line of some values."""
    return parse(args_class, words(**values))


def refusal(args_class: type, main: Callable, capsys: Any, **values: Any) -> str:
    """The one line on stderr of a program that exits with code 2."""
    code = exit_code(args_class, main, words(**values))
    printed = capsys.readouterr()
    assert code == 2, printed.err
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert printed.out == ""
    return line
