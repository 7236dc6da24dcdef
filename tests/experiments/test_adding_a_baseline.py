"""A third party's baseline takes part in a study, as docs/adding-a-baseline.md shows."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from analysis.importers.records import read_records
from analysis.scores import final_scores
from cleanba import record
from cleanba.audit.replay import judge
from experiments import launch, systems
from reports import build
from tests import forging
from tests.sealing import seal

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding-a-baseline.md").read_text()
EXAMPLE = ROOT / "docs" / "examples" / "numpy_reinforce.py"


RECORD_ONLY = """
from cleanba.record import RunInfo, RunWriter
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
info = RunInfo(system="mine", setting="one", env_id="X", seed=1, command=["python", *sys.argv])
with RunWriter(pathlib.Path(flags["--runs-dir"]) / "mine" / "mine__one__X__s1", info):
    pass
"""

MINE = """
title = "Mine"
question = "?"
[systems.mine]
script = "mine.py"
flags = {no_progress = ""}
[settings.one]
num_actor_threads = 1
actor_device_ids = [0]
learner_device_ids = [0]
host_devices = 0
cores = 1
[[runs]]
systems = ["mine"]
settings = ["one"]
env_ids = ["X"]
seeds = [1]
total_timesteps = 1
hyperparameters = {speed = 1}
"""


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("numpy_reinforce", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_baseline_outside_the_repository_takes_part_through_its_study_alone(
    tmp_path, monkeypatch
):
    shutil.copy(EXAMPLE, tmp_path)
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    (tmp_path / "numpy_example.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    before = dict(systems.SYSTEMS)
    assert launch.main(["numpy_example.toml"]) == 0
    assert before == systems.SYSTEMS
    runs = tmp_path / "runs" / "numpy_example"
    folders = record.find_runs(runs)
    assert len(folders) == 4
    commands = [record.read_run(folder).info.command for folder in folders]
    assert {Path(words[1]).resolve() for words in commands} == {tmp_path / EXAMPLE.name}
    scores = final_scores(read_records([runs]))
    assert (scores["score"] > 60).all()  # random play gives 22
    # the number of threads is a hardware setting: it changes nothing
    by_seed = scores.pivot(index="seed", columns="setting", values="score")
    assert (by_seed["1-thread"] == by_seed["2-threads"]).all()
    build.build("numpy_example", runs, tmp_path / "page")
    for name in ("index.html", "README.md"):
        text = (tmp_path / "page" / name).read_text()
        assert "The NumPy example" in text
        assert "numpy_reinforce" in text
        assert "4 of 4 runs are completed" in text


def test_the_example_can_be_audited(tmp_path, monkeypatch, example):
    monkeypatch.setitem(sys.modules, "numpy_reinforce", example)
    words = ["--runs-dir", str(tmp_path), "--total-timesteps", "24576", "--checkpoint-every", "4"]
    monkeypatch.setattr("sys.argv", [str(EXAMPLE), *words])
    assert example.main() == 0
    (folder,) = record.find_runs(tmp_path)

    def audit():
        return judge(record.read_run(folder), segments=2, seed=1, module="numpy_reinforce")

    outcome = audit()
    assert (outcome.verdict, outcome.reason) == ("verified", "")
    assert (outcome.updates, outcome.all_segments) == (8, 3)
    assert judge(record.read_run(folder), segments=2, seed=1).verdict == "not checkable"
    command = [sys.executable, "-m", "cleanba.audit.replay", str(folder), "--segments", "2"]
    options = {"cwd": EXAMPLE.parent, "capture_output": True, "text": True}
    done = subprocess.run([*command, "--module", "numpy_reinforce"], **options)
    assert done.returncode == 0, done.stderr
    assert "repeated: 8 updates, in 2 of 3 segments" in done.stdout
    with monkeypatch.context() as patch:
        patch.setattr(example, "PROCESSOR", {"device_kind": "another"})
        assert audit().verdict == "not checkable"
    forging.change_checkpoint(folder, 8, lambda arrays: {"weights": arrays["weights"] + 1e-9})
    seal(folder)
    assert audit().verdict == "refuted"


def test_a_changed_hyperparameter_of_a_study_s_own_system_is_noticed(tmp_path, capsys):
    """Its completed runs are not counted for the changed study, nor run again over their records."""
    script = "import sys, pathlib; sys.path.insert(0, {root!r})\n" + RECORD_ONLY
    (tmp_path / "mine.py").write_text(script.format(root=str(ROOT)))
    study = tmp_path / "mine.toml"
    words = [str(study), "--runs-dir", str(tmp_path / "runs")]
    study.write_text(MINE)
    assert launch.main(words) == 0
    study.write_text(MINE.replace("speed = 1", "speed = 2"))
    assert launch.main([*words, "--retry"]) == 1
    assert "completed earlier, with another command" in " ".join(capsys.readouterr().out.split())


def test_the_example_neither_overwrites_a_record_nor_starts_on_bad_input(
    tmp_path, monkeypatch, capsys, example
):
    def run(*more):
        words = ["--runs-dir", str(tmp_path), "--total-timesteps", "4096", *more]
        monkeypatch.setattr("sys.argv", [str(EXAMPLE), *words])
        return example.main()

    assert run() == 0
    (folder,) = record.find_runs(tmp_path)
    assert record.read_run(folder).completed
    assert run() == 2
    assert "already holds a run" in capsys.readouterr().err
    assert run("--env-id", "CartPol-v1") == 2
    assert capsys.readouterr().err.count("\n") == 1


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
