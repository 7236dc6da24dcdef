"""No token that a run is given, or prints, is stored: not in its record, its log or its page."""

from pathlib import Path

import pytest

from experiments import launch
from reports import build
from tests.cleanba.record.test_redaction import TOKENS

ROOT = Path(__file__).resolve().parents[2]
STUDY = """
title = "Leaky"
question = "What is stored?"
[systems.leaky]
script = "leaky.py"
flags = {no_progress = ""}
[settings.one]
num_actor_threads = 1
actor_device_ids = [0]
learner_device_ids = [0]
host_devices = 0
cores = 1
[[runs]]
systems = ["leaky"]
settings = ["one"]
env_ids = ["X", "Y"]
seeds = [1]
total_timesteps = 4
hyperparameters = {}
"""
# The run of X is completed, and that of Y fails; both print and raise what they should not.
PROGRAM = """
import os, pathlib, sys
sys.path.insert(0, {root!r})
from cleanba.record import Episode, RunInfo, RunWriter, Update
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
env_id = flags["--env-id"]
tokens = [os.environ[f"LEAK_{{i}}"] for i in range(20)] + [os.environ["PLAIN_PASSWORD"]]
command = ["python", *sys.argv] + [*tokens, "--api-key", "hunter2"] * (env_id == "Y")
folder = pathlib.Path(flags["--runs-dir"]) / "leaky" / f"leaky__one__{{env_id}}__s1"
for stream in (sys.stdout, sys.stderr):
    print("tokens:", *tokens, "password=hunter2", file=stream, flush=True)
info = RunInfo(system="leaky", setting="one", env_id=env_id, seed=1, command=command)
with RunWriter(folder, info) as record:
    record.write(
        Episode(step=4, wall_time=0.1, env_index=0, episode_return=1.0, length=4),
        Update(version=2, step=4, wall_time=0.2, update_seconds=0.2, learning_rate=0.1, loss=1.0),
    )
    if env_id == "Y":
        raise RuntimeError("cannot log in with " + " ".join(tokens))
"""


@pytest.mark.slow
def test_twenty_kinds_of_token_are_in_no_stored_file(tmp_path, monkeypatch, capsys):
    for number, token in enumerate(TOKENS.values()):
        monkeypatch.setenv(f"LEAK_{number}", token)
    monkeypatch.setenv("PLAIN_PASSWORD", "no shape at all")
    (tmp_path / "leaky.py").write_text(PROGRAM.format(root=str(ROOT)))
    study = tmp_path / "leaky.toml"
    study.write_text(STUDY)
    runs, site = tmp_path / "runs", tmp_path / "site"
    assert launch.main([str(study), "--runs-dir", str(runs)]) == 1
    printed = capsys.readouterr().out
    build.build("leaky", runs / "leaky", site)
    files = [path for folder in (runs, site) for path in folder.rglob("*") if path.is_file()]
    assert {"log.txt", "run.json", "index.html", "README.md"} <= {path.name for path in files}
    texts = {path: path.read_text(errors="replace") for path in files} | {"terminal": printed}
    for secret in (*TOKENS.values(), "no shape at all", "hunter2"):
        assert [place for place, text in texts.items() if secret in text] == []
    logs = [
        text for path, text in texts.items() if str(path).endswith(".log") or "log.txt" in str(path)
    ]
    assert any("tokens: ***" in text for text in logs)  # the rest of the output is there


def test_a_study_that_holds_a_token_is_refused(tmp_path, capsys):
    study = tmp_path / "leaky.toml"
    study.write_text(STUDY.replace('no_progress = ""', f'token = "{TOKENS["GitHub"]}"'))
    assert launch.main([str(study), "--runs-dir", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert "holds a secret" in error
    assert TOKENS["GitHub"] not in error
    assert not (tmp_path / "runs").exists()
