"""Unpacks an archive of a stranger: nothing is written outside the target, and memory is bounded."""

import itertools
import logging
import re
import shutil
import stat
import struct
import zipfile
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import bagit

from cleanba.record.files import MB, open_regular
from cleanba.record.schema import SHOWN
from reports.archive import LARGEST_FILE

MOST_FILES = 200_000
# Of the list of files at the end of an archive, which zipfile reads at once.
LARGEST_LIST = 64 * MB
# An archive of records and checkpoints expands to less than 20 times its size.
LARGEST_RATIO = 100
TAG_FILES = ("bagit.txt", "bag-info.txt", "manifest-sha256.txt", "tagmanifest-sha256.txt")
LONGEST_LINE = 4096  # bytes, of a tag file
BLOCK = MB

_PART = re.compile(rf"(?!\.\.?\Z){SHOWN}{{1,255}}\Z")
_END = struct.Struct("<4s4H2LH")  # of zip files, see APPNOTE.TXT of PKWARE, 4.3.16
_END64 = struct.Struct("<4sQ2H2L4Q")  # 4.3.14
_LOCATOR64 = struct.Struct("<4sLQL")  # 4.3.15
LONGEST_COMMENT = 1 << 16

LONGEST_MESSAGE = 200


class ArchiveError(ValueError):
    """An archive that cannot be audited; the message is one line."""


def unpack(file: Path, folder: Path) -> Path:
    """Unpack an archive, and compare its files with its manifests.

    Args:
      file: the archive.
      folder: an empty folder.

    Returns:
      The bag's folder.

    Raises:
      ArchiveError: with one line.
    """
    try:
        with open_regular(file, LARGEST_FILE) as source:
            _check_list(source)
            with zipfile.ZipFile(source) as archive:
                _extract(archive, file.stat().st_size, folder)
    except ArchiveError as error:
        raise ArchiveError(f"{file}: {error}") from None
    except OSError as error:
        raise ArchiveError(f"{file}: {error.strerror or error}") from None
    except Exception as error:  # of zipfile and zlib, for damaged archives
        raise ArchiveError(f"{file}: {_line(error)}") from None
    tops = sorted(folder.iterdir())
    if len(tops) != 1 or not tops[0].is_dir():
        raise ArchiveError(f"{file}: not one folder")
    try:
        check_bag(tops[0])
    except ArchiveError as error:
        raise ArchiveError(f"{file}: {error}") from None
    return tops[0]


def _check_list(file: BinaryIO) -> None:
    """Refuse a list of files that would take much memory."""
    size = file.seek(0, 2)
    tail_size = min(size, _END.size + LONGEST_COMMENT)
    file.seek(size - tail_size)
    tail = file.read(tail_size)
    start = tail.rfind(b"PK\5\6")
    if start < 0 or len(tail) - start < _END.size:
        raise ArchiveError("not a zip file, or cut off")
    list_size = _END.unpack_from(tail, start)[5]
    before = size - tail_size + start - _LOCATOR64.size - _END64.size
    if before >= 0:  # zipfile prefers a 64-bit record there
        file.seek(before)
        record, locator = file.read(_END64.size), file.read(_LOCATOR64.size)
        if locator.startswith(b"PK\6\7"):
            list_size = _END64.unpack(record)[8]
    if list_size > LARGEST_LIST:
        raise ArchiveError("its list of files is too long")
    file.seek(0)


def _extract(archive: zipfile.ZipFile, size: int, folder: Path) -> None:
    members = archive.infolist()
    if len(members) > MOST_FILES:
        raise ArchiveError(f"more than {MOST_FILES:,} files")
    if sum(member.file_size for member in members) > LARGEST_RATIO * size:
        raise ArchiveError(f"expands to more than {LARGEST_RATIO} times its size")
    names = set()
    for member in members:
        path = _checked_path(member)
        if path.as_posix().casefold() in names:
            raise ArchiveError(f"two files named {path.as_posix()[:200]!r}")
        names.add(path.as_posix().casefold())
    for member in members:
        target = folder / _checked_path(member)
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(member) as source, open(target, "xb") as new:
            shutil.copyfileobj(source, new, BLOCK)  # not more than the size that its header has


def _checked_path(member: zipfile.ZipInfo) -> PurePosixPath:
    """Return the path of a file inside the archive, if it is harmless."""
    name = member.filename
    shown = repr(name[:200])
    parts = name.split("/")
    if "\\" in name or not all(map(_PART.match, parts)):
        raise ArchiveError(f"{shown} is not a name of a file inside the archive")
    mode = member.external_attr >> 16
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG) or member.flag_bits & 1:
        raise ArchiveError(f"{shown} is a link, a device or encrypted")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ArchiveError(f"{shown} is compressed in another way than by deflate")
    return PurePosixPath(name)


def check_bag(folder: Path) -> None:
    """Compare all files of a bag with its manifests.

    Raises:
      ArchiveError: with one line.
    """
    for path in folder.iterdir():
        if path.is_dir() and path.name == "data":
            continue
        if path.name not in TAG_FILES:
            raise ArchiveError(f"{path.name[:LONGEST_MESSAGE]!r} does not belong there")
        with open(path, "rb") as file:
            # a line is not read beyond its largest length
            lines = (file.readline(LONGEST_LINE + 1) for _ in range(MOST_FILES))
            lengths = [len(line) for line in itertools.takewhile(bool, lines)]
            if file.read(1) or max(lengths, default=0) > LONGEST_LINE:
                raise ArchiveError(f"{path.name} is too long")
    logging.getLogger("bagit").setLevel(logging.CRITICAL)  # it would print what it also raises
    try:
        bag = bagit.Bag(str(folder))
        if "sha256" not in bag.algorithms:
            raise ArchiveError("no manifest with SHA-256")
        bag.validate(processes=1)
    except ArchiveError:
        raise
    except Exception as error:  # of bagit, for whatever is wrong with tag files
        raise ArchiveError(_line(error)) from None


def _line(error: Exception) -> str:
    """Return an error's message, which may quote the archive, as one short line."""
    line = (str(error).splitlines() or [type(error).__name__])[0][:LONGEST_MESSAGE]
    return "".join(c if c.isprintable() else "?" for c in line)
