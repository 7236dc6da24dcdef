"""Trainers and baselines learn. Several seeds of each are in the reports; here one, of the same study."""

import subprocess

import numpy as np
import pytest

from experiments.study import find_study, load_study
from experiments.systems import command
from tests.cleanba.conftest import ROOT, lines

pytestmark = pytest.mark.soak


@pytest.mark.parametrize(
    ("study", "system", "env_id"),
    [
        ("learning", "cleanba_ppo-sync", "CartPole-v1"),
        ("learning", "cleanba_impala", "CartPole-v1"),
        ("cleanrl", "cleanrl_ppo", "Catch-v0"),
        ("hts_rl", "hts_rl_a2c", "Catch-v0"),
        ("worker_schemes", "schemes_ppo-single-threaded", "Catch-v0"),
    ],
)
def test_small_environments_are_solved(tmp_path, study, system, env_id):
    solved = {"Catch-v0": 0.95, "CartPole-v1": 475.0}[env_id]
    run = next(
        run
        for run in load_study(find_study(study)).runs
        if (run.system, run.env_id, run.seed) == (system, env_id, 1)
    )
    subprocess.run(command(run, tmp_path), check=True, capture_output=True, cwd=ROOT, timeout=600)
    (folder,) = tmp_path.glob(f"{study}/*")
    returns = [row["return"] for row in lines(folder, "episodes")]
    means = np.convolve(returns, np.full(100, 0.01), "valid")
    assert means.max() >= solved
