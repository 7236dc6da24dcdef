"""A record refuses to be overwritten, survives being cut off, names damage, and holds no secrets."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import UNSET

from cleanba.record import (
    Episode,
    FileDigest,
    RecordError,
    Resumption,
    Rollout,
    RunInfo,
    RunWriter,
    Update,
    find_runs,
    now_utc,
    read_run,
    redact_command,
    redact_text,
    run_name,
    source_revision,
)
from tests.sealing import rewrite

ROOT = Path(__file__).parents[3]
INFO = RunInfo(system="s", setting="h", env_id="E-v0", seed=1)
FILES = ("episodes.jsonl", "rollouts.jsonl", "updates.jsonl")


def episode(step=1, episode_return=1.5):
    return Episode(step=step, wall_time=0.5, env_index=0, episode_return=episode_return, length=4)


def update(version=2, **more):
    return Update(
        version=version,
        step=8,
        wall_time=0.5,
        update_seconds=0.5,
        learning_rate=0.1,
        loss=0.2,
        **more,
    )


def rollout(number=1):
    return Rollout(
        actor=0, group=None, rollout=number, steps=8, wall_time=0.5, version_first=1, version_last=2,
        versions=[(1, 5), (2, 3)], learner_version=2,
    )  # fmt: skip


def write_run(path, status="completed", rows=3):
    writer = RunWriter(path, INFO)
    for i in range(1, rows + 1):
        writer.write(episode(i), rollout(i), update(i + 1))
    writer.write_actions(b"\x01\x02\x03")
    (path / "tensorboard").mkdir()
    (path / "tensorboard" / "events").write_bytes(b"\x00\n")
    if status is not None:
        writer.close(status)
    return path


def read_all(path):
    run = read_run(path)
    return run.episodes(), run.rollouts(), run.updates()


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / run_name("s", "h", "E-v0", 1)
    with RunWriter(path, INFO) as writer:
        writer.write(episode(4), episode(8, float("nan")), update(approx_kl=float("inf")))
        writer.write()
        assert read_run(path).info.status == "running"
        writer.write(rollout())
    run = read_run(path)
    assert run.completed
    assert run.episodes() == [episode(4), episode(8, None)]
    assert run.updates() == [update(approx_kl=None)]
    assert run.last_update() == update(approx_kl=None)
    assert run.rollouts() == [rollout()]
    assert run.problems == []
    assert find_runs(tmp_path, path) == [path]


def test_values_of_numpy_are_written_as_numbers(tmp_path):
    hyperparameters = {"rate": np.float32(0.5), "sizes": (np.int64(3), 4), "path": Path("/x")}
    info = msgspec.structs.replace(INFO, hyperparameters=hyperparameters)
    with RunWriter(tmp_path / "run", info) as writer:
        writer.write(episode(np.int64(7), np.float32(0.25)))
    run = read_run(tmp_path / "run")
    assert run.episodes() == [episode(7, 0.25)]
    assert run.info.hyperparameters == {"rate": 0.5, "sizes": [3, 4], "path": "/x"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (episode("4"), r"episodes\.jsonl: not written: \[1\]\.step: expected `int`, got `str`"),
        (episode(-1), r"\[1\]\.step: expected `int` >= 0"),
        (update(0), r"updates\.jsonl.*\[0\]\.version"),
        (update(fingerprint="short"), r"updates\.jsonl.*\[0\]\.fingerprint"),
        (INFO, "RunInfo is not a row"),
    ],
)
def test_a_row_of_wrong_types_is_refused_when_it_is_written(tmp_path, row, message):
    writer = RunWriter(tmp_path / "run", INFO)
    with pytest.raises(ValueError, match=message):  # not bad input: the run has begun
        writer.write(episode(), row)
    writer.close("completed")
    assert read_all(tmp_path / "run") == ([], [], [])


def test_a_header_of_wrong_types_is_refused_before_anything_is_deleted(tmp_path):
    write_run(tmp_path / "run")
    with pytest.raises(RecordError, match=r"run\.json: not written: seed: expected `int`"):
        RunWriter(tmp_path / "run", msgspec.structs.replace(INFO, seed="x"), overwrite=True)
    assert len(read_run(tmp_path / "run").episodes()) == 3


def test_nothing_is_overwritten_without_being_asked(tmp_path):
    path = tmp_path / "run"
    RunWriter(path, INFO).close("completed")
    with pytest.raises(RecordError, match="--overwrite"):
        RunWriter(path, INFO)
    RunWriter(path, INFO, overwrite=True).close("completed")
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(RecordError, match="not a run record"):
            RunWriter(other, INFO, overwrite=overwrite)
    assert (other / "thesis.txt").exists()


def test_lines_are_on_disk_before_the_run_ends_and_a_torn_last_line_is_reported(tmp_path):
    path = write_run(tmp_path / "run", status=None)
    for name in FILES:
        with open(path / name, "a") as file:
            file.write('{"step": 3, "ret')
    run = read_run(path)
    assert [row.step for row in run.episodes()] == [1, 2, 3]
    assert len(run.rollouts()) == 3
    assert [row.version for row in run.updates()] == [2, 3, 4]
    assert run.last_update() == update(4)
    assert run.problems == [
        "status is 'running', not 'completed'",
        *(f"{name}: torn last line left out" for name in FILES),
    ]
    assert not run.completed


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_line_is_an_error_that_names_file_line_and_field(tmp_path, name):
    path = write_run(tmp_path / "run", status=None)
    good = (path / name).read_text().splitlines()
    field = json.loads(good[1])
    field["wall_time"] = "soon"
    missing = {k: v for k, v in field.items() if k != "wall_time"}
    for line, what in (
        ("{broken", "not JSON"),
        ("", "not JSON"),
        (good[1] + good[1], "not JSON"),
        ("[1]", "expected `object`, got `array`"),
        (json.dumps(field), "wall_time: expected `float`, got `str`"),
        (json.dumps(missing), "missing field `wall_time`"),
    ):
        (path / name).write_text("\n".join([good[0], line, good[2], ""]))
        with pytest.raises(RecordError, match=re.escape(f"{name}, line 2: {what}")) as caught:
            read_all(path)
        assert "\n" not in str(caught.value)


def test_fields_that_the_schema_does_not_have_are_ignored(tmp_path):
    path = write_run(tmp_path / "run")
    info = json.loads((path / "run.json").read_text()) | {"weather": "fine"}
    (path / "run.json").write_text(json.dumps(info))
    lines = (path / "updates.jsonl").read_text().replace('"loss"', '"weather":"fine","loss"')
    rewrite(path / "updates.jsonl", lines)
    assert read_run(path).updates() == [update(2), update(3), update(4)]


@pytest.mark.parametrize("status", ["completed", "failed", "interrupted"])
def test_a_record_that_has_ended_holds_the_checksums_of_its_files(tmp_path, status):
    path = write_run(tmp_path / "run", status)
    files = read_run(path).info.files
    assert set(files) == {*FILES, "actions/rollouts.bin", "tensorboard/events"}
    for name, digest in files.items():
        printed = subprocess.run(
            ["sha256sum", path / name], capture_output=True, text=True, check=True
        ).stdout
        lines = len((path / name).read_text().splitlines()) if name in FILES else None
        assert digest == FileDigest(
            bytes=(path / name).stat().st_size, lines=lines, sha256=printed.split()[0]
        )
    (path / "log.txt").write_text("printed after the end")
    (path / "videos").mkdir()
    (path / "videos" / "0.mp4").write_bytes(b"video")
    run = read_run(path)
    assert len(run.episodes()) == len(run.rollouts()) == len(run.updates()) == 3
    run.check_sizes()
    assert run.check_files() == []
    assert run.problems == (
        [] if status == "completed" else [f"status is {status!r}, not 'completed'"]
    )


def damage(path, how):
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    if how == "a line removed":
        data = b"".join(lines[:1] + lines[2:])
    elif how == "the last line removed":
        data = b"".join(lines[:-1])
    elif how == "a line added":
        data += lines[-1]
    elif how == "a digit changed":
        data = data.replace(b"0.5", b"0.6", 1)
    elif how == "torn":
        data = data[:-5]
    else:
        path.unlink()
        return
    path.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("a line removed", "is damaged: 2 lines, 3 when the run ended"),
        ("the last line removed", "is damaged: 2 lines, 3 when the run ended"),
        ("a line added", "is damaged: 4 lines, 3 when the run ended"),
        ("a digit changed", "is damaged: its SHA-256"),
        ("torn", "is damaged: 2 lines, 3 when the run ended"),
        ("deleted", "is missing; it was there when the run ended"),
    ],
)
@pytest.mark.parametrize("status", ["completed", "failed"])
def test_a_file_that_changed_after_the_run_ended_is_refused(tmp_path, name, how, message, status):
    path = write_run(tmp_path / "run", status)
    damage(path / name, how)
    with pytest.raises(RecordError, match=re.escape(f"{path / name} {message}")):
        read_all(path)
    assert [problem.split()[0] for problem in read_run(path).check_files()] == [name]


def test_other_files_that_changed_after_the_run_ended_are_named(tmp_path):
    path = write_run(tmp_path / "run")
    (path / "tensorboard" / "events").unlink()
    (path / "actions" / "rollouts.bin").write_bytes(b"\x01\x02")
    run = read_run(path)
    run.check_sizes()
    assert (
        run.problems
        == run.check_files()
        == [
            "actions/rollouts.bin is damaged: 2 bytes, 3 when the run ended",
            "tensorboard/events is missing; it was there when the run ended",
        ]
    )
    (path / "actions" / "rollouts.bin").write_bytes(b"\x01\x02\x04")
    assert "actions/rollouts.bin is damaged: its SHA-256" in read_run(path).check_files()[0]


def test_an_ended_run_without_checksums_is_named(tmp_path):
    path = write_run(tmp_path / "run")
    info = json.loads((path / "run.json").read_text())
    del info["files"]
    (path / "run.json").write_text(json.dumps(info))
    assert "no checksums" in read_run(path).problems[0]


def test_a_resumed_record_is_cut_to_its_checkpoint_and_gets_new_checksums(tmp_path):
    path = tmp_path / "run"
    writer = RunWriter(path, INFO)
    writer.write(episode(1), rollout(1), update(2))
    sizes = writer.sizes()
    writer.write(episode(2), rollout(2), update(3))
    writer.close("interrupted")
    note = Resumption(
        at=now_utc(), update=1, hardware={}, revision="r", command=["x", "--api-key", "hunter2"]
    )
    writer = RunWriter.resume(path, sizes, note)
    assert read_run(path).info.files is UNSET
    assert read_all(path) == ([episode(1)], [rollout(1)], [update(2)])
    writer.write(episode(5))
    writer.close("completed")
    run = read_run(path)
    assert run.episodes() == [episode(1), episode(5)]
    assert run.problems == run.check_files() == []
    assert run.info.resumed == [msgspec.structs.replace(note, command=["x", "--api-key", "***"])]
    with pytest.raises(RecordError, match=r"episodes\.jsonl has \d+ bytes; it had 999"):
        RunWriter.resume(path, {"episodes.jsonl": 999}, note)
    assert read_run(path).completed
    damage(path / "episodes.jsonl", "a digit changed")
    with pytest.raises(RecordError, match=r"episodes\.jsonl is damaged"):
        RunWriter.resume(path, sizes, note)
    assert read_run(path).completed


def test_a_resumption_that_is_cut_short_can_be_repeated(tmp_path, monkeypatch):
    """Also if the process is killed before all files are cut, or the disk is full."""
    path = tmp_path / "run"
    writer = RunWriter(path, INFO)
    writer.write(episode(1), update(2))
    sizes = writer.sizes()
    writer.write(episode(2), update(3))
    writer.close("interrupted")
    note = Resumption(at=now_utc(), update=1, hardware={}, revision="r", command=["x"])
    for name in ("truncate", "replace"):  # of a file of rows, and of run.json
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="no space"):
                RunWriter.resume(path, sizes, note)
    writer = RunWriter.resume(path, sizes, note)
    assert read_all(path) == ([episode(1)], [], [update(2)])
    writer.close("completed")
    assert read_run(path).check_files() == []


def fail(*_):
    raise OSError("no space left")


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("boom"), "failed", "ValueError: boom"),
        (KeyboardInterrupt(), "interrupted", "interrupted by SIGINT"),
        (SystemExit(143), "interrupted", "interrupted by SIGTERM"),
    ],
)
def test_an_exception_closes_the_record_with_its_status(tmp_path, error, status, text):
    with pytest.raises(type(error)), RunWriter(tmp_path / "run", INFO):
        raise error
    info = read_run(tmp_path / "run").info
    assert (info.status, info.error) == (status, text)
    assert info.ended


@pytest.mark.parametrize(
    ("number", "code", "error"),
    [
        (signal.SIGINT, -signal.SIGINT, "interrupted by SIGINT"),
        (signal.SIGTERM, 143, "interrupted by SIGTERM"),
    ],
)
def test_a_signal_ends_the_record_of_a_user_s_own_program(tmp_path, number, code, error):
    example = ROOT / "docs" / "examples" / "numpy_reinforce.py"
    words = [
        sys.executable,
        str(example),
        "--runs-dir",
        str(tmp_path),
        "--total-timesteps",
        "100_000_000",
    ]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE)
    while not any(p.stat().st_size for p in tmp_path.glob("*/*/updates.jsonl")):
        assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    (folder,) = find_runs(tmp_path)
    run = read_run(folder)
    assert (run.info.status, run.info.error) == ("interrupted", error)
    assert len(run.updates()) == len(run.rollouts()) > 0
    assert run.check_files() == []


def test_the_handler_of_sigterm_is_restored_and_one_of_the_program_is_left_alone(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    try:
        for mine in (signal.SIG_DFL, signal.SIG_IGN, print):
            signal.signal(signal.SIGTERM, mine)
            with RunWriter(tmp_path / "run", INFO, overwrite=True):
                assert (signal.getsignal(signal.SIGTERM) is mine) == (mine is not signal.SIG_DFL)
            assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_schema_versions_and_wrong_headers_are_refused_in_one_line(tmp_path):
    path = tmp_path / "run"
    RunWriter(path, INFO).close("completed")
    info = json.loads((path / "run.json").read_text())
    for changed, message in (
        (info | {"schema_version": 1}, "schema version 1; this version of cleanba reads 2"),
        ([], "expected `object`, got `array`"),
        ({k: v for k, v in info.items() if k != "seed"}, "missing field `seed`"),
        (info | {"status": "fine"}, "status: invalid enum value 'fine'"),
        (info | {"hyperparameters": None}, "hyperparameters: expected `object`, got `null`"),
    ):
        (path / "run.json").write_text(json.dumps(changed))
        with pytest.raises(RecordError, match=r"run\.json") as caught:
            read_run(path)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
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


def test_a_revision_tells_changed_source_but_not_changed_results(tmp_path):
    def git(*words):
        name = ("-c", "user.name=t", "-c", "user.email=t@t")
        subprocess.run(["git", "-C", tmp_path, *name, *words], check=True, capture_output=True)

    names = ("cleanba/ppo.py", "results/base/README.md", "README.md", "reports/build.py")
    files = [tmp_path / name for name in names]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("first")
    code, page, readme, report = files
    assert source_revision(code.parent) == ""
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    revision = source_revision(code.parent)
    assert len(revision) == 40
    page.write_text("second")
    assert source_revision(code.parent) == revision
    for file in (code, readme, report):
        file.write_text("second")
        assert source_revision(code.parent) == revision + "+changes"
        file.write_text("first")


def test_the_package_imports_neither_jax_nor_torch():
    code = (
        "import pkgutil, sys, cleanba.record as r\n"
        "from importlib import import_module\n"
        "for module in pkgutil.iter_modules(r.__path__, 'cleanba.record.'):\n"
        "    import_module(module.name)\n"
        "print(sorted({'jax', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr
