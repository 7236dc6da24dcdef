"""Reads a run record, and reports its problems."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cleanba.record.encoding import describe_error
from cleanba.record.files import (
    LARGEST_INFO,
    LARGEST_ROWS,
    decode_json,
    json_errors,
    open_regular,
    read_file,
)
from cleanba.record.folder import INFO_FILE, RecordError, damage, digest_bytes, digest_file
from cleanba.record.schema import (
    FILE_OF_ROW,
    SCHEMA_VERSION,
    Episode,
    FileDigest,
    Rollout,
    RunInfo,
    Update,
)

TAIL_BYTES = 1 << 16  # read at once from the end of a file, for its last line

RowType = TypeVar("RowType", Episode, Rollout, Update)

_DECODERS = {kind: msgspec.json.Decoder(kind) for kind in FILE_OF_ROW}


class _Head(msgspec.Struct):
    """The schema version of a `run.json`."""

    schema_version: Any = None


@dataclass
class Run:
    """One run record.

    Attributes:
      path: its folder.
      info: its `run.json`.
      problems: defects that do not prevent reading; those of a file are added when it is read.
    """

    path: Path
    info: RunInfo
    problems: list[str] = field(default_factory=list)

    @property
    def completed(self) -> bool:
        """Whether `run.json` says that the run was completed."""
        return self.info.status == "completed"

    @property
    def files(self) -> dict[str, FileDigest]:
        """Checksums of the files when the run ended; empty while it runs."""
        return self.info.files or {}

    def episodes(self) -> list[Episode]:
        """Return the rows of `episodes.jsonl`. See `rollouts` and `updates` for the other files.

        A torn last line of a run that was killed is reported in `problems` and left out.

        Raises:
          RecordError: if a line is damaged (the message names file, line and field), or if the run has
            ended and the file does not match its checksum in `run.json`.
        """
        return self._rows(Episode)

    def rollouts(self) -> list[Rollout]:
        """Return the rows of `rollouts.jsonl`; see `episodes`."""
        return self._rows(Rollout)

    def updates(self) -> list[Update]:
        """Return the rows of `updates.jsonl`; see `episodes`."""
        return self._rows(Update)

    def last_update(self) -> Update | None:
        """Return the last whole row of `updates.jsonl`, if it has one, without reading those before it.

        Raises:
          RecordError: if it is damaged; the message names the file.
        """
        path = self.path / FILE_OF_ROW[Update]
        try:
            with open_regular(path, LARGEST_ROWS) as file:
                start, tail = file.seek(0, os.SEEK_END), b""
                while start and tail.count(b"\n") < 2:
                    end, start = start, max(0, start - TAIL_BYTES)
                    file.seek(start)
                    tail = file.read(end - start) + tail
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RecordError(f"{path}: {error.strerror}") from None
        *whole, _ = tail.split(b"\n")  # what follows the last newline is torn
        if not whole:
            return None
        return _decode_line(Update, whole[-1], f"{path}, last line")

    def check_sizes(self, names: Iterable[str] | None = None) -> None:
        """Report in `problems` the files other than rows that are missing or have another size.

        This reads no file; `check_files` compares the checksums too.

        Args:
          names: which files; by default all.
        """
        for name, expected in self.files.items():
            if name in FILE_OF_ROW.values() or (names is not None and name not in names):
                continue
            path = self.path / name
            size = path.stat().st_size if path.is_file() else None
            if size != expected.bytes:
                found = None if size is None else msgspec.structs.replace(expected, bytes=size)
                self._report(f"{name} {damage(found, expected)}")

    def check_files(self, names: Iterable[str] | None = None) -> list[str]:
        """Compare the checksums of files that `run.json` lists.

        Args:
          names: which files; by default all.

        Returns:
          A line for each file that is damaged or missing.
        """
        problems = []
        for name in sorted(self.files.keys() & set(self.files if names is None else names)):
            path, expected = self.path / name, self.files[name]
            try:
                found = digest_file(path)
            except FileNotFoundError:
                found = None
            except OSError as error:
                problems.append(f"{name}: {error.strerror}")
                continue
            if what := damage(found, expected):
                problems.append(f"{name} {what}")
        return problems

    def _rows(self, kind: type[RowType]) -> list[RowType]:
        path = self.path / FILE_OF_ROW[kind]
        expected = self.files.get(path.name)
        try:
            data = read_file(path, LARGEST_ROWS)
        except FileNotFoundError:
            if expected is not None:
                raise RecordError(f"{path} {damage(None, expected)}") from None
            self._report(f"{path.name} is missing")
            return []
        except OSError as error:
            raise RecordError(f"{path}: {error.strerror}") from None
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._report(f"{path.name}: torn last line left out")
        rows = _decode_lines(kind, data[:whole], path)
        if expected is not None and (what := damage(digest_bytes(data, path.name), expected)):
            raise RecordError(f"{path} {what}")
        return rows

    def _report(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def _decode_lines(kind: type[RowType], data: bytes, path: Path) -> list[RowType]:
    try:
        with json_errors():
            rows = _DECODERS[kind].decode_lines(data)
    except msgspec.DecodeError:
        rows = None
    if rows is not None and len(rows) == data.count(b"\n"):
        return rows
    # decode line by line, to name the damaged one
    lines = data.split(b"\n")[:-1]
    return [_decode_line(kind, line, f"{path}, line {i}") for i, line in enumerate(lines, start=1)]


def _decode_line(kind: type[RowType], line: bytes, where: str) -> RowType:
    try:
        with json_errors():
            return _DECODERS[kind].decode(line)
    except msgspec.DecodeError as error:
        raise RecordError(f"{where}: {describe_error(error)}") from None


def read_run(directory: Path | str) -> Run:
    """Read the `run.json` of a record; its other files are read on demand.

    Unknown fields are ignored, here and in rows, so that a system may record more than the schema has.

    Raises:
      RecordError: if there is no readable `run.json` of the schema version that this reader knows.
    """
    path = Path(directory)
    header = path / INFO_FILE
    try:
        data = read_file(header, LARGEST_INFO)
        version = decode_json(data, _Head).schema_version
        if version != SCHEMA_VERSION:
            known = f"this version of cleanba reads {SCHEMA_VERSION}"
            raise RecordError(f"{header}: schema version {version!r}; {known}")
        info = decode_json(data, RunInfo)
    except (FileNotFoundError, NotADirectoryError):
        raise RecordError(f"{path}: no run record here (no {INFO_FILE})") from None
    except OSError as error:
        raise RecordError(f"{header}: not readable ({error.strerror})") from None
    except msgspec.DecodeError as error:
        raise RecordError(f"{header}: {describe_error(error)}") from None
    run = Run(path, info)
    if not run.completed:
        run.problems.append(f"status is {info.status!r}, not 'completed'")
    if info.status != "running" and not info.files:
        run.problems.append(f"{INFO_FILE} has no checksums of the files: damage would go unnoticed")
    return run
