"""docs/differences.md: the flags in its tables exist in the programs concerned."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args

import pytest

from baselines import action_guidance, cleanrl_ppo, hts_rl, monobeast_study, ppo_microrts
from baselines.moolib_atari import options as moolib
from baselines.worker_schemes import options as worker_schemes
from cleanba import cleanba_impala, cleanba_ppo

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "differences.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
PROGRAMS = {
    "Cleanba PPO and IMPALA": (cleanba_ppo.Args, cleanba_impala.Args),
    "monobeast": (monobeast_study.Args,),
    "moolib": (moolib.Args,),
    "CleanRL's PPO": (cleanrl_ppo.Args,),
    "HTS-RL": (hts_rl.Args,),
    "PPO on µRTS": (ppo_microrts.Args,),
    "Action guidance": (action_guidance.Args,),
    "Worker schemes": (worker_schemes.Args,),
}
OF_TORCHRUN = {"max_restarts"}


def names(args):
    """Names of all options of a program, those of nested dataclasses too."""
    for field in fields(args):
        default = field.default
        yield from names(type(default)) if is_dataclass(default) else [field.name]


def rows(section):
    """The cells of a section's tables of differences."""
    for line in SECTIONS[section].splitlines():
        cells = re.split(r" \|(?= |$)", line.removeprefix("|"))
        if line.startswith("| ") and len(cells) == 7 and not set(line) <= set("| -"):
            yield [cell.strip() for cell in cells[:6]]


@pytest.mark.parametrize("section", PROGRAMS)
def test_every_flag_that_restores_the_original_exists(section):
    known = {name for args in PROGRAMS[section] for name in names(args)} | OF_TORCHRUN
    table = list(rows(section))[1:]
    assert len(table) > 10
    named = {
        flag.replace("-", "_").removeprefix("no_")
        for *_, cell in table
        for flag in re.findall(r"--([a-z][a-z-]*)", cell)
    }
    assert named <= known


@pytest.mark.parametrize("section", PROGRAMS)
def test_every_difference_says_whether_it_changes_learning(section):
    words = ("yes", "slightly", "hardly", "no")
    for name, original, here, _, learning, _ in list(rows(section))[1:]:
        assert original, name
        assert here, name
        assert learning.startswith(words), (name, learning)


def test_every_part_of_compat_is_in_the_table():
    parts = {cell.strip("`") for *_, cell in rows("Cleanba PPO and IMPALA")}
    for args in (cleanba_ppo.Args, cleanba_impala.Args):
        (of_compat,) = [field.type for field in fields(args) if field.name == "compat"]
        literal = get_args(get_args(of_compat)[0])[0]  # of Annotated[tuple[Literal[...], ...], ...]
        assert set(get_args(literal)) - {"original"} <= parts
        assert "original" in get_args(literal)
