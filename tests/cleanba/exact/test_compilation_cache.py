"""The compilation cache changes nothing but the speed of later runs."""

import json
import subprocess
import sys

import jax
import pytest

from cleanba.exact import kernels, placement
from tests.cleanba.conftest import ROOT, outcome


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The folder of compiled code, empty."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/cleanba"


def saved(folder):
    """Return the seconds of compilation that a run was spared; None without a program from the cache."""
    return json.loads((folder / "run.json").read_text())["hardware"].get("compile_seconds_saved")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "impala"])
def test_cached_programs_give_the_same_bits(train, cache, algorithm):
    fresh = train(algorithm, "--no-compilation-cache", "--setting", "fresh")
    assert list(cache.glob("xla-*")) == []
    first = train(algorithm, "--setting", "first")
    assert list(cache.glob("xla-*/*-cache"))
    second = train(algorithm, "--setting", "second")
    assert outcome(fresh) == outcome(first) == outcome(second)
    assert saved(fresh) is saved(first) is None
    assert saved(second) >= 0


@pytest.mark.slow
def test_cleanrl_uses_the_cache_too(cache, tmp_path):
    command = [
        sys.executable, str(ROOT / "baselines/cleanrl_ppo.py"), "--env-id", "Catch-v0", "--num-envs", "4",
        "--num-steps", "16", "--total-timesteps", "256", "--runs-dir", str(tmp_path), "--no-progress",
    ]  # fmt: skip
    for setting in ("first", "second"):
        subprocess.run([*command, "--setting", setting], check=True, capture_output=True)
    first, second = (next(tmp_path.glob(f"default/*__{n}__*")) for n in ("first", "second"))
    assert outcome(first) == outcome(second)
    assert saved(first) is None
    assert saved(second) >= 0
    assert list(cache.glob("xla-*/*-cache"))


def test_what_was_saved_is_never_negative(monkeypatch):
    """JAX counts a compilation of less than a second as none, and subtracts the time of the retrieval."""
    monkeypatch.setattr(placement, "_seconds_saved", [1.75, -0.25])
    assert placement.saved_by_cache() == {"compile_seconds_saved": 1.8}


@pytest.fixture
def settings(monkeypatch):
    """The changes of jax's configuration, which are not made."""
    found = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    return found


def test_processors_with_other_features_have_other_folders(monkeypatch, cache, settings):
    folders = []
    for features in ({"avx2", "fma"}, {"fma", "avx2"}, {"avx2", "fma", "avx512f"}):
        monkeypatch.setattr(placement, "_cpu_features", lambda features=features: features)
        placement._keep_compiled_programs()
        folders.append(settings["jax_compilation_cache_dir"])
    assert folders[0] == folders[1] != folders[2]
    assert {path.stat().st_mode & 0o777 for path in cache.iterdir()} == {0o700}


@pytest.mark.usefixtures("cache")
def test_a_run_continues_without_a_writable_cache(monkeypatch, settings, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    placement._keep_compiled_programs()
    assert settings == {}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compilation cache disabled: ")
    assert "/dev/null" in line


def test_another_users_folder_is_not_used(monkeypatch, cache, settings, capsys):
    def refuse(path):
        raise PermissionError(1, "belongs to another user", str(path))

    monkeypatch.setattr(kernels, "_check_owner", refuse)
    placement._keep_compiled_programs()
    assert settings == {}
    assert f"belongs to another user: '{cache}" in capsys.readouterr().err
