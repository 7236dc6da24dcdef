"""A record refuses to be overwritten, survives being cut off, and holds no secrets."""

import json
import os
import socket
import subprocess

import pytest

from cleanba.record import (
    RecordError,
    RunWriter,
    find_runs,
    read_run,
    redact_command,
    redact_text,
    run_name,
    source_revision,
)

HEADER = {"system": "s", "setting": "h", "env_id": "E-v0", "seed": 1}


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / run_name("s", "h", "E-v0", 1)
    with RunWriter(path, HEADER | {"command": ["python", "x.py"]}) as writer:
        writer.write("episodes", [{"step": 4, "return": 1.5}, {"step": 8, "return": float("nan")}])
        writer.write("episodes", [])
        writer.write("updates", [{"version": 2}])
        assert read_run(path).info["status"] == "running"
    run = read_run(path)
    assert run.completed
    assert run.lines("episodes") == [{"step": 4, "return": 1.5}, {"step": 8, "return": None}]
    assert run.lines("updates") == [{"version": 2}]
    assert run.lines("rollouts") == []
    assert run.problems == []
    assert find_runs(tmp_path, path) == [path]


def test_nothing_is_overwritten_without_being_asked(tmp_path):
    path = tmp_path / "run"
    RunWriter(path, HEADER).close("completed")
    with pytest.raises(RecordError, match="--overwrite"):
        RunWriter(path, HEADER)
    RunWriter(path, HEADER, overwrite=True).close("completed")
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(RecordError, match="not a run record"):
            RunWriter(other, HEADER, overwrite=overwrite)
    assert (other / "thesis.txt").exists()


def test_lines_are_on_disk_before_the_run_ends_and_a_torn_last_line_is_reported(tmp_path):
    path = tmp_path / "run"
    writer = RunWriter(path, HEADER)
    writer.write("episodes", [{"step": 1}, {"step": 2}])
    with open(path / "episodes.jsonl", "a") as file:
        file.write('{"step": 3, "ret')
    run = read_run(path)
    assert [row["step"] for row in run.lines("episodes")] == [1, 2]
    assert any("torn last line" in problem for problem in run.problems)
    assert any("'running'" in problem for problem in run.problems)
    assert not run.completed


def test_a_damaged_line_is_an_error_that_names_file_and_line(tmp_path):
    path = tmp_path / "run"
    writer = RunWriter(path, HEADER)
    writer.write("episodes", [{"step": 1}, {"step": 2}])
    writer.close("completed")
    lines = (path / "episodes.jsonl").read_text().splitlines()
    (path / "episodes.jsonl").write_text(f"{lines[0]}\n{{broken\n{lines[1]}\n")
    with pytest.raises(RecordError, match=r"episodes.jsonl, line 2") as caught:
        read_run(path).lines("episodes")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("boom"), "failed", "ValueError: boom"),
        (KeyboardInterrupt(), "interrupted", "interrupted by SIGINT"),
        (SystemExit(143), "interrupted", "interrupted by SIGTERM"),
    ],
)
def test_an_exception_closes_the_record_with_its_status(tmp_path, error, status, text):
    with pytest.raises(type(error)), RunWriter(tmp_path / "run", HEADER):
        raise error
    info = read_run(tmp_path / "run").info
    assert (info["status"], info["error"]) == (status, text)
    assert info["ended"]


def test_unknown_schema_versions_and_missing_fields_are_refused(tmp_path):
    path = tmp_path / "run"
    RunWriter(path, HEADER).close("completed")
    info = json.loads((path / "run.json").read_text())
    for changed in (info | {"schema_version": 2}, {k: v for k, v in info.items() if k != "seed"}):
        (path / "run.json").write_text(json.dumps(changed))
        with pytest.raises(RecordError, match=r"run\.json"):
            read_run(path)
    with pytest.raises(RecordError, match="no run record"):
        read_run(tmp_path)


def test_keys_tokens_and_logins_are_blanked():
    argv = [
        "--wandb-api-key", "hunter2", "--token=hunter2", "HF_TOKEN=hunter2", "--seed", "3",
        "--url", "https://me:hunter2@host/x", "hf_" + "a1B2" * 8, "--track",
    ]  # fmt: skip
    redacted = redact_command(argv)
    assert len(redacted) == len(argv)
    assert "hunter2" not in " ".join(redacted)
    assert "a1B2" not in " ".join(redacted)
    assert redacted[4:6] == ["--seed", "3"]
    assert redacted[-1] == "--track"


def test_home_folders_and_hosts_are_not_named():
    text = redact_text(f"{os.path.expanduser('~')}/x /home/alice/y on {socket.gethostname()}")
    assert "alice" not in text
    assert text.startswith("~/x ~/y on ")
    assert text == f"~/x ~/y on {'localhost' if socket.gethostname() == 'localhost' else '<host>'}"


def test_a_revision_tells_changed_source_but_not_changed_reports(tmp_path):
    def git(*words):
        name = ("-c", "user.name=t", "-c", "user.email=t@t")
        subprocess.run(["git", "-C", tmp_path, *name, *words], check=True, capture_output=True)

    files = [tmp_path / name for name in ("cleanba/ppo.py", "reports/base/README.md", "README.md")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("first")
    code, page, readme = files
    assert source_revision(code.parent) == ""
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    revision = source_revision(code.parent)
    assert len(revision) == 40
    page.write_text("second")
    assert source_revision(code.parent) == revision
    for file in (code, readme):
        file.write_text("second")
        assert source_revision(code.parent) == revision + "+changes"
        file.write_text("first")
