"""Training runs as a user starts them: in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cleanba.audit.local_processes import find_job_id

ROOT = Path(__file__).resolve().parents[2]

SMALL = [
    "--env-id", "CartPole-v1", "--total-timesteps", "2048", "--num-envs", "8",
    "--num-env-groups", "4", "--num-steps", "16", "--num-minibatches", "2", "--no-progress",
    "--fingerprint-every", "1",
]  # fmt: skip


class Trainer:
    """Starts trainers that record into one folder."""

    def __init__(self, runs_dir):
        self.runs_dir = runs_dir

    def command(self, algorithm, *args, small=True):
        script = str(ROOT / "cleanba" / f"cleanba_{algorithm}.py")
        base = SMALL if small else []
        return [sys.executable, script, *base, "--runs-dir", str(self.runs_dir), *map(str, args)]

    def start(self, algorithm, *args, small=True, **options):
        return subprocess.Popen(
            self.command(algorithm, *args, small=small),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.runs_dir,
            **options,
        )

    def __call__(self, algorithm, *args, code=0, small=True, env=None):
        """Run a trainer to its end; return its standard error, or the folder of its record."""
        done = subprocess.run(
            self.command(algorithm, *args, small=small),
            capture_output=True,
            text=True,
            timeout=600,
            cwd=self.runs_dir,
            env=os.environ | (env or {}),
        )
        assert done.returncode == code, done.stdout + done.stderr
        if code:
            return done.stderr
        (line,) = [x for x in done.stdout.splitlines() if x.startswith("completed: ")]
        return Path(line.removeprefix("completed: ").strip("'"))


@pytest.fixture
def train(tmp_path):
    return Trainer(tmp_path)


@pytest.fixture
def slurm():
    """What srun sets for two processes on one host, but for SLURM_PROCID."""
    return {
        "SLURM_JOB_ID": str(find_job_id()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2",
    }  # fmt: skip


def lines(folder, kind):
    """The rows of a record's file."""
    return [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()]


def outcome(folder):
    """All of a record that must not depend on time or layout."""
    drop = {"wall_time", "actor"}
    return {
        "fingerprints": [row["fingerprint"] for row in lines(folder, "updates")],
        "losses": [row["loss"] for row in lines(folder, "updates")],
        "episodes": [
            {k: v for k, v in row.items() if k not in drop} for row in lines(folder, "episodes")
        ],
        "rollouts": [
            {k: v for k, v in row.items() if k not in drop} for row in lines(folder, "rollouts")
        ],
    }
