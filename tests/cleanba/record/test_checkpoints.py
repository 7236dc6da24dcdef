"""A checkpoint is on disk before its marker; incomplete ones are ignored, damaged ones are reported."""

import os
from pathlib import Path

import numpy as np
import pytest

from cleanba.record import (
    Episode,
    RecordError,
    Rollout,
    RunInfo,
    RunWriter,
    Update,
    checkpoints,
    folder,
)
from cleanba.record.tensorboard import TensorBoardWriter

ARRAYS = {
    "['params']['Dense_0']['kernel']": np.arange(6, dtype=np.float32).reshape(2, 3),
    "['opt_state'][0].count": np.int32(7),
    "['empty']": np.zeros((0, 2), np.uint8),
}

INFO = RunInfo(system="s", setting="h", env_id="E-v0", seed=1)
EPISODE = Episode(step=8, wall_time=1.0, env_index=0, episode_return=1.0, length=8)
UPDATE = Update(version=2, step=8, wall_time=1.0, update_seconds=1.0, learning_rate=0.1, loss=0.5)
ROLLOUT = Rollout(
    actor=0, group=0, rollout=1, steps=8, wall_time=1.0, version_first=1, version_last=1,
    versions=[(1, 8)], learner_version=1,
)  # fmt: skip


def save(run, update, keep=2, arrays=ARRAYS):
    return checkpoints.save(
        run, arrays, update=update, wall_time=1.5, sizes={"updates.jsonl": 10}, digests=["ab"],
        pinned={"versions": {"numpy": "2"}, "hyperparameters": {"rate": 0.1, "sizes": (1, 2)}}, keep=keep,
    )  # fmt: skip


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path):
    saved = save(tmp_path, 12)
    found = checkpoints.newest(tmp_path)
    pinned = {"versions": {"numpy": "2"}, "hyperparameters": {"rate": 0.1, "sizes": [1, 2]}}
    assert found == (saved, 12, 1.5, {"updates.jsonl": 10}, ["ab"], pinned)
    arrays = checkpoints.load(found)
    assert list(arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        assert arrays[name].tobytes() == array.tobytes()


def test_objects_that_would_have_to_be_unpickled_are_not_loaded(tmp_path):
    save(tmp_path, 1, arrays={"x": np.array([{"a": 1}], dtype=object)})
    with pytest.raises(RecordError, match="allow_pickle=False"):
        checkpoints.load(checkpoints.newest(tmp_path))


@pytest.mark.parametrize("name", ["arrays.npz", "checkpoint.json"])
def test_every_changed_byte_is_named(tmp_path, name):
    path = save(tmp_path, 3) / name
    good = path.read_bytes()
    for at in range(0, len(good), 7):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        words = rf"00000003 is damaged.*{name} (has changed|is not readable)"
        with pytest.raises(RecordError, match=words) as caught:
            checkpoints.newest(tmp_path)
        assert "\n" not in str(caught.value)
    for cut in (b"", good[:-1]):
        path.write_bytes(cut)
        with pytest.raises(RecordError, match="00000003 is damaged"):
            checkpoints.newest(tmp_path)


def test_a_missing_file_of_arrays_is_named_and_a_missing_marker_makes_it_no_checkpoint(tmp_path):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "checkpoint.json").unlink()
    assert checkpoints.newest(tmp_path).update == 1
    assert checkpoints.newest(tmp_path / "nothing") is None
    (tmp_path / "checkpoints" / "00000001" / "arrays.npz").unlink()
    with pytest.raises(RecordError, match=r"00000001 is damaged.*arrays\.npz is missing"):
        checkpoints.newest(tmp_path)
    save(tmp_path, 2)  # begun before, by a run that was killed
    assert checkpoints.newest(tmp_path).update == 2


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (0, [1, 2, 3, 4, 5])])
def test_the_newest_are_kept(tmp_path, keep, left):
    for update in range(1, 6):
        save(tmp_path, update, keep)
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == left


@pytest.fixture
def synced(monkeypatch):
    """What was synced to disk and renamed, in order: pairs of action and name, with the size."""
    done = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(("fsync", path.name, path.stat().st_size))
        fsync(descriptor)

    def record_replace(source, target):
        done.append(("replace", Path(target).name, Path(source).stat().st_size))
        replace(source, target)

    monkeypatch.setattr(checkpoints.os, "fsync", record_fsync)
    monkeypatch.setattr(folder.os, "replace", record_replace)
    return done


def test_the_arrays_are_on_disk_before_the_marker_is_there(tmp_path, synced):
    saved = save(tmp_path, 1)
    arrays, marker = ((saved / name).stat().st_size for name in ("arrays.npz", "checkpoint.json"))
    assert synced == [
        ("fsync", "arrays.npz", arrays),
        ("fsync", "checkpoint.json.tmp", marker),
        ("replace", "checkpoint.json", marker),
    ]


def test_every_file_of_the_record_is_on_disk_before_a_checkpoint_is_marked(tmp_path, monkeypatch):
    """A power failure after the marker must not leave a file shorter than the checkpoint says."""
    on_disk, at_marker = {}, []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        fsync(descriptor)
        status = os.fstat(descriptor)
        on_disk[status.st_ino] = status.st_size

    def record_replace(source, target):
        if os.path.basename(target) == checkpoints.MARKER:
            assert on_disk[os.stat(source).st_ino] == os.stat(source).st_size
            at_marker.append(dict(on_disk))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    with RunWriter(tmp_path / "run", INFO) as writer:
        board = TensorBoardWriter(writer.directory / "tensorboard")
        for update in (1, 2):
            writer.write(UPDATE, ROLLOUT, EPISODE)
            writer.write_actions(b"frame")
            board.write(8 * update, {"losses/loss": 1.0})
            sizes = writer.sizes()
            assert len(sizes) == 4
            sizes[board.path.relative_to(writer.directory).as_posix()] = board.size()
            checkpoints.save(
                writer.directory, {"x": np.zeros(2)}, update=update, wall_time=1.0, sizes=sizes,
                digests=[], pinned={}, keep="all",
            )  # fmt: skip
            for name, size in sizes.items():
                status = os.stat(writer.directory / name)
                assert size == status.st_size > 0
                assert at_marker[update - 1].get(status.st_ino) == size, name
        board.close()
    assert len(at_marker) == 2
    assert checkpoints.newest(writer.directory).sizes == sizes
