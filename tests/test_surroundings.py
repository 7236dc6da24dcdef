"""Programs whose surroundings misbehave: a reader that leaves, links in the way, words for the shell."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cleanba.record import find_runs, read_run, replace_file

ROOT = Path(__file__).resolve().parents[1]
TRAIN = [
    sys.executable, str(ROOT / "cleanba" / "cleanba_ppo.py"), "--env-id", "CartPole-v1", "--num-envs", "8",
    "--num-env-groups", "4", "--num-steps", "16", "--total-timesteps", "512",
]  # fmt: skip


@pytest.mark.slow
def test_a_reader_that_leaves_ends_no_training(tmp_path):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*TRAIN, "--runs-dir", str(tmp_path)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    os.close(write)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    (folder,) = find_runs(tmp_path)
    assert read_run(folder).completed


def test_an_analysis_whose_reader_leaves_gives_no_traceback(tmp_path):
    (tmp_path / "scores.csv").write_text(',"A, 1 GPU"\nPong-v5,14.6 ± 0.10\n')
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "analysis", "aggregate", str(tmp_path / "scores.csv")],
        cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_replaced_and_not_written_through(tmp_path, there):
    target, page = tmp_path / "target", tmp_path / "index.html"
    if there:
        target.write_text("precious")
    page.symlink_to(target)
    (tmp_path / "index.html.tmp").symlink_to(target)
    replace_file(page, "new")
    assert page.read_text() == "new"
    assert not page.is_symlink()
    assert target.exists() == there
    assert not there or target.read_text() == "precious"


@pytest.mark.parametrize(
    "target",
    [
        "study STUDY=",
        "report STUDY=",
        "lag RUN=",
        "replay RUN=",
        "rlops STUDY=",
        "publish STUDY=",
        "audit ARCHIVE=",
    ],
)
def test_a_make_variable_is_one_word_of_the_shell(tmp_path, target):
    planted = tmp_path / "planted"
    name, variable = target.split()
    word = f"{variable}x'; touch {planted}; echo 'y"
    done = subprocess.run(
        ["make", name, word, f"SITE={tmp_path}/site", f"RUNS={tmp_path}/runs"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert not planted.exists()


def test_a_missing_make_variable_is_named():
    done = subprocess.run(["make", "lag"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "RUN is missing: make lag RUN=" in done.stderr


@pytest.mark.slow
def test_nohup_keeps_a_run_from_ending_with_its_terminal(tmp_path):
    code = (
        "import os, signal\n"
        "from cleanba.run.command_line import run_command_line\n"
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Args: pass\n"
        "def main(args):\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    print('still here')\n"
        "run_command_line(Args, main, '')\n"
    )
    for ignored, expected in ((True, (0, "still here\n")), (False, (129, ""))):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
            preexec_fn=lambda ignored=ignored: signal.signal(
                signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL
            ),
        )  # fmt: skip
        assert (done.returncode, done.stdout) == expected, done.stderr
