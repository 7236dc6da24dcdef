"""Command lines built from data."""

from collections.abc import Mapping
from typing import Any


def flag_with_value(flag: str, value: Any) -> list[str]:
    """Return a flag with its value as words of a command line.

    Args:
      flag: such as `--num-envs`.
      value: True and False become `--name` and `--no-name`; the items of a list or tuple follow one flag.
    """
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    return [flag, str(value)]


def flags(options: Mapping[str, Any]) -> list[str]:
    """Translate options into command-line flags, in their order.

    Args:
      options: values by name, with underscores or hyphens; None is left out.

    Returns:
      The words, such as `["--num-envs", "8", "--no-anneal-lr", "--learner-device-ids", "0", "1"]`.
    """
    return [
        word
        for name, value in options.items()
        if value is not None
        for word in flag_with_value("--" + name.replace("_", "-"), value)
    ]
