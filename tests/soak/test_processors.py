"""Other processors, emulated by QEMU, compute the same bits."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reports import archive
from reports.unpack import unpack
from tests.cleanba.conftest import ROOT, SMALL, Trainer
from tests.killed_runs import Runs, check_equal, resumed_at

pytestmark = [
    pytest.mark.soak,
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.skipif(
        os.uname().machine != "x86_64" or not shutil.which("qemu-x86_64"),
        reason="needs qemu-x86_64 (Debian: apt install qemu-user)",
    ),
]


def certify(out, *args):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "cleanba.audit.certify",
            "--processors",
            "--quick",
            *args,
            "--out",
            str(out),
            "--name",
            "x",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (out / "x.json").exists(), done.stdout + done.stderr
    certificate = json.loads((out / "x.json").read_text())
    rows = [row for part in certificate["configurations"] for row in part["layouts"]]
    return done, rows


def test_processors_give_the_same_bits(tmp_path):
    """IMPALA on images; the tests below train PPO on another processor."""
    options = ("--algo", "impala", "--network", "nature")
    done, rows = certify(tmp_path, *options, "--layouts", "a0-l0-d1-t1-EPYC")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every processor gave the same bits" in done.stdout
    assert [row["layout"] for row in rows] == ["a0-l0-d1-t1", "a0-l0-d1-t1-EPYC"]
    assert all(row["same"] for row in rows)


def test_without_portable_arithmetic_processors_differ(tmp_path):
    done, rows = certify(
        tmp_path, "--no-portable", "--algo", "ppo", "--env-id", "CartPole-v1",
        "--layouts", "a0-l0-d1-t1-Haswell",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    reference, other = rows
    assert (reference["same"], other["same"]) == (True, False)
    assert other["verdict"].startswith("different from update ")


def test_a_run_killed_here_and_resumed_on_another_processor_ends_like_one_that_was_not(tmp_path):
    runs = Runs(tmp_path, "cleanba_ppo.py", SMALL)
    runs("straight")
    every = ("--checkpoint-every", "3")
    assert runs("killed", *every, kill=("half-line", "8")).returncode == -signal.SIGKILL
    runs("killed", *every, "--resume", emulator=("qemu-x86_64", "-cpu", "Haswell"))
    check_equal(runs.path("straight"), runs.path("killed"))
    assert resumed_at(runs.path("killed")) == [6]


def test_a_published_run_is_verified_on_another_processor(tmp_path, monkeypatch):
    every = ("--checkpoint-every", "8", "--keep-checkpoints", "all")
    (tmp_path / "runs").mkdir()
    Trainer(tmp_path / "runs")("ppo", *every, "--study", "small")
    monkeypatch.chdir(tmp_path)
    assert archive.main(["small"]) == 0
    data = unpack(Path("dist/small.zip"), tmp_path / "unpacked") / "data"
    (info,) = data.glob("runs/small/*/run.json")
    command = ["qemu-x86_64", "-cpu", "Haswell", sys.executable, "-m", "cleanba.audit.replay"]
    command += [str(info.parent), "--published", "--segments", "1", "--no-progress"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("verified: ")
    assert "repeated: 8 updates, in 1 of 2 segments" in done.stdout
