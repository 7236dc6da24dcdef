"""Reads files that others wrote: regular files only, with bounded size, depth and expansion.

Every reader of the toolkit (trainers, replay, analysis, reports, launcher) reads through these functions.
A record, a table or a checkpoint that a stranger sends may be a FIFO, a link to a device, JSON of 200,000
brackets, or an archive that expands to many times its size. Each of these raises one of the exceptions that
a reader of damaged files handles anyway: `OSError` or `ValueError`, with a message of one line.
"""

import contextlib
import errno
import io
import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np

MB = 2**20
# Largest sizes that are read, in bytes. The longest run of the papers (200 million steps) stays below them.
LARGEST_INFO = 16 * MB  # run.json, checkpoint.json, result.json
LARGEST_ROWS = 1024 * MB  # one file of rows
LARGEST_TABLE = 256 * MB  # a table, log or TensorBoard file of another tool
LARGEST_ARRAYS = 4096 * MB  # arrays of a checkpoint
LARGEST_MODEL = 1024 * MB
LARGEST_STUDY = MB // 4

Type = TypeVar("Type")


def open_regular(path: Path | str, largest: int) -> BinaryIO:
    """Open a regular file for reading, which never blocks.

    Raises:
      OSError: if it does not open, is not a regular file (nor a link to one), or is larger than `largest`
        bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > largest:
        os.close(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        raise OSError(errno.EFBIG, f"larger than {largest // MB or 1} MB", str(path))
    return os.fdopen(descriptor, "rb")


def read_file(path: Path | str, largest: int) -> bytes:
    """Return the content of a regular file of at most `largest` bytes.

    Raises:
      OSError: as `open_regular`.
    """
    with open_regular(path, largest) as file:
        return file.read(largest)


def decode_json(data: bytes | str, kind: type[Type] | Any = Any) -> Type:
    """Decode JSON as a type, as `msgspec.json.decode`.

    Raises:
      msgspec.DecodeError: if it is not JSON of that type, is not UTF-8, or is nested too deeply.
    """
    with json_errors():
        return msgspec.json.decode(data, type=kind)


@contextlib.contextmanager
def json_errors() -> Iterator[None]:
    """Turn the other exceptions of decoding JSON into `msgspec.DecodeError`."""
    try:
        yield
    except RecursionError:
        raise msgspec.DecodeError("nested too deeply") from None
    except UnicodeDecodeError:
        raise msgspec.DecodeError("not UTF-8") from None


def read_arrays(source: Path | bytes, largest: int = LARGEST_ARRAYS) -> dict[str, np.ndarray]:
    """Return the arrays of an `.npz` file, or of its content, by name. Nothing is unpickled.

    Args:
      source: the file, or its content.
      largest: bytes of the file, and of all arrays after decompression.

    Raises:
      OSError: as `open_regular`.
      ValueError: if it is not an `.npz` file, holds Python objects, or expands to more than `largest` bytes.
    """
    file = io.BytesIO(source) if isinstance(source, bytes) else open_regular(source, largest)
    with file, _value_errors():
        with zipfile.ZipFile(file) as archive:
            expanded = sum(member.file_size for member in archive.infolist())
        if expanded > largest:
            raise ValueError(f"expands to more than {largest // MB or 1} MB")
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}


def read_array(path: Path) -> np.ndarray:
    """Return the array of an `.npy` file of at most `LARGEST_TABLE` bytes. Nothing is unpickled.

    Raises:
      OSError: as `open_regular`.
      ValueError: if it is not an `.npy` file, or holds Python objects.
    """
    content = read_file(path, LARGEST_TABLE)
    with _value_errors():
        return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)


@contextlib.contextmanager
def _value_errors() -> Iterator[None]:
    """Turn the exceptions of zipfile, zlib and numpy, other than OSError, into ValueError of one line."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0]) from None
