"""Studies whose runs write records without training (synthetic_runs.py)."""

import contextlib
import io
import shutil

import pytest
from small_studies import PPO, STUDY, synthetic_system

from experiments import cluster, launch, pool, systems


def _use_synthetic_systems(patch):
    for name in PPO:
        patch.setitem(systems.SYSTEMS, name, synthetic_system(name))
    patch.setattr(pool, "POLL_SECONDS", 0.02)
    patch.setattr(cluster, "POLL_SECONDS", 0.05)


def _launch(patch, folder, options, behaviour, fail_seed, text):
    path = folder / "small.toml"
    path.write_text(text)
    patch.setenv("SYNTHETIC_BEHAVIOUR", behaviour)
    patch.setenv("SYNTHETIC_FAIL_SEED", str(fail_seed))
    return launch.main([str(path), "--runs-dir", str(folder / "runs"), *options])


@pytest.fixture
def synthetic(monkeypatch):
    """Both PPO systems are the program that writes records without training."""
    _use_synthetic_systems(monkeypatch)


@pytest.fixture(scope="session")
def outcome(tmp_path_factory):
    """Launches a study once for each behaviour of its runs; returns its folder and what was printed."""
    made = {}

    def get(behaviour, fail_seed=""):
        key = (behaviour, fail_seed)
        if key not in made:
            folder = tmp_path_factory.mktemp("outcome")
            with pytest.MonkeyPatch.context() as patch:
                _use_synthetic_systems(patch)
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    code = _launch(patch, folder, (), behaviour, fail_seed, STUDY)
            assert code == (0 if behaviour == "complete" else 1)
            made[key] = (folder / "runs", printed.getvalue())
        return made[key]

    return get


@pytest.fixture
def study(tmp_path, synthetic, monkeypatch, outcome):
    """Runs the launcher on a small study, with runs of some behaviour; returns its exit code."""

    def run(*options, behaviour="complete", fail_seed="", text=STUDY):
        return _launch(monkeypatch, tmp_path, options, behaviour, fail_seed, text)

    def after(behaviour, fail_seed=""):
        """Start from what an earlier launch left; returns what that printed."""
        folder, printed = outcome(behaviour, fail_seed)
        shutil.copytree(folder, tmp_path / "runs")
        return printed

    run.after = after
    run.folder = tmp_path / "runs" / "small"
    return run
