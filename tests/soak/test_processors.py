"""Other processors, emulated by QEMU, compute the same bits."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.cleanba.conftest import ROOT, SMALL
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


@pytest.mark.parametrize(
    ("options", "processors"),
    [
        (["--env-id", "CartPole-v1"], ["Haswell", "EPYC"]),
        (["--algo", "ppo", "--network", "nature"], ["Haswell"]),
    ],
)
def test_processors_give_the_same_bits(tmp_path, options, processors):
    names = [f"a0-l0-d1-t1-{name}" for name in processors]
    done, rows = certify(tmp_path, *options, "--layouts", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every processor gave the same bits" in done.stdout
    assert {row["layout"] for row in rows} == {"a0-l0-d1-t1", *names}
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
