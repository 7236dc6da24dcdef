"""What docs/adding-a-baseline.md says of joining a study, done as it is said."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from analysis.importers.records import read_records
from analysis.scores import final_scores
from cleanba import record
from experiments import launch, systems
from reports import build

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding-a-baseline.md").read_text()
EXAMPLE = ROOT / "docs" / "examples" / "numpy_reinforce.py"


def block(language):
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return text


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("numpy_reinforce", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_worked_example_joins_a_study_and_its_report(tmp_path, monkeypatch):
    entry = vars(systems).copy()
    exec(block("python"), entry)
    monkeypatch.setitem(systems.SYSTEMS, "numpy_reinforce", entry["NUMPY"])
    study = tmp_path / "numpy_example.toml"
    study.write_text(block("toml"))
    assert launch.main([str(study), "--runs-dir", str(tmp_path / "runs")]) == 0
    runs = tmp_path / "runs" / "numpy_example"
    folders = record.find_runs(runs)
    assert len(folders) == 6
    scores = final_scores(read_records([runs]))
    assert (scores["score"] > 60).all()  # random play gives 22
    # the number of threads is a hardware setting: it changes nothing
    by_seed = scores.pivot(index="seed", columns="setting", values="score")
    assert (by_seed["1-thread"] == by_seed["2-threads"]).all()
    pages, _ = build.build("numpy_example", runs, tmp_path / "report")
    for page in pages:
        text = page.read_text()
        assert "The NumPy example" in text
        assert "numpy_reinforce" in text
        assert "6 of 6 runs are completed" in text


def test_the_example_writes_only_what_the_record_s_page_describes(tmp_path):
    words = [sys.executable, str(EXAMPLE), "--runs-dir", str(tmp_path), "--total-timesteps", "4096"]
    assert subprocess.run(words, cwd=ROOT).returncode == 0
    (folder,) = record.find_runs(tmp_path)
    run = record.read_run(folder)
    assert run.completed
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "run-record.md").read_text()))
    for kind in ("episodes", "updates", "rollouts"):
        for row in run.lines(kind):
            assert set(row) <= documented
    again = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    bad = subprocess.run(
        [*words, "--env-id", "CartPol-v1"], cwd=ROOT, capture_output=True, text=True
    )
    assert bad.returncode == 2
    assert bad.stderr.count("\n") == 1


def test_the_example_s_gradient_is_that_of_its_objective(example):
    rng = np.random.default_rng(3)
    obs, actions = rng.normal(size=(7, 4)), rng.integers(0, 3, 7)
    advantages, weights = rng.normal(size=7), rng.normal(size=(5, 3))

    def objective(weights):
        chosen = example.policy(weights, obs)[np.arange(7), actions]
        return (advantages * np.log(chosen)).mean()

    expected = np.zeros_like(weights)
    for index in np.ndindex(*weights.shape):
        step = np.zeros_like(weights)
        step[index] = 1e-6
        expected[index] = (objective(weights + step) - objective(weights - step)) / 2e-6
    actual = example.policy_gradient(weights, obs, actions, advantages)
    np.testing.assert_allclose(actual, expected, atol=1e-8)


def test_the_example_s_returns_end_with_their_episodes(example):
    r_t = np.array([[1.0], [2.0], [4.0], [8.0]])
    done_t = np.array([[False], [True], [False], [False]])
    actual = example.returns_to_go(r_t, done_t, 0.5)
    np.testing.assert_array_equal(actual[:, 0], [2.0, 2.0, 8.0, 8.0])
