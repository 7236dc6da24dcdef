"""How a system declares its hyperparameters and settings, and how their ranges are checked.

    @dataclass(frozen=True)
    class Args:
        env_id: NotHyper[str] = "Breakout-v5"
        learning_rate: Hyper[Positive] = 2.5e-4
        num_steps: Hyper[Count | None] = None
        hardware: Nested[Hardware] = Hardware()
        run: Nested[RunOptions] = RunOptions()

A field is recorded as a hyperparameter only if it is declared as one. `check_args` refuses a class with
a field that is neither `Hyper`, `NotHyper` nor `Nested`, so a new flag cannot be forgotten.
"""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from msgspec import Meta

from cleanba.run.command_line import BadInput

T = TypeVar("T")

HYPERPARAMETER = "hyperparameter"
NOT_HYPERPARAMETER = "not a hyperparameter"

Hyper = Annotated[T, HYPERPARAMETER]  # may change what is learned; recorded and compared
NotHyper = Annotated[T, NOT_HYPERPARAMETER]  # names the run, or is resolved into other fields
Nested = Annotated[T, tyro.conf.arg(name="")]  # a dataclass whose flags have no prefix

Positive = Annotated[float, Meta(gt=0, description="more than 0")]
NotNegative = Annotated[float, Meta(ge=0, description="0 or more")]
Share = Annotated[float, Meta(ge=0, le=1, description="from 0 to 1")]
PositiveShare = Annotated[float, Meta(gt=0, le=1, description="more than 0 and at most 1")]
# Larger numbers are typing errors, and would overflow where they are multiplied.
LARGEST = 10**15
Count = Annotated[int, Meta(ge=1, le=LARGEST, description="1 or more")]
CountOrZero = Annotated[int, Meta(ge=0, le=LARGEST, description="0 or more")]


def flag(field: str) -> str:
    """Return the command-line flag of a field: `num_envs` is `--num-envs`."""
    return f"--{field.replace('_', '-')}"


def hyperparameters(args: Any) -> dict[str, Any]:
    """Return the fields that are declared as `Hyper`, by name, in order."""
    hints = get_type_hints(type(args), include_extras=True)
    return {
        name: getattr(args, name)
        for name, hint in hints.items()
        if HYPERPARAMETER in _annotations(hint)
    }


def check_args(args: Any) -> None:
    """Check the declaration of a command line and the range of every value, nested ones included.

    Raises:
      TypeError: if a field of the class is neither `Hyper`, `NotHyper` nor `Nested`.
      BadInput: for the first value out of range, e.g. `--learning-rate 0.0: must be more than 0`.
    """
    check_declarations(type(args))
    check_ranges(args)


def check_declarations(args_class: type) -> None:
    """Check that each field of a command line is declared as `Hyper`, `NotHyper` or `Nested`.

    Raises:
      TypeError: if one is not; it names the field.
    """
    hints = get_type_hints(args_class, include_extras=True)
    for field in fields(args_class):
        declared = {HYPERPARAMETER, NOT_HYPERPARAMETER} & set(_annotations(hints[field.name]))
        if is_dataclass(_plain(hints[field.name])) == bool(declared) or len(declared) > 1:
            raise TypeError(
                f"{args_class.__module__}.{args_class.__qualname__}.{field.name}: "
                "declare it as one of Hyper, NotHyper or (a dataclass) Nested"
            )


def check_ranges(args: Any, prefix: str = "") -> None:
    """Check the range that is declared for each number of a command line, nested ones included.

    Args:
      args: the parsed command line.
      prefix: of its flags, such as `hts.` of `--hts.delays`.

    Raises:
      BadInput: for the first value out of range.
    """
    hints = get_type_hints(type(args), include_extras=True)
    for field in fields(args):
        value = getattr(args, field.name)
        hint = hints[field.name]
        if is_dataclass(value):
            check_ranges(value, prefix if _is_nested(hint) else f"{prefix}{field.name}.")
            continue
        for number, meta in _bounded(value, hint):
            if not _in_range(number, meta):
                too_large = meta.le == LARGEST and number > LARGEST
                allowed = "at most 10^15" if too_large else meta.description
                raise BadInput(f"{flag(prefix + field.name)} {number}: must be {allowed}")


def _bounded(value: Any, hint: Any) -> Iterator[tuple[float, Meta]]:
    """Yield the numbers in a value, each with the range that its type declares."""
    if value is None or isinstance(value, str):
        return
    if isinstance(value, tuple):
        for inner in _walk(hint):
            if get_origin(inner) is tuple:
                for item in value:
                    yield from _bounded(item, get_args(inner)[0])
        return
    for inner in _walk(hint):
        for note in _annotations(inner):
            if isinstance(note, Meta):
                yield value, note


def _walk(hint: Any) -> Iterator[Any]:
    """Yield a type, what it annotates, and the members of a union."""
    yield hint
    if get_origin(hint) is Annotated:
        yield from _walk(hint.__origin__)
    elif get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from _walk(member)


def _in_range(number: float, meta: Meta) -> bool:
    above = meta.gt is None or number > meta.gt
    at_least = meta.ge is None or number >= meta.ge
    at_most = meta.le is None or number <= meta.le
    return math.isfinite(number) and above and at_least and at_most


def _annotations(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__metadata__", ())


def _is_nested(hint: Any) -> bool:
    return bool(_annotations(hint)) and _annotations(hint) == _annotations(Nested[Any])


def _plain(hint: Any) -> Any:
    return hint.__origin__ if get_origin(hint) is Annotated else hint
