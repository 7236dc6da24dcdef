"""The targets of the Makefile: each says what it does, and starts what is there with flags that it takes."""

import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from reports import paper, paper_tables

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
GIVEN = (
    "STUDY=base",
    "PRESET=cpu",
    "RUN=runs/base/x",
    "RETRY=1",
    "CLUSTER=slurm",
    "PUBLISHED=there",
)
TARGETS = sorted(
    {
        *re.findall(r"^([a-z0-9_]+) ?:.*## ", MAKEFILE, re.MULTILINE),
        *paper.FIGURES,
        *paper_tables.TABLES,
    }
)


def commands(target, *more):
    """Return what make would start for a target, were everything installed."""
    words = ["make", "-n", "-o", ".venv/installed", target, *GIVEN, *more]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line.lstrip("@")) for line in done.stdout.splitlines()]
    return [line for line in lines if line and line[0].endswith("bin/python")]


@cache
def help_of(module):
    return subprocess.run(
        [sys.executable, "-m", module, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_starts_programs_that_are_there_with_flags_that_they_have(target):
    for words in commands(target):
        if words[1] != "-m" or words[2] in ("pip", "pytest", "venv"):
            continue
        assert find_spec(words[2]), words
        for flag in re.findall(r"(?<= )--[a-z-]+", " ".join(words[3:])):
            assert flag in help_of(words[2]), (flag, words)


def test_figures_and_tables_are_targets_that_pass_on_what_is_asked():
    for name in (*paper.FIGURES, *paper_tables.TABLES):
        (words,) = commands(name, "RUNS=mine", "OUT=there")
        assert words[3] == name
        text = " ".join(words)
        assert "--runs mine --out there --preset cpu" in text
    (words,) = commands("fig3", "SOURCE=published")
    assert " ".join(words).endswith("--source published --published there")


def test_help_lists_every_target_that_has_a_line():
    text = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in re.findall(r"^([a-z0-9_]+) ?:.*## ", MAKEFILE, re.MULTILINE):
        assert f"make {target} " in text, target
