"""`make videos` records a game of the first completed run of each system, and keeps what is there."""

import jax
import msgspec
import numpy as np
import pytest

from baselines.torch_io import arrays_of
from baselines.torch_networks import make_network as torch_network
from cleanba.evaluate import Model, save_model
from cleanba.networks import make_network
from cleanba.record.schema import RunInfo
from experiments import videos

ENV = "CartPole-v1"
OPTIONS = {"network": "mlp", "channels": None, "hiddens": None, "atari_preprocessing": "machado"}


def write_run(folder, system, program, framework, status="completed"):
    folder.mkdir(parents=True)
    info = RunInfo(
        system=system,
        setting="s",
        env_id=ENV,
        seed=1,
        program=program,
        status=status,
        hyperparameters=OPTIONS,
        versions={framework: "1"},
    )
    (folder / "run.json").write_bytes(msgspec.json.encode(info))


@pytest.fixture
def runs(tmp_path):
    """Records of a JAX system and of a torch system with networks, and of a JAX system without."""
    write_run(tmp_path / "a__s1", "cleanba_ppo", "cleanba_ppo", "jax", status="failed")
    for name in ("a__s2", "a__s3"):
        write_run(tmp_path / name, "cleanba_ppo", "cleanba_ppo", "jax")
    params = make_network("mlp", 2, portable=True).init(jax.random.key(0), np.ones((1, 4), "f"))
    save_model(tmp_path / "a__s2/cleanba_ppo.cleanrl_model", Model(ENV, 1, OPTIONS, params))
    write_run(tmp_path / "b__s1", "monobeast", "monobeast_study", "torch")
    np.savez(tmp_path / "b__s1/model.npz", **arrays_of(torch_network("mlp", (4,), 2)))
    write_run(tmp_path / "c__s1", "cleanrl_ppo", "cleanrl_ppo", "jax")
    return tmp_path


@pytest.mark.slow
def test_each_system_gets_one_video(runs, capfd):
    kept = runs / "b__s1/videos/mine.mp4"
    assert videos.main(["study", "--runs", str(runs)]) == 1
    found = sorted(runs.glob("*/videos/*"))
    assert found == [runs / f"{name}/videos/{ENV}.mp4" for name in ("a__s2", "b__s1")]
    assert all(file.read_bytes()[4:8] == b"ftyp" for file in found)
    printed = capfd.readouterr()
    first, second, third = printed.out.splitlines()
    assert first.startswith(f"{found[0]}: {ENV}: mean return")
    assert second.startswith(f"{found[1]}: {ENV}: mean return")
    assert third == f"{runs / 'c__s1'}: no video"
    assert (
        printed.err
        == f"error: {runs / 'c__s1'}: no saved model in this folder (train with --save-model)\n"
    )
    found[1].rename(kept)
    content = kept.read_bytes()
    assert videos.main(["study", "--runs", str(runs)]) == 1
    assert sorted(runs.glob("*/videos/*")) == [found[0], kept]
    assert kept.read_bytes() == content
    assert f"{kept} (kept)" in capfd.readouterr().out


def test_a_study_without_completed_runs_is_refused(tmp_path, capsys):
    write_run(tmp_path / "a", "cleanba_ppo", "cleanba_ppo", "jax", status="failed")
    assert videos.main(["study", "--runs", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: no completed run there\n"
