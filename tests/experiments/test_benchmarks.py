"""`make bench` at its smallest sizes: each benchmark measures, prints a table and writes its results."""

import json
import math
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from cleanba.run.command_line import BadInput, parse
from experiments.benchmarks import __main__ as benchmarks
from experiments.benchmarks import (
    analysis,
    baselines,
    exactness,
    page,
    report,
    speed,
    systems,
    trainers,
)
from experiments.benchmarks.case import Case, Column, Row, Table

CARTPOLE = next(x for x in trainers.WORKLOADS if x.name == "impala-cartpole")._replace(updates=6)


def run(*words):
    benchmarks.main(parse(benchmarks.Args, words, ""))


def test_the_speed_of_a_run_is_that_between_its_updates():
    updates = [SimpleNamespace(step=100 * i, wall_time=9.0 + 0.5 * i) for i in range(5)]
    assert speed.steps_per_second(updates) == 200
    assert speed.steps_per_second(updates[2:]) == 200


def test_parts_that_take_turns_are_as_slow_as_their_times_together():
    parts = {"env": 100.0, "forward": 50.0, "gradient": 200.0, "gradients_per_step": 4.0}
    assert speed.ceiling(parts) == pytest.approx(1 / (0.01 + 0.02 + 0.02))


def test_a_program_that_fails_is_an_error_with_its_last_line(tmp_path):
    command = [sys.executable, "-c", "import sys; sys.exit('first\\nno such game')"]
    with pytest.raises(RuntimeError, match=r": no such game$"):
        speed.run_and_read(command, tmp_path)


# ---- the runner


@dataclass(frozen=True)
class Squares:
    """A benchmark without a measurement."""

    numbers: tuple[int, ...] = (2, 3)
    fails: bool = False
    columns = (Column("square", "square"), Column("half", "half", ".1f", ratio="half / whole"))

    def title(self):
        return "squares"

    def cases(self):
        if not self.numbers:
            raise BadInput("--squares.numbers is empty")
        return [Case(f"n{n}", lambda n=n: self.measure(n)) for n in self.numbers]

    def measure(self, n):
        if self.fails and n == self.numbers[-1]:
            raise RuntimeError("planted")
        return {"square": n * n, "half": n / 2, "kind": "int"}


@dataclass(frozen=True)
class Args:
    names: tuple[str, ...] = ()
    json: str | None = None
    squares: Squares = Squares()
    more: Squares = Squares((5,))


def rows_of(text):
    return [line.split() for line in text.splitlines() if line.startswith("n")]


def test_results_and_ratios_are_printed_as_tables_and_written(tmp_path, capsys):
    path = tmp_path / "made" / "results.json"
    benchmarks.main(Args(json=str(path)))
    found = json.loads(path.read_text())
    assert found["cores"] == speed.cores()
    assert {name: [row["case"] for row in table["rows"]] for name, table in found["tables"].items()} == {
        "squares": ["n2", "n3"], "more": ["n5"],
    }  # fmt: skip
    second = found["tables"]["squares"]["rows"][1]
    assert second["values"] == {"square": 9, "half": 1.5, "kind": "int"}
    measured, _, ratios = capsys.readouterr().out.partition("\nRatios\n")
    assert rows_of(measured) == [["n2", "4", "1.0"], ["n3", "9", "1.5"], ["n5", "25", "2.5"]]
    assert "squares: squares" in measured.splitlines()
    assert rows_of(ratios) == [["n2", "1.0"], ["n3", "1.5"], ["n5", "2.5"]]
    assert ratios.count("half / whole") == 2


@pytest.mark.parametrize(
    ("names", "cases"),
    [
        (("more",), ["n5"]),
        (("squares/n3",), ["n3"]),
        (("squares/*", "more"), ["n2", "n3", "n5"]),
        (("*/n[25]",), ["n2", "n5"]),
    ],
)
def test_names_and_patterns_choose_cases(capsys, names, cases):
    benchmarks.main(Args(names=names))
    measured = capsys.readouterr().out.partition("\nRatios\n")[0]
    assert [row[0] for row in rows_of(measured)] == cases


def test_what_was_measured_before_a_failure_is_kept(tmp_path):
    path = tmp_path / "results.json"
    with pytest.raises(RuntimeError, match="planted"):
        benchmarks.main(Args(json=str(path), squares=Squares((2, 3), fails=True)))
    (table,) = json.loads(path.read_text())["tables"].values()
    assert [row["case"] for row in table["rows"]] == ["n2"]


def test_an_earlier_result_is_kept_until_there_is_a_new_one(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("earlier")
    with pytest.raises(RuntimeError, match="planted"):
        benchmarks.main(Args(json=str(path), squares=Squares((2,), fails=True)))
    assert path.read_text() == "earlier"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("pacman",), "pacman: no such benchmark; choose from trainers, "),
        (("trainers/pacman*",), "no such benchmark"),
        (("hts", "--json", "/dev/null/x.json"), "--json /dev/null/x.json: "),
        (("--baselines.seconds", "0"), "--baselines.seconds"),
        (("--actions.repetitions", "0"), "--actions.repetitions"),
        (("--hts.delays", "0"), "--hts.delays"),
        (("--trainers.seconds", "nan"), "--trainers.seconds nan: must be more than 0"),
        (("--reading.episodes", "9" * 20), "--reading.episodes"),
        (("--systems.steps", "0"), "--systems.steps"),
        (("--curves.games", "0"), "--curves.games 0: must be 1 or more"),
        (("--report.games", "58"), "--report.games 58: must be from 1 to 57"),
        (("--report.systems", "0"), "--report.systems 0: must be from 1 to 4"),
        (("--report.seeds", "0"), "--report.seeds"),
        (("--report.episodes", "0"), "--report.episodes"),
        (("--report.lines", "0"), "--report.lines"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(monkeypatch, words, message):
    monkeypatch.setattr(benchmarks, "header", lambda *x: pytest.fail("measured"))
    with pytest.raises(BadInput, match=message) as caught:
        run(*words)
    assert "\n" not in str(caught.value)


def test_every_column_of_a_table_names_its_values():
    for name, benchmark in vars(benchmarks.Args()).items():
        if name not in ("names", "json"):
            assert benchmark.title()
            assert len({c.value for c in benchmark.columns}) == len(benchmark.columns), name
            assert len({case.name for case in benchmark.cases()}) == len(benchmark.cases()), name


# ---- the page


def results_of(systems):
    """Results of two benchmarks, one without a ratio."""
    columns = (Column("speed", "speed"), Column("ratio", "ratio", ".2f", ratio="first / this"))
    rows = [Row(case=name, values=values) for name, values in systems.items()]
    tables = {
        "systems": Table(title="Steps per second", columns=columns, rows=rows),
        "reading": Table(
            title="Records", columns=columns[:1], rows=[Row(case="reading", values={"speed": 7})]
        ),
    }
    return page.Results(
        date="2026-01-31", revision="0123456789abcdef", processor="AMD EPYC", cores=2,
        seconds=600.0, tables=tables,
    )  # fmt: skip


NAMES = list(page.COMPARED)
SPEEDS = {
    name: {"algorithm": "impala", "network": "resnet", "speed": 1000.4 + i, "ratio": 1.5}
    for i, name in enumerate(NAMES)
}


def test_the_page_has_the_ratios_first_and_then_all_that_was_measured():
    text = page.page(results_of(SPEEDS))
    assert "2 cores of an AMD EPYC took 10 minutes (2026-01-31, revision 0123456789ab)" in text
    ratios, _, rest = text.partition("\n## systems\n")
    assert "| systems | first / this |" in ratios
    assert f"| {NAMES[0]} | 1.50 |" in ratios
    assert "reading" not in ratios
    assert f"| {NAMES[1]} | 1,001 | 1.50 |" in rest
    assert "| reading | 7 |" in rest


def test_the_readmes_table_has_every_system_or_there_is_none():
    table = page.readme_table(results_of(SPEEDS))
    for name, shown in page.COMPARED.items():
        speed = f"{SPEEDS[name]['speed']:,.0f}"
        assert table.count(f"| IMPALA, ResNet | {shown} | {speed} | 1.50 |") == 1
    some = {name: SPEEDS[name] for name in NAMES[:-1]}
    with pytest.raises(BadInput, match=f"systems/{NAMES[-1]} was not measured"):
        page.readme_table(results_of(some))


def test_every_row_of_the_readmes_table_is_a_system():
    assert set(page.COMPARED) <= {workload.name for workload in systems.WORKLOADS}


def test_the_table_replaces_what_is_between_the_comments():
    text = f"above\n{page.BEGIN}old\n{page.END}below\n"
    assert page.between_comments(text, "new\n") == f"above\n{page.BEGIN}new\n{page.END}below\n"
    with pytest.raises(BadInput, match="lacks the lines"):
        page.between_comments("above\nbelow\n", "new\n")


def test_the_published_page_and_the_readmes_table_are_those_of_the_published_results():
    found = page.read(page.ROOT / "results/benchmarks.json")
    readme = (page.ROOT / "README.md").read_text()
    assert (page.ROOT / "results/benchmarks.md").read_text() == page.page(found)
    assert page.between_comments(readme, page.readme_table(found)) == readme


def test_a_file_that_is_not_a_result_is_refused_in_one_line(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    for path in (tmp_path / "x.json", tmp_path / "missing.json"):
        with pytest.raises(BadInput, match=path.name) as caught:
            page.main(page.Args(results=str(path)))
        assert "\n" not in str(caught.value)


# ---- the measurements


def check(benchmark, values):
    """All columns of the table were measured, and are finite."""
    for column in benchmark.columns:
        assert format(values[column.value], column.format)
        if not isinstance(values[column.value], str):
            assert math.isfinite(values[column.value])


@pytest.mark.soak
def test_trainers_are_measured_against_the_ceilings():
    values = trainers.measure(CARTPOLE, 0.2)
    check(trainers.Trainers(), values)
    assert values["gradients_per_step"] == 21 / 20
    assert values["ceiling"] == pytest.approx(speed.ceiling(values))
    assert min(values["cleanba"], values["synchronous"], values["not_portable"]) > 0


def test_the_ratios_of_a_trainer_are_of_what_was_timed(monkeypatch):
    runs = []

    def trainer_speed(workload, options, folder):
        runs.append((options["concurrency"], options.get("portable", True)))
        if not options.get("portable", True):  # the default of portable runs
            assert options["xla_cpu_pool_size"] == speed.cores()
        return 100.0 - 10 * len(runs)

    parts = {"env": 100.0, "forward": 50.0, "gradient": 200.0, "gradients_per_step": 4.0}
    monkeypatch.setattr(trainers, "trainer_speed", trainer_speed)
    monkeypatch.setattr(
        trainers.speed,
        "in_fresh_process",
        lambda function, *_: parts if function is trainers.measure_parts else 400.0,
    )
    values = trainers.measure(CARTPOLE, 0.2)
    assert runs == [(True, True), (False, True), (False, False)]
    assert (values["cleanba"], values["synchronous"], values["not_portable"]) == (90, 80, 70)
    assert values["portable_ratio"] == pytest.approx(80 / 70)
    assert values["cleanba_ratio"] == pytest.approx(90 / speed.ceiling(parts))
    assert values["gradient_ratio"] == 0.5


@pytest.mark.slow
def test_the_parts_of_ppo_are_measured():
    workload = CARTPOLE._replace(algorithm="ppo", num_groups=2)
    parts = speed.in_fresh_process(trainers.measure_parts, workload, 0.1)
    assert min(parts.values()) > 0
    assert parts["gradients_per_step"] == 4  # epochs


@pytest.mark.slow
def test_the_cost_of_recording_and_replaying_actions_is_measured():
    """`reductions` is eight runs of the trainer that is timed above."""
    values = exactness.measure_actions(CARTPOLE._replace(num_groups=4), repetitions=1)
    check(exactness.Actions(), values)
    assert values["bytes_per_step"] > 0
    assert values["replay_over_envpool"] == pytest.approx(values["replay"] / values["envpool"])


def test_reductions_are_compared_on_one_device_and_on_two(monkeypatch):
    runs = []

    def trainer_speed(workload, options, folder):
        runs.append((options["reduction"], options["learner_device_ids"]))
        return {"groups": 100.0, "psum": 80.0}[options["reduction"]] * len(runs)

    monkeypatch.setattr(exactness, "trainer_speed", trainer_speed)
    values = exactness.measure_reductions(exactness.WORKLOADS[0])
    check(exactness.Reductions(), values)
    assert runs == [("groups", (0,)), ("psum", (0,)), ("groups", (0, 1)), ("psum", (0, 1))]
    assert (values["groups_1"], values["psum_1"]) == (100, 160)
    assert values["groups_over_psum_2"] == pytest.approx(300 / 320)


@pytest.mark.soak
def test_systems_are_measured_side_by_side(tmp_path, capsys):
    path = tmp_path / "systems.json"
    run("systems/hts_rl_a2c*", "--systems.steps", "1600", "--json", str(path))
    rows = json.loads(path.read_text())["tables"]["systems"]["rows"]
    assert [row["case"] for row in rows] == ["hts_rl_a2c", "hts_rl_a2c-sync"]
    first, second = (row["values"] for row in rows)
    assert (first["ratio"], second["ratio"]) == (1.0, first["speed"] / second["speed"])
    assert f"{second['speed']:,.0f}" in capsys.readouterr().out


@pytest.mark.soak
def test_hts_rl_is_measured_against_its_formula(tmp_path):
    path = tmp_path / "hts.json"
    sizes = ("--hts.delays", "0.001", "--hts.updates", "1", "--hts.num-actors", "1")
    run("hts", *sizes, "--json", str(path))
    (row,) = json.loads(path.read_text())["tables"]["hts"]["rows"]
    values = row["values"]
    assert values["ratio"] == pytest.approx(values["hts"] / values["synchronous"])
    predicted = values["hts_predicted"] / values["synchronous_predicted"]
    assert values["ratio_predicted"] == pytest.approx(predicted)
    assert values["error"] == pytest.approx(values["ratio"] / predicted - 1)
    assert predicted > 0  # how much is for the machine: an update may cost more than the step


@pytest.mark.slow
def test_the_parts_of_a_baseline_are_measured():
    workload = next(x for x in baselines.WORKLOADS if x.name == "moolib-nature")
    parts = speed.in_fresh_process(baselines.measure_parts, workload, 0.2)
    assert min(parts.values()) > 0
    assert parts["gradients_per_step"] == 21 / 20


@pytest.mark.slow
def test_a_report_of_synthetic_records_is_timed(tmp_path, capsys):
    path = tmp_path / "report.json"
    sizes = {"games": 2, "systems": 2, "seeds": 3, "updates": 20, "rollouts": 40, "episodes": 150}
    words = [word for name, size in sizes.items() for word in (f"--report.{name}", str(size))]
    run("report", *words, "--json", str(path))
    (row,) = json.loads(path.read_text())["tables"]["report"]["rows"]
    check(report.Report(), row["values"])
    assert row["values"]["records"] == 12
    assert row["values"]["seconds"] > 0
    assert "2 games x 2 systems x 3 seeds" in capsys.readouterr().out


@pytest.mark.slow
def test_the_analysis_is_timed(capsys):
    small = [
        f"--{name}.{size}" for name in ("bootstrap", "curves") for size in ("games", "repetitions")
    ]
    words = [
        word for flag, size in zip(small, ("3", "50") * 2, strict=True) for word in (flag, size)
    ]
    run("bootstrap", "curves", "reading", *words, "--reading.runs", "4", "--reading.episodes", "50")
    lines = capsys.readouterr().out.partition("\nRatios\n")[0].splitlines()
    for name in ("bootstrap", "curves", "reading"):
        (row,) = (line.split() for line in lines if line.startswith(f"{name} "))
        assert all(float(cell.rstrip("%").replace(",", "")) >= 0 for cell in row[1:])
    assert next(line.split()[1] for line in lines if line.startswith("reading ")) == "200"


def test_the_rank_error_of_an_interval_is_how_far_its_ends_are_from_the_right_quantiles():
    replicates = np.tile(np.arange(1000.0), (4, 1))
    ends = np.array([[25.0] * 4, [975.0] * 4])
    assert analysis.rank_error(replicates, ends, 0.95) == pytest.approx(0, abs=0.002)
    ends[1, 2] = 925
    assert analysis.rank_error(replicates, ends, 0.95) == pytest.approx(0.05, abs=0.002)
