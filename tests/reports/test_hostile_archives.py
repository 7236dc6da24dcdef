"""100 hostile or damaged archives: one line each, exit code 2, nothing outside the target, little memory."""

import contextlib
import hashlib
import random
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import pytest
from synthetic_runs import study_folder

from cleanba.record.files import MB
from reports import archive
from reports.unpack import ArchiveError, check_bag, unpack
from tests.cleanba.conftest import ROOT

MOST_MEMORY = 8 * MB
LINK = 0o120777 << 16


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """The bytes of an archive, and its files."""
    folder = tmp_path_factory.mktemp("honest")
    study_folder(
        folder / "runs/small", ("moolib",), ("a0-l0-t1",), ("Catch-v0",), (1,), steps=5_120
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert archive.main(["small"]) == 0
    file = folder / "dist/small.zip"
    with zipfile.ZipFile(file) as made:
        return file.read_bytes(), {name: made.read(name) for name in made.namelist()}


def write(file, content, name="", data=b"x", attributes=0, method=zipfile.ZIP_DEFLATED):
    """Write files, and one more of any name and kind."""
    with zipfile.ZipFile(file, "w", method) as made:
        for other, text in content.items():
            made.writestr(other, text)
        if name:
            member = zipfile.ZipInfo(name)
            member.external_attr, member.compress_type = attributes, method
            made.writestr(member, data)


def truncated(file, whole, content, rng):
    file.write_bytes(whole[: rng.randrange(len(whole))])


def flipped(file, whole, content, rng):
    data = bytearray(whole)
    for _ in range(rng.randrange(1, 40)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def outside(file, whole, content, rng):
    name = rng.choice(
        [
            "../escaped", "small/../../escaped", "/tmp/escaped", "small/data/../../../escaped", "..",
            "small//x", "C:\\escaped", "small\\..\\escaped", "small/./x", "~/escaped\n", "small/\u202ex",
            "small/" + 300 * "x",
        ]
    )  # fmt: skip
    write(file, content, name)


def link(file, whole, content, rng):
    name = rng.choice(["small/data/link", "small/data/runs"])
    write(file, content, name, rng.choice([b"/etc", b"../../..", b"x"]), LINK)


def bomb(file, whole, content, rng):
    write(file, {}, "small/data/zeros", bytes(rng.choice([50, 100]) * 2**20))


def lying_sizes(file, whole, content, rng):
    data = bytearray(whole)
    at = data.rfind(b"PK\1\2", 0, rng.randrange(len(data) // 2, len(data)))
    struct.pack_into("<L", data, at + rng.choice([20, 24]), rng.choice([0, 1, 2**31, 2**32 - 2]))
    file.write_bytes(data)


def long_list(file, whole, content, rng):
    data = bytearray(whole)
    at = data.rfind(b"PK\5\6")
    struct.pack_into("<L", data, at + 12, rng.choice([2**31, 2**32 - 1]))
    file.write_bytes(data)


def twice(file, whole, content, rng):
    name = rng.choice(list(content))
    write(file, content, rng.choice([name, name.upper(), name.swapcase()]))


def missing(file, whole, content, rng):
    content.pop(rng.choice([name for name in content if not name.endswith("bag-info.txt")]))
    write(file, content)


def changed(file, whole, content, rng):
    name = rng.choice([name for name in content if "/data/" in name])
    content[name] = rng.choice([b"", b"null", content[name] + b" ", content[name][:-1]])
    write(file, content)


def added(file, whole, content, rng):
    write(
        file,
        content,
        rng.choice(["small/data/more", "small/data/runs/small/x/run.json", "other/x"]),
    )


def damaged_tags(file, whole, content, rng):
    name, text = rng.choice(
        [
            ("bagit.txt", b"BagIt-Version: 97\nTag-File-Character-Encoding: UTF-8\n"),
            ("bagit.txt", b"BagIt-Version: 0.97\nTag-File-Character-Encoding: rot13\n"),
            ("bagit.txt", b"\xff\xfe\x00"),
            ("bag-info.txt", b"Payload-Oxum: 1.1\n"),
            ("bag-info.txt", b"\x80abc"),
            ("manifest-sha256.txt", b"0" * 64 + b"  data/nothing\n"),
            ("manifest-sha256.txt", b"0" * 64 + b"  ../../../etc/passwd\n"),
            ("manifest-sha256.txt", b"\x00" * 1000),
            ("manifest-sha256.txt", b""),
            ("fetch.txt", b"http://localhost/x 1 data/x\n"),
            ("fetch.txt", b"file:///etc/passwd 1 ../x\n"),
        ]
    )
    if name == "fetch.txt":
        content["small/manifest-sha256.txt"] += b"0" * 64 + b"  data/x\n"
    content[f"small/{name}"] = text
    write(file, content)


def no_archive(file, whole, content, rng):
    rng.choice(
        [
            lambda: file.write_bytes(b""),
            lambda: file.write_bytes(b"PK\5\6"),
            lambda: file.write_bytes(rng.randbytes(5000)),
            lambda: file.mkdir(),
            lambda: file.symlink_to("/dev/zero"),
            lambda: write(file, {}, "x"),
            lambda: write(file, {"a/x": b"", "b/x": b""}),
            lambda: write(file, content, "small/lzma", method=zipfile.ZIP_LZMA),
        ]
    )()


WAYS = (
    truncated, flipped, outside, link, bomb, lying_sizes, long_list, twice, missing, changed, added,
    damaged_tags, no_archive,
)  # fmt: skip
# What must be refused before anything is read or written.
REASONS = {
    bomb: "expands to more than 100 times its size",
    long_list: "its list of files is too long",
}


@contextlib.contextmanager
def little_memory():
    """Check that what is done allocates little memory at a time."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_MEMORY


def test_a_long_line_is_not_read_into_memory(tmp_path):
    (tmp_path / "bag-info.txt").write_bytes(b"x" * 50_000_000)
    with little_memory(), pytest.raises(ArchiveError, match=r"bag-info\.txt is too long"):
        check_bag(tmp_path)


def test_a_large_file_is_not_read_into_memory(honest, tmp_path):
    content, data = dict(honest[1]), random.Random(0).randbytes(50_000_000)
    digest = hashlib.sha256(data).hexdigest()
    content["small/manifest-sha256.txt"] += f"{digest}  data/large\n".encode()
    for name in ("bag-info.txt", "tagmanifest-sha256.txt"):  # which have other sums
        del content[f"small/{name}"]
    write(tmp_path / "a.zip", content, "small/data/large", data, method=zipfile.ZIP_STORED)
    (tmp_path / "target").mkdir()
    with little_memory():
        assert unpack(tmp_path / "a.zip", tmp_path / "target").name == "small"


def files_outside(folder, *allowed):
    return {path for path in folder.iterdir() if path.name not in allowed}


def test_each_of_100_hostile_archives_is_one_line_and_harmless(honest, tmp_path):
    whole, content = honest
    messages = []
    for number in range(100):
        rng = random.Random(number)
        way = WAYS[number % len(WAYS)]
        place = tmp_path / str(number)
        (place / "target").mkdir(parents=True)
        file = place / "a.zip"
        way(file, whole, dict(content), rng)
        message = ""
        with little_memory():
            try:
                unpack(file, place / "target")
            except ArchiveError as error:
                message = str(error)
                messages.append(message)
            else:
                # A flipped bit of a date changes nothing that is read.
                assert way in (flipped, lying_sizes), (way, number)
        assert REASONS.get(way, "") in message
        assert files_outside(place) == {file, place / "target"}
        assert not [path for path in (place / "target").rglob("*") if path.is_symlink()]
    assert len(messages) > 85
    assert all("\n" not in line and len(line) < 500 for line in messages)
    assert not Path("/tmp/escaped").exists()


@pytest.mark.parametrize("way", [outside, missing, no_archive])
def test_the_command_prints_one_line_and_exits_with_2(honest, tmp_path, way):
    whole, content = honest
    file = tmp_path / "a.zip"
    way(file, whole, dict(content), random.Random(1))
    command = [sys.executable, "-m", "reports.audit", str(file), "--out", str(tmp_path / "audits")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("error: ")
    assert not (tmp_path / "audits").exists()
