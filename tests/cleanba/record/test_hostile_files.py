"""Files of others: what is not a regular file of a plausible size and depth costs one line, and no more."""

import hashlib
import io
import json
import os
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cleanba.record import (
    Episode,
    RecordError,
    Resumption,
    RunInfo,
    RunWriter,
    checkpoints,
    read_run,
)
from cleanba.record.files import decode_json, open_regular, read_arrays, read_file

NOTE = Resumption(at="2026-01-01T00:00:00+00:00", hardware={}, revision="", command=[])


@pytest.fixture
def record(tmp_path):
    """The folder of a record that was interrupted, with a checkpoint."""
    folder = tmp_path / "run"
    info = RunInfo(system="mine", setting="cpu", env_id="Catch-v0", seed=1)
    writer = RunWriter(folder, info)
    writer.write(Episode(step=1, wall_time=0.1, env_index=0, episode_return=1.0, length=1))
    checkpoints.save(
        folder, {"x": np.ones(2)}, update=1, wall_time=1.0, sizes=writer.sizes(), digests=[], pinned={},
        keep="all",
    )  # fmt: skip
    writer.close("interrupted")
    return folder


def forge(folder: Path, **changes):
    """Change a checkpoint's marker, with a hash that fits."""
    (path,) = folder.glob("checkpoints/*/checkpoint.json")
    body = json.loads(path.read_text())["body"] | changes
    data = msgspec.json.encode(body)
    marker = {"sha256": hashlib.sha256(data).hexdigest(), "body": msgspec.Raw(data)}
    path.write_bytes(msgspec.json.encode(marker))


@pytest.mark.parametrize("absolute", [True, False])
def test_a_checkpoint_cuts_no_file_outside_its_record(record, tmp_path, absolute):
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    name = str(victim) if absolute else "../victim.txt"
    forge(record, sizes={name: 0})
    with pytest.raises(RecordError) as caught:
        checkpoints.newest(record)
    assert "\n" not in str(caught.value)
    with pytest.raises(RecordError, match="not a file that resuming cuts"):
        RunWriter.resume(record, {name: 0}, NOTE)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["updates.jsonl", "actions"])
def test_a_record_with_a_link_is_not_resumed(record, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    (record / name).rename(elsewhere)
    (record / name).symlink_to(elsewhere)
    sizes = checkpoints.newest(record).sizes
    with pytest.raises(RecordError, match=f"{name} is a link"):
        RunWriter.resume(record, sizes, NOTE)


def test_checksums_are_of_files_inside_the_record(record):
    path = record / "run.json"
    info = json.loads(path.read_text())
    for name in ("/etc/hostname", "../../x", "a/../../x", "a\nb"):
        info["files"][name] = {"bytes": 1, "lines": 1, "sha256": "0" * 64}
        path.write_text(json.dumps(info))
        with pytest.raises(RecordError, match="files"):
            read_run(record)
        del info["files"][name]


def test_a_fifo_a_device_and_a_folder_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "zeros", "folder"):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            open_regular(tmp_path / name, 1 << 20)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2 << 20)
    with pytest.raises(OSError, match="larger than 1 MB"):
        read_file(tmp_path / "large", 1 << 20)


@pytest.mark.parametrize("name", ["run.json", "episodes.jsonl"])
@pytest.mark.parametrize("bad", ["fifo", "zeros", "deep"])
def test_a_record_with_such_a_file_costs_one_line(record, name, bad):
    path = record / name
    path.unlink()
    if bad == "fifo":
        os.mkfifo(path)
    elif bad == "zeros":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("[" * 200_000 + "\n")
    with pytest.raises(RecordError) as caught:
        read_run(record).episodes()
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_that_is_nested_too_deeply_is_a_decode_error():
    with pytest.raises(msgspec.DecodeError, match="nested too deeply"):
        decode_json(b"[" * 200_000)


def test_arrays_that_expand_beyond_the_limit_are_not_read(tmp_path):
    bomb = tmp_path / "bomb.npz"
    np.savez_compressed(bomb, x=np.zeros(1 << 22, np.uint8))
    assert bomb.stat().st_size < 1 << 14
    with pytest.raises(ValueError, match="expands to more than 1 MB"):
        read_arrays(bomb, 1 << 20)


def test_arrays_that_claim_an_impossible_shape_are_one_line():
    header = b"\x93NUMPY\x01\x00v\x00"
    text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999,), }"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("x.npy", header + text.ljust(117) + b"\n")
    with pytest.raises(ValueError) as caught:  # noqa: PT011  numpy's words differ
        read_arrays(content.getvalue())
    assert "\n" not in str(caught.value)


def test_names_that_reorder_text_are_no_names(record):
    path = record / "run.json"
    info = json.loads(path.read_text())
    for name in ("a\u202eb", "a\x1b[31m", "a\nb", "", "x" * 201):
        path.write_text(json.dumps(info | {"setting": name}))
        with pytest.raises(RecordError, match="setting"):
            read_run(record)
