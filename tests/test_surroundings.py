"""Programs whose surroundings misbehave: a reader that leaves, links in the way, words for the shell."""

import os
import re
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


MAKE = ["make", "-f", str(ROOT / "Makefile"), "-o", ".venv/installed"]
MAKEFILE = (ROOT / "Makefile").read_text()
# Those of the Makefile itself, and those of targets that install.
NOT_WORDS = {
    "BIN", "PIP", "PYTEST", "MAKE", "FIGURES", "TABLES", "FOLDER", "LAUNCH_FLAGS", "PRESET_FLAG", "DEVICE",
    "MICRORTS", "PYTHON", "TORCH_INDEX", "MAKEFILE_LIST",
}  # fmt: skip
WORDS = sorted(set(re.findall(r"\$\(([A-Z_]+)\)", MAKEFILE)) - NOT_WORDS)
TARGETS = re.findall(r"^([a-z0-9_-]+) ?:.*## ", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("target", sorted({*TARGETS} - {"setup", "quickstart"}))
def test_no_make_variable_is_run_by_the_shell(tmp_path, target):
    (tmp_path / "bin").mkdir()
    for name in ("python", "ruff"):
        (tmp_path / "bin" / name).symlink_to("/bin/true")
    # Unquoted, the first > would write a file; between single quotes, the second.
    words = [f"{name}=x>{name}'>{name}'y" for name in WORDS]
    done = subprocess.run(
        [*MAKE, target, "BIN=bin", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_a_missing_make_variable_is_named(tmp_path):
    done = subprocess.run([*MAKE, "lag"], cwd=tmp_path, capture_output=True, text=True)
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
