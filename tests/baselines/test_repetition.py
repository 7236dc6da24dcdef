"""The training of CleanRL's PPO and of HTS-RL is repeated to the bit; falsified training is refuted."""

import subprocess
import sys

import numpy as np
import pytest

from cleanba.audit.replay import judge
from cleanba.audit.segments import Mismatch, Segment
from cleanba.audit.verification import repetition, verify
from cleanba.record import read_run
from tests import forging
from tests.cleanba.conftest import ROOT

pytestmark = pytest.mark.slow

CARTPOLE = ("--env-id", "CartPole-v1", "--num-envs", "4")
BREAKOUT = ("--env-id", "Breakout-v5", "--num-envs", "2", "--network", "nature", "--hiddens", "16")
RUNS = {
    "cleanrl_ppo": ("cleanrl_ppo", *CARTPOLE, "--num-steps", "32", "--total-timesteps", "1536"),
    "cleanrl_ppo, images": (
        "cleanrl_ppo", *BREAKOUT, "--channels", "4", "4", "4", "--num-steps", "8", "--total-timesteps", "192",
    ),
    "a2c, two unrolls per storage": (
        "hts_rl", *CARTPOLE, "--sync-interval", "10", "--total-timesteps", "480", "--num-actors", "2",
    ),
    "a2c, images, two threads": (
        "hts_rl", *BREAKOUT, "--num-steps", "8", "--total-timesteps", "192", "--torch-threads", "2",
        "--correction", "none", "--anneal-lr",
    ),
    "ppo, Adam, importance weights": (
        "hts_rl", *CARTPOLE, "--algorithm", "ppo", "--num-steps", "32", "--total-timesteps", "1536",
        "--optimizer", "adam", "--correction", "truncated-is",
    ),
    "ppo, synchronous": (
        "hts_rl", *CARTPOLE, "--algorithm", "ppo", "--num-steps", "32", "--total-timesteps", "1536",
        "--schedule", "synchronous", "--torch-threads", "2",
    ),
}  # fmt: skip


def train(runs_dir, program, *options):
    """Train, with checkpoints after updates 4, 8 and 12."""
    command = [sys.executable, str(ROOT / "baselines" / f"{program}.py"), *options, "--no-progress"]
    command += ["--checkpoint-every", "4", "--keep-checkpoints", "all", "--runs-dir", str(runs_dir)]
    subprocess.run(command, check=True, capture_output=True)
    (folder,) = runs_dir.glob("default/*")
    return folder


def repeat(folder, *segments):
    run = read_run(folder)
    return verify(run, repetition(run), [Segment(*pair) for pair in segments]).updates


def verdict(folder, segments=99):
    outcome = judge(read_run(folder), segments=segments, seed=0)
    return outcome.verdict, outcome.reason


@pytest.fixture(scope="module", params=list(RUNS))
def honest(request, tmp_path_factory):
    """A record of each kind."""
    return train(tmp_path_factory.mktemp("runs"), *RUNS[request.param])


def test_its_segments_are_repeated_from_its_checkpoints(honest, auditor):
    assert forging.segments(honest) == [(0, 4), (4, 8), (8, 12)]
    assert auditor.submit(repeat, honest, (4, 8)).result() == 4
    assert auditor.submit(repeat, honest, (0, 4), (8, 12)).result() == 8
    assert auditor.submit(verdict, honest).result() == ("verified", "")
    outcome, reason = verdict(honest, segments=0)
    assert (outcome, reason) == ("not checkable", "no segments were requested")


def change_metric(folder):
    forging.change_row(folder, 7, grad_norm=0.25)
    return "update 7: grad_norm"


def perturb_checkpoint(folder):
    def flip_a_bit(arrays):
        name = next(name for name in arrays if "param" in name)
        arrays[name].view("u4").flat[0] ^= 1
        return arrays

    forging.change_checkpoint(folder, 4, flip_a_bit)
    return "update 4: parameters or optimizer state differ"


def change_learning_rate(folder):
    forging.change_info(folder, "hyperparameters", learning_rate=1e-4)
    return "update 1: "


@pytest.mark.parametrize("forge", [change_metric, perturb_checkpoint, change_learning_rate])
def test_falsified_training_is_refuted(honest, auditor, tmp_path, forge):
    message = forging.forged_copy(honest, tmp_path / "forged", forge)
    found, reason = auditor.submit(verdict, tmp_path / "forged").result()
    assert found == "refuted"
    assert reason.startswith(message)


def take_arrays_of_another_network(folder):
    forging.change_checkpoint(folder, 8, lambda arrays: {"x": arrays[min(arrays)]})


def test_a_checkpoint_of_another_network_is_refuted(honest, auditor, tmp_path):
    folder = tmp_path / "forged"
    forging.forged_copy(honest, folder, take_arrays_of_another_network)
    with pytest.raises(Mismatch, match=r"checkpoint of update 8: .* that of another run"):
        auditor.submit(repeat, folder, (8, 12)).result()


def claim_another_lag(folder):
    rows = forging.rows_of(folder / "rollouts.jsonl")
    for row in rows:
        newest = row["learner_version"]
        version = newest if row["version_first"] < newest else max(1, newest - 1)
        row |= {
            "version_first": version,
            "version_last": version,
            "versions": [[version, row["steps"]]],
        }
    forging.write_rows(folder / "rollouts.jsonl", rows)
    return "rollouts.jsonl, line "


def claim_more_steps(folder):
    rows = forging.rows_of(folder / "updates.jsonl")
    for row in rows:
        row["step"] *= 2
    forging.write_rows(folder / "updates.jsonl", rows)
    return "updates.jsonl, line 1: its version and step"


def take_the_name_of_another_system(folder):
    forging.change_info(folder, system="monobeast")
    return "run.json: its system contradicts"


@pytest.mark.parametrize(
    "forge", [claim_another_lag, claim_more_steps, take_the_name_of_another_system]
)
def test_falsified_rows_are_refuted_without_segments(honest, tmp_path, forge):
    message = forging.forged_copy(honest, tmp_path / "forged", forge)
    found, reason = verdict(tmp_path / "forged", segments=0)
    assert found == "refuted"
    assert reason.startswith(message)


def spoil_the_parameters(arrays):
    return {
        name: np.full_like(a, np.nan) if "param" in name and a.dtype == np.float32 else a
        for name, a in arrays.items()
    }


def spoil_the_generator(arrays):
    return arrays | {"generator": np.zeros_like(arrays["generator"])}


def test_a_checkpoint_with_which_training_fails_is_refuted(honest, auditor, tmp_path):
    ways = [spoil_the_parameters]
    if honest.name.startswith(
        "hts_rl"
    ):  # CleanRL's random keys are integers, all of which are valid
        ways.append(spoil_the_generator)
    for spoil in ways:
        folder = tmp_path / spoil.__name__
        forging.forged_copy(honest, folder, forging.change_checkpoint, 4, spoil)
        assert auditor.submit(verdict, folder).result()[0] == "refuted"


def test_falsified_actions_are_refuted_without_segments(honest, tmp_path):
    folder = tmp_path / "forged"
    forging.forged_copy(honest, folder, forging.change_actions, np.random.default_rng(0))
    assert verdict(folder, segments=0)[0] == "refuted"
