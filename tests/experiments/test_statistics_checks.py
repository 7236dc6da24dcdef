"""The simulations that docs/statistics.md and `analysis.references` quote."""

import re
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from analysis import aggregates, bootstrap, references
from experiments import verdict_rates

ROOT = Path(__file__).resolve().parents[2]


def run(*words):
    """The lines that a command prints, run as a user runs it."""
    command = [sys.executable, "-m", "experiments.statistics_checks", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def quoted(name):
    """The lines of a command in docs/statistics.md."""
    text = (ROOT / "docs/statistics.md").read_text()
    after = text.split(f"    $ python -m experiments.statistics_checks {name}\n")[1].splitlines()
    return [line[4:] for line in takewhile(lambda line: line.startswith("    "), after)]


def without_numbers(lines):
    """Lines without their shares, and without the first, which tells the sizes."""
    return [re.sub(r" *[\d.]+%", " %", line) for line in lines[1:]]


def test_the_table_of_coverage_has_the_rows_and_columns_of_the_docs():
    sizes = ("--simulations", "1", "--repetitions", "20", "--true-runs", "500")
    lines = run("coverage", *sizes)
    assert lines[0] == "20 games, 1 simulations, 20 repetitions, nominal 95%"
    assert without_numbers(lines) == without_numbers(quoted("coverage"))


@pytest.mark.parametrize("seeds", [3, 10])
def test_an_interval_of_the_mean_covers_as_often_as_the_docs_say(seeds):
    (row,) = [line.split() for line in quoted("coverage") if line.startswith(f"{seeds:5} percent")]
    documented = float(row[4].rstrip("%")) / 100
    rng = np.random.default_rng(0)
    levels = rng.lognormal(0, 1, 20)
    truth = levels.mean() * np.exp(0.5**2 / 2)  # of log-normal scores
    hits, simulations = 0, 600
    for number in range(simulations):
        scores = list((levels * rng.lognormal(0, 0.5, (seeds, 20))).T)
        found = bootstrap.interval(
            lambda counts, scores=scores: aggregates.mean(scores, counts),
            [seeds] * 20, 400, seed=number,
        )  # fmt: skip
        hits += found.low <= truth <= found.high
    error = np.sqrt(documented * (1 - documented) * (1 / simulations + 1 / 1000))
    assert hits / simulations == pytest.approx(documented, abs=3 * error)


def test_the_tables_of_verdicts_have_the_rows_of_the_docs_and_the_rates_of_their_cases():
    lines = run("verdicts", "--simulations", "1")
    assert without_numbers(lines) == without_numbers(quoted("verdicts"))
    (case,) = verdict_rates.UNPROTECTED
    expected = [
        f"{100 * verdict_rates.rates(case, *size, 1, permutations=1).equivalent:.1f}%"
        for size in verdict_rates.UNPROTECTED_SIZES
    ]
    (row,) = [line for line in lines if line.startswith(case.name)]
    assert row[36:].split() == expected
    power = lines[-6:]
    assert [line.split()[-1] for line in power] == ["100.0%"] * 6  # with 100 runs of each side
    for line in power:
        if "equivalent" in line:  # which needs 29 runs in all
            assert line[42:].split()[0] == "0.0%"


def test_random_play_scores_what_the_references_say():
    lines = run("random", "--episodes", "200")
    names, numbers = zip(*(line.split(": ") for line in lines), strict=True)
    assert list(names) == list(references.SOLVED)
    for name, text in zip(names, numbers, strict=True):
        mean, error = map(float, re.fullmatch(r"(.+) \+- (.+) \(200 episodes\)", text).groups())
        random, solved = references.SOLVED[name]
        assert abs(mean - random) <= 4 * error + 0.01 * (solved - random), name
