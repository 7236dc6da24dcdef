"""The folder of a record: names of runs and files, checksums, atomic replacement of a file."""

import hashlib
import os
from pathlib import Path

from cleanba.record.files import LARGEST_ARRAYS, open_regular
from cleanba.record.schema import FILE_OF_ROW, FileDigest

BLOCK_BYTES = 1 << 20
INFO_FILE = "run.json"
ACTIONS_FILE = "actions/rollouts.bin"
PUBLISHED = (*FILE_OF_ROW.values(), ACTIONS_FILE)  # of an archive, beside run.json and checkpoints
CHECKPOINTS_FOLDER = "checkpoints"
VIDEOS = "videos/*.mp4"  # pattern of the files
LOG_FILE = "log.txt"  # the launcher's; it can grow after training has ended

TEXT_SUFFIXES = {".jsonl", ".json", ".csv", ".tsv", ".txt", ".md"}


class RecordError(Exception):
    """A record that cannot be written or read; the message is one line that names the file."""


def run_name(system: str, setting: str, env_id: str, seed: int) -> str:
    """Name the folder of a run: `<system>__<setting>__<env_id>__s<seed>`."""
    return "__".join((system, setting, env_id.replace("/", "-"), f"s{seed}"))


def find_runs(*paths: Path | str) -> list[Path]:
    """Return the folders of all run records at or below the given paths, sorted, each once."""
    found = set()
    for path in paths:
        # os.walk, unlike glob, continues if a folder was deleted after it was listed
        for folder, folders, files in os.walk(path):
            if INFO_FILE in files:
                found.add(Path(folder))
                folders.clear()  # a record contains no other records
    return sorted(found)


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file, or a link to one, atomically: a reader sees the old content or the new one."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.unlink(missing_ok=True)  # left by a killed process, or a link that would be followed
    with open(temporary, "xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def digest_bytes(data: bytes, name: str) -> FileDigest:
    """Return the checksum of a file's content; lines are counted where the name is a text file's."""
    is_text = Path(name).suffix in TEXT_SUFFIXES
    lines = data.count(b"\n") if is_text else None
    return FileDigest(bytes=len(data), lines=lines, sha256=hashlib.sha256(data).hexdigest())


def digest_file(path: Path) -> FileDigest:
    """Return the checksum of a file, as `digest_bytes`, without holding all of it in memory.

    Raises:
      OSError: if it cannot be read or is not a regular file.
    """
    whole, size, lines = hashlib.sha256(), 0, 0
    with open_regular(path, LARGEST_ARRAYS) as file:
        while block := file.read(BLOCK_BYTES):
            whole.update(block)
            size += len(block)
            lines += block.count(b"\n")
    is_text = path.suffix in TEXT_SUFFIXES
    return FileDigest(bytes=size, lines=lines if is_text else None, sha256=whole.hexdigest())


def digest_files(directory: Path) -> dict[str, FileDigest]:
    """Return the checksum of every file of a record, by name.

    Excluded are `run.json`, which holds the checksums, checkpoints, which are temporary, and `log.txt`.
    """
    names = (p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    left_out = (INFO_FILE, LOG_FILE)
    return {
        name: digest_file(directory / name)
        for name in sorted(names)
        if name not in left_out and not name.startswith(f"{CHECKPOINTS_FOLDER}/")
    }


def damage(found: FileDigest | None, expected: FileDigest) -> str | None:
    """Describe how a file differs from its checksum in `run.json`; None if it does not."""
    if found is None:
        return "is missing; it was there when the run ended"
    for what in ("lines", "bytes"):
        now, then = getattr(found, what), getattr(expected, what)
        if now != then:
            return f"is damaged: {now} {what}, {then} when the run ended"
    if found.sha256 != expected.sha256:
        return "is damaged: its SHA-256 is not the one that run.json has"
    return None
