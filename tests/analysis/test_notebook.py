"""The functions for notebooks, on logs of all kinds and on arrays; and the notebook of the docs."""

import json
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from analysis_logs import write_tensorboard
from matplotlib.figure import Figure
from matplotlib.text import Text
from synthetic_runs import study_folder

import analysis
from analysis import arrays, importers, quality
from analysis.__main__ import main
from analysis.summary import METRICS
from plots import efficiency, improvements, intervals, learning_curves, profiles

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebook.ipynb"
ENVIRONMENTS = ["CartPole-v1", "Catch-v0"]


@pytest.fixture
def scores():
    """Three algorithms, of which A and B are equal, on five tasks."""
    rng = np.random.default_rng(0)
    levels = {"A": 1.0, "B": 1.0, "C": 1.5}
    return {name: rng.normal(level, 0.05, (10, 5)) for name, level in levels.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Records, TensorBoard logs, a CSV and rliable arrays of the same environments."""
    root = tmp_path_factory.mktemp("notebook") / "runs"
    study_folder(root, systems=("cleanba_ppo",), env_ids=ENVIRONMENTS, steps=5_120)
    rng = np.random.default_rng(0)
    lines = ["algorithm,environment,seed,score"]
    for env_id in ENVIRONMENTS:
        for seed in (1, 2, 3):
            name = root / f"{env_id}__ppo__{seed}__x"
            write_tensorboard(name, system="ppo", env_id=env_id, seed=seed)
            lines.append(f"from a table,{env_id},{seed},{rng.normal(1, 0.1)}")
    (root / "table.csv").write_text("\n".join(lines))
    np.savez(root / "rliable.npz", DQN=rng.random((3, 2)), tasks=ENVIRONMENTS)
    (root / "more.json").write_text(json.dumps({"C51": {"CartPole-v1": [9.0], "Catch-v0": [0.1]}}))
    (root / "settings.json").write_text('{"any": "thing"}')
    write_tensorboard(root / "short", system="ppo", env_id="Catch-v0", seed=4, total=10_000)
    return root


def test_all_kinds_of_logs_in_one_folder_are_one_table(folder, capsys):
    frame = analysis.aggregate(analysis.load(folder))
    assert list(frame["metric"].unique()) == list(METRICS)
    systems = {"cleanba_ppo", "ppo", "from a table", "DQN", "C51"}
    assert set(frame["system"]) == systems
    assert set(frame["environments"]) == {2}
    assert main(["aggregate", str(folder), "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)["aggregate"]
    assert {entry["system"] for entry in printed} == systems
    for entry in printed:
        rows = frame[(frame["system"] == entry["system"]) & (frame["setting"] == entry["setting"])]
        for row in rows.itertuples():
            assert entry[row.metric]["value"] == row.value


def test_incomplete_runs_are_left_out_and_named(folder):
    data = analysis.load(str(folder))
    assert data.quality["problem"].str.contains("left out: the run is not completed").sum() == 1
    everything = analysis.load(folder, include_incomplete=True)
    assert len(everything.runs) == len(data.runs) + 1


def test_verdicts_on_arrays(scores):
    found = analysis.compare(scores).set_index(["system_a", "system_b"])["verdict"]
    assert found.to_dict() == {
        ("A", "B"): "equivalent",
        ("A", "C"): "different",
        ("B", "C"): "different",
    }
    assert analysis.compare(scores)["more_seeds"].isna().all()  # of decided pairs
    rows = analysis.by_environment(analysis.compare(scores))
    assert len(rows) == 3 * 5
    a, b = scores["A"], scores["B"]
    first = rows[(rows["system_a"] == "A") & (rows["system_b"] == "B")]
    np.testing.assert_allclose(first["difference"], b.mean(axis=0) - a.mean(axis=0))
    assert set(first["outcome"]) == {"final"}


def test_scores_alone_are_compared_with_runs_that_have_curves(folder):
    found = analysis.compare(analysis.load(folder))
    pair = found[(found["system_a"] == "DQN") & (found["system_b"] == "cleanba_ppo")]
    assert set(pair["environments"]) == {2}
    assert pair["note"].str.contains("final scores alone").all()


def test_every_result_of_arrays_equals_the_functions_it_is_made_of(scores):
    from rliable import metrics

    frame = analysis.aggregate(scores).set_index(["system", "metric"])["value"]
    profile = analysis.profiles(scores, taus=[0.9, 1.1]).set_index(["system", "tau"])["value"]
    better = analysis.probability_of_improvement(scores).set_index(["x", "y"])["value"]
    for name, matrix in scores.items():
        assert frame[name, "iqm"] == pytest.approx(metrics.aggregate_iqm(matrix))
        assert frame[name, "median"] == pytest.approx(metrics.aggregate_median(matrix))
        assert profile[name, 0.9] == pytest.approx((matrix > 0.9).mean())
    expected = metrics.probability_of_improvement(scores["A"], scores["C"])
    assert better["A, -", "C, -"] == pytest.approx(expected)


def test_figures_name_the_level_of_their_intervals(scores):
    along = {name: last[:, :, None] * [0.5, 1.0] for name, last in scores.items()}
    drawn = (
        intervals.draw(analysis.aggregate(scores, level=0.5, repetitions=100)),
        profiles.draw(analysis.profiles(scores, level=0.5, repetitions=100)),
        improvements.draw(analysis.probability_of_improvement(scores, level=0.5, repetitions=100)),
        efficiency.draw(analysis.sample_efficiency(along, level=0.5, repetitions=100)),
        learning_curves.draw(analysis.curves(along, level=0.5, repetitions=100)),
    )
    for figure in drawn:
        said = " ".join(text.get_text() for text in figure.findobj(Text))
        assert "50%" in said
        assert "95%" not in said


def test_curves_of_arrays(scores):
    along = {name: last[:, :, None] * [0.5, 1.0] for name, last in scores.items()}
    curves = analysis.curves(along, frames=[10, 20])
    one = curves[(curves["system"] == "C") & (curves["env_id"] == "task 3")]
    assert one["step"].tolist() == [10, 20]
    assert one["seconds"].isna().all()
    np.testing.assert_allclose(one["value"], along["C"][:, 3].mean(axis=0))
    assert set(one["runs"]) == {10}
    ends = analysis.sample_efficiency(along, metrics=["iqm"]).query("step == 2").set_index("system")
    iqm = analysis.aggregate(scores).query("metric == 'iqm'").set_index("system")
    np.testing.assert_allclose(ends["value"], iqm["value"])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(5), r"A: not runs x tasks: the shape is \(5,\)"),
        (np.ones((2, 3, 4)), r"A: not runs x tasks: .*\(2, 3, 4\) \(`array\[:, :, -1\]`"),
        (np.ones((0, 3)), "A: not runs x tasks"),
        ([["a", "b"]], "A: not an array of numbers"),
        ([[1.0, 2.0], [3.0]], "A: not an array of numbers"),
        ([[1.0, np.inf]], "A: a score is infinite"),
        ([[np.nan, np.nan]], "A: all scores are NaN"),
        ([[1.0, 2.0, 3.0]], "not equally many tasks: A has 3, B has 2"),
    ],
)
def test_arrays_that_would_be_misread_are_refused(array, message):
    with pytest.raises(analysis.InputError, match=message):
        analysis.aggregate({"A": array, "B": np.ones((2, 2))})


def test_other_arguments_that_would_be_misread_are_refused(scores, folder):
    matrix = scores["A"]
    along = {"A": matrix[:, :, None]}
    for call, message in (
        (lambda: analysis.aggregate(matrix), "algorithm -> array, not ndarray"),
        (lambda: analysis.aggregate({}), "no array of scores"),
        (lambda: analysis.curves(scores), "not runs x tasks x frames"),
        (lambda: analysis.curves(along, frames=[1, 2]), "frames: 1 ascending steps are expected"),
        (lambda: analysis.compare(scores, "seeds"), "'seeds' is none of systems, settings"),
        (lambda: analysis.compare({"A": matrix}), "no two systems to compare"),
        (lambda: analysis.aggregate({"A": matrix, "tasks": ["x"]}), "tasks: 5 different names"),
        (lambda: analysis.load("/no/such/place"), "no such file or folder"),
    ):
        with pytest.raises(analysis.InputError, match=message):
            call()


def test_a_row_that_lacks_environments_is_warned_about(folder):
    data = analysis.load(folder)
    lacking = data.scores["run"][data.scores["env_id"] == "Catch-v0"].astype(str)
    dropped = data._replace(scores=data.scores[~data.scores["run"].isin(lacking)])
    with pytest.warns(UserWarning, match="from a table, - lacks Catch-v0"):
        frame = analysis.aggregate(dropped)
    assert frame.attrs["environments"].startswith("over the 1 environment that all rows have")


def test_single_arrays_are_read_by_the_name_of_their_file(tmp_path, scores):
    for name, matrix in scores.items():
        np.save(tmp_path / f"{name}.npy", matrix)
    data = analysis.load(tmp_path)
    pd.testing.assert_frame_equal(analysis.aggregate(data), analysis.aggregate(scores))
    np.save(tmp_path / "D.npy", np.array([{"a": 1}], dtype=object))
    np.save(tmp_path / "E.npy", np.ones(3))
    (tmp_path / "torn.json").write_text('{"A": [[1.0, 2')
    (tmp_path / "ragged.json").write_text('{"A": [[1.0, 2.0], [3.0]]}')
    (tmp_path / "other.json").write_text('{"args": {"lr": 0.1}, "names": ["a"]}')
    problems = analysis.load(tmp_path).quality["problem"].tolist()
    names = "D.npy, E.npy, ragged.json, torn.json"
    assert problems == [f"4 tables of a form that is not read: {names}"]
    with pytest.raises(analysis.InputError, match=r"not a \.npy file"):
        importers.read([tmp_path / "D.npy"])


def test_named_tasks_are_normalized_already():
    """A name with a reference changes nothing, and one without is no problem."""
    tables = arrays.score_tables({"A": np.full((2, 2), 0.5), "tasks": ["Pong-v5", "mine"]})
    assert set(analysis.aggregate(tables).set_index("metric")["value"]) == {0.5}
    assert quality.check(tables).empty


def test_the_notebook_of_the_docs_runs(folder, tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(folder)
    monkeypatch.chdir(tmp_path / "docs")
    cells = [
        "".join(cell["source"])
        for cell in json.loads(NOTEBOOK.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    names: dict = {}
    last = [_run(source, names) for source in cells]
    assert sum(isinstance(value, Figure) for value in last) >= 8
    assert sum(isinstance(value, pd.DataFrame) for value in last) >= 5
    for value in last:
        if isinstance(value, Figure):
            value.draw_without_rendering()


def _run(source, names):
    """Run a cell without its magics, and return its last expression, as a notebook shows it."""
    *lines, last = [line for line in source.splitlines() if not line.startswith("%")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            shown = compile(last, "cell", "eval")
        except SyntaxError:
            exec("\n".join([*lines, last]), names)
            return None
        exec("\n".join(lines), names)
        return eval(shown, names)
