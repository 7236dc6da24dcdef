"""`make bench`, at its smallest sizes: each program measures, prints a table and writes what it measured."""

import json
import sys

import pytest

from cleanba.command_line import BadInput
from experiments import (
    benchmark,
    benchmark_analysis,
    benchmark_baselines,
    benchmark_exactness,
    benchmark_hts,
    benchmark_report,
    benchmark_systems,
)

WITH_CASES = (benchmark, benchmark_baselines, benchmark_systems)


@pytest.fixture
def quick(monkeypatch):
    """Trainers are timed for a few updates, and parts for a moment."""
    short = [case._replace(updates=6) for case in benchmark.CASES if case.name == "impala-cartpole"]
    monkeypatch.setattr(benchmark, "CASES", short)
    monkeypatch.setattr(benchmark_exactness, "CASES", [short[0]._replace(num_groups=4)])
    monkeypatch.setattr(benchmark_exactness, "REPETITIONS", 1)


@pytest.mark.parametrize("module", WITH_CASES, ids=lambda module: module.__name__.split(".")[-1])
def test_an_unknown_case_is_bad_input(module):
    with pytest.raises(BadInput, match="--cases pacman: choose from "):
        module.main(module.Args(cases=("pacman",)))


def test_trainers_are_measured_against_the_ceilings(tmp_path, capsys, quick):
    path = tmp_path / "made" / "benchmark.json"
    args = benchmark.Args(cases=("impala-cartpole",), pool_sizes=(2,), json=str(path))
    benchmark.main(args)
    (row,) = json.loads(path.read_text())["results"]
    seconds = 1 / row["env"] + 1 / row["forward"] + row["gradients_per_step"] / row["gradient"]
    assert row["ceiling"] == pytest.approx(1 / seconds)
    assert row["cleanba_ratio"] == pytest.approx(row["cleanba"] / row["ceiling"])
    assert min(row["cleanba"], row["synchronous"]) > 0
    assert f"{row['cleanba']:,.0f}" in capsys.readouterr().out


def test_what_a_record_of_the_actions_costs_is_measured(quick):
    """The other half of `benchmark_exactness` is eight runs of the trainer that is timed above."""
    row = benchmark_exactness.measure_record(benchmark_exactness.CASES[0])
    assert row["bytes_per_step"] > 0
    assert row["replay_over_envpool"] == pytest.approx(row["replay"] / row["envpool"])


def test_systems_are_measured_side_by_side(tmp_path, capsys):
    path = tmp_path / "systems.json"
    cases = ("hts_rl_a2c-sync", "hts_rl_a2c")
    benchmark_systems.main(benchmark_systems.Args(cases=cases, steps=1600, json=str(path)))
    rows = json.loads(path.read_text())
    assert [row["system"] for row in rows] == list(cases)
    assert [row["ratio"] for row in rows] == [1.0, rows[1]["speed"] / rows[0]["speed"]]
    assert f"{rows[1]['speed']:,.0f}" in capsys.readouterr().out


def test_hts_rl_is_measured_against_its_formula(tmp_path):
    path = tmp_path / "hts.json"
    args = benchmark_hts.Args(delays=(0.001,), updates=1, num_actors=1, json=str(path))
    benchmark_hts.main(args)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["ratio"] == pytest.approx(row["hts"]["sps"] / row["synchronous"]["sps"])
    assert row["ratio_predicted"] == pytest.approx(
        row["hts_predicted"] / row["synchronous_predicted"]
    )
    assert row["ratio_predicted"] > 1


def test_the_parts_of_a_baseline_are_measured(capsys):
    args = benchmark_baselines.Args(cases=("moolib-nature",), ceilings_only=True)
    benchmark_baselines.main(args)
    parts = json.loads(capsys.readouterr().out)
    assert min(parts.values()) > 0


def test_a_report_of_made_up_records_is_timed(tmp_path, capsys):
    path = tmp_path / "report.json"
    small = {"games": 2, "systems": 2, "seeds": 3, "updates": 20, "rollouts": 40, "episodes": 150}
    benchmark_report.main(benchmark_report.Args(**small, json=str(path)))
    measured = json.loads(path.read_text())
    assert measured["records"] == 12
    assert measured["seconds"] > 0
    assert "2 games x 2 systems x 3 seeds: 12 records" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [{"games": 58}, {"systems": 0}, {"seeds": 0}, {"episodes": 0}])
def test_a_report_of_an_impossible_size_is_refused(wrong):
    with pytest.raises(BadInput, match=next(iter(wrong))):
        benchmark_report.main(benchmark_report.Args(**wrong))


def test_reading_bootstrap_and_curves_are_timed(capsys, monkeypatch):
    words = ["benchmark_analysis", "reading", "--runs", "4", "--episodes", "50"]
    monkeypatch.setattr(sys, "argv", words)
    assert benchmark_analysis.main() == 0
    assert "4 runs" in capsys.readouterr().out
    for name, small in (("GAMES", 3), ("REPETITIONS", 50)):
        monkeypatch.setattr(benchmark_analysis, name, small)
    monkeypatch.setattr(sys, "argv", ["benchmark_analysis", "bootstrap", "curves"])
    assert benchmark_analysis.main() == 0
    printed = capsys.readouterr().out
    assert "4 systems x 3 games x 3 seeds, 50 repetitions" in printed
    assert "4 systems x 100 points" in printed
