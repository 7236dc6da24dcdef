"""Every flag of every system is declared, and every range is checked in one line."""

from dataclasses import dataclass, fields, is_dataclass, replace

import pytest

from baselines import cleanrl_ppo, hts_rl, monobeast_study
from baselines.moolib_atari import options as moolib
from baselines.worker_schemes import options as schemes
from cleanba import cleanba_impala, cleanba_ppo
from cleanba.run.arguments import (
    Count,
    Hyper,
    Nested,
    NotHyper,
    Positive,
    Share,
    check_args,
    check_declarations,
    hyperparameters,
)
from cleanba.run.command_line import BadInput, parse

SYSTEMS = (cleanba_ppo, cleanba_impala, cleanrl_ppo, hts_rl, monobeast_study, moolib, schemes)

# Top-level flags that are deliberately no hyperparameters.
NOT_HYPERPARAMETERS = {
    cleanba_ppo: {"local_num_envs"},
    cleanba_impala: {"local_num_envs"},
    cleanrl_ppo: set(),
    hts_rl: {"env_id", "seed"},
    monobeast_study: {"env", "seed", "mode"},
    moolib: {"env", "seed", "preset"},
    schemes: {"env_id", "seed"},
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_field_is_declared_and_the_defaults_are_in_range(system):
    args = system.Args()
    check_args(args)
    nested = {f.name for f in fields(args) if is_dataclass(getattr(args, f.name))}
    assert nested >= {"hardware", "run"}
    named = {f.name for f in fields(args)}
    assert set(hyperparameters(args)) == named - nested - NOT_HYPERPARAMETERS[system]


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_float_is_checked_to_be_finite_and_every_number_to_have_a_range(system):
    """But for the seed and device ids, which other checks know more about."""
    args = system.Args()
    groups = [(args, lambda x: x)]
    groups += [
        (getattr(args, f.name), lambda x, name=f.name: replace(args, **{name: x}))
        for f in fields(args)
        if is_dataclass(getattr(args, f.name))
    ]
    for group, whole in groups:
        for f in fields(group):
            value = getattr(group, f.name)
            if isinstance(value, float) or (type(value) is int and f.name != "seed"):
                for bad in (float("nan"), float("inf"), -1):
                    with pytest.raises(BadInput, match=f"^--{f.name.replace('_', '-')} "):
                        check_args(whole(replace(group, **{f.name: bad})))


@dataclass(frozen=True)
class Hardware:
    threads: Count = 1
    """Threads."""


@dataclass(frozen=True)
class Args:
    env_id: NotHyper[str] = "Catch-v0"
    """Environment."""
    rate: Hyper[Positive] = 0.1
    """Rate."""
    gamma: Hyper[Share | None] = None
    """Discount."""
    widths: Hyper[tuple[Count, ...] | None] = None
    """Widths."""
    hardware: Nested[Hardware] = Hardware()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "0"], "--rate 0.0: must be more than 0"),
        (["--rate", "inf"], "--rate inf: must be more than 0"),
        (["--gamma", "1.01"], "--gamma 1.01: must be from 0 to 1"),
        (["--widths", "3", "0"], "--widths 0: must be 1 or more"),
        (["--threads", "0"], "--threads 0: must be 1 or more"),
        (["--threads", str(10**30)], f"--threads {10**30}: must be at most 10^15"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_flag(words, message):
    with pytest.raises(BadInput) as caught:
        check_args(parse(Args, words))
    assert str(caught.value) == message


def test_values_at_the_ends_of_their_ranges_are_taken():
    args = parse(Args, ["--rate", "1e-9", "--gamma", "1", "--widths", "1", "--threads", "1"])
    check_args(args)
    assert hyperparameters(args) == {"rate": 1e-9, "gamma": 1.0, "widths": (1,)}


@dataclass(frozen=True)
class Forgotten:
    rate: Hyper[Positive] = 0.1
    new_flag: int = 3


@dataclass(frozen=True)
class Twice:
    rate: Hyper[NotHyper[Positive]] = 0.1


@dataclass(frozen=True)
class NestedHyper:
    hardware: Hyper[Hardware] = Hardware()


@pytest.mark.parametrize(
    ("args_class", "field"),
    [(Forgotten, "new_flag"), (Twice, "rate"), (NestedHyper, "hardware")],
)
def test_a_field_without_one_declaration_is_refused_when_the_program_starts(args_class, field):
    with pytest.raises(TypeError, match=rf"{args_class.__name__}.{field}: declare it as one of"):
        check_args(args_class())
    with pytest.raises(TypeError, match=field):
        check_declarations(args_class)
