"""The targets of the Makefile: each has a help line, and starts programs that exist with valid flags."""

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
    "DRY_RUN=1",
    "CLUSTER=slurm",
    "CLUSTER_OPTIONS=slurm_partition=gpu timeout_min=600",
    "PUBLISHED=there",
    "AUTHORS=A; B",
    "LICENSE=MIT",
    "OVERWRITE=1",
    "ARCHIVE=dist/base.zip",
    "SEED=1",
    "RUNS_MATCHING=x",
    "MODULE=there",
    "RESUME=1",
)
TARGETS = sorted(
    {
        *re.findall(r"^([a-z0-9_-]+) ?:.*## ", MAKEFILE, re.MULTILINE),
        *paper.FIGURES,
        *paper_tables.TABLES,
    }
)


SMALL = """
title = "A small study"
question = "Do the targets work?"
[settings.base]
num_actor_threads = 1
actor_device_ids = [0]
learner_device_ids = [0]
host_devices = 1
cores = 1
[[runs]]
systems = ["cleanba_ppo-sync"]
settings = ["base"]
env_ids = ["Catch-v0"]
seeds = [1, 2]
total_timesteps = 4096
[runs.hyperparameters]
num_envs = 8
num_steps = 32
"""


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


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_starts_programs_that_are_there_with_flags_that_they_have(target):
    for words in commands(target):
        if words[1] != "-m" or words[2] in ("pip", "pytest", "venv"):
            continue
        assert find_spec(words[2]), words
        for flag in re.findall(r"(?<= )--[a-z-]+", " ".join(words[3:])):
            assert re.search(rf"{flag}(?![\w-])", help_of(words[2])), (flag, words)


def test_figures_and_tables_are_targets_that_pass_on_what_is_asked():
    for name in (*paper.FIGURES, *paper_tables.TABLES):
        (words,) = commands(name, "RUNS=mine", "OUT=there")
        assert words[3] == name
        text = " ".join(words)
        assert "--runs mine --out there --preset cpu" in text
        (words,) = commands(name, "STUDY=")  # its own study
        assert "--study" not in words
    (words,) = commands("fig3", "STUDY=a path/to/my.toml")
    assert words[words.index("--study") + 1] == "a path/to/my.toml"
    (words,) = commands("fig3", "SOURCE=published")
    assert " ".join(words).endswith("--source published --published there")
    for name in paper_tables.TABLES:
        (words,) = commands(name, "SOURCE=published")
        assert " ".join(words).endswith("--source published")


@pytest.mark.parametrize("target", ["certify", "bench"])
def test_args_are_passed_on_word_by_word(target):
    (line,) = commands(target, "ARGS=--quick one$$(touch x) it's")
    assert line[3:6] == ["--quick", "one$(touch", "x)"]
    assert line[6] == "it's"


def test_help_lists_every_target_that_has_a_line():
    text = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in re.findall(r"^([a-z0-9_-]+) ?:.*## ", MAKEFILE, re.MULTILINE):
        assert f"make {target} " in text, target


@pytest.mark.soak
def test_the_targets_make_what_they_say_of_a_small_study(tmp_path):
    """Those that draw, certify or time have tests of their programs; the others install, or run this."""
    study, runs, site = tmp_path / "base.toml", tmp_path / "runs", tmp_path / "site"
    results = tmp_path / "results"
    study.write_text(SMALL)
    folders = (
        f"BIN={Path(sys.executable).parent}",
        f"RUNS={runs}",
        f"SITE={site}",
        f"RESULTS={results}",
    )
    run = runs / "base" / "cleanba_ppo-sync__base__Catch-v0__s1"

    def make(target, *words):
        words = ["make", "-o", ".venv/installed", target, *folders, *words]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "nothing was started" in make("study", f"STUDY={study}", "DRY_RUN=1")
    assert not runs.exists()
    assert "2 of 2 runs completed" in make("study", f"STUDY={study}")
    make("report", f"STUDY={study}")
    assert "A small study" in (site / "base" / "index.html").read_text()
    # not "base", which is another study
    assert "experiments.launch '…/base/study.toml'" in (site / "base" / "README.md").read_text()
    make("reports")
    assert "A small study" in (site / "index.html").read_text()
    make("publish-results", f"STUDY={study}")
    assert "[base](base/README.md)" in (results / "README.md").read_text()
    assert run.name in make("lag", f"RUN={run}")
    assert "episodes" in make("replay", f"RUN={run}")
    assert "openrlbenchmark.rlops" in make("rlops", f"STUDY={study}")
