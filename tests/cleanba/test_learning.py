"""The trainers learn. Five seeds of each are in reports/learning; here one, of the same study."""

import subprocess

import numpy as np
import pytest

from experiments.study import find_study, load_study
from experiments.systems import command

from .conftest import ROOT, lines

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.mark.parametrize("env_id", ["Catch-v0", "CartPole-v1"])
@pytest.mark.parametrize("system", ["cleanba_ppo-sync", "cleanba_impala"])
def test_small_environments_are_solved(tmp_path, system, env_id):
    solved = {"Catch-v0": 0.95, "CartPole-v1": 475.0}[env_id]
    (run,) = [
        run
        for run in load_study(find_study("learning")).runs
        if (run.system, run.env_id, run.seed) == (system, env_id, 1)
    ]
    subprocess.run(command(run, tmp_path), check=True, capture_output=True, cwd=ROOT, timeout=600)
    (folder,) = tmp_path.glob("learning/*")
    returns = [row["return"] for row in lines(folder, "episodes")]
    means = np.convolve(returns, np.full(100, 0.01), "valid")
    assert means.max() >= solved
