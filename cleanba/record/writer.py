"""Writes a run record."""

import os
import re
import shutil
import signal
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from cleanba.record.encoding import ENCODER, describe_error
from cleanba.record.folder import (
    ACTIONS_FILE,
    INFO_FILE,
    RecordError,
    digest_files,
    replace_file,
)
from cleanba.record.locks import check_idle, take_lock
from cleanba.record.reader import read_run
from cleanba.record.redaction import redact_command, redact_text
from cleanba.record.schema import (
    CUT_FILE,
    FILE_OF_ROW,
    SCHEMA_VERSION,
    Resumption,
    Row,
    RunInfo,
    Status,
)

_LINES = {kind: msgspec.json.Decoder(kind) for kind in FILE_OF_ROW}


def now_utc() -> str:
    """Return the time as `run.json` has it: UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class RunWriter:
    """Writes one run record.

    with RunWriter(directory, RunInfo(system="mine", setting="cpu", env_id="Catch-v0", seed=1)) as record:
        record.write(Episode(...), Rollout(...), Update(...))

    Rows are on disk when `write` returns, so a killed run leaves a readable record. Leaving the context
    closes the record: as `completed`, as `interrupted` after KeyboardInterrupt, SIGTERM, SIGHUP or another
    SystemExit, as `failed` after any other exception. Python's default for SIGTERM and SIGHUP ends the
    process without leaving the context, so within it they raise SystemExit (143, 129), unless the program
    has its own handler or the context is not entered in the main thread.
    """

    def __init__(self, directory: Path | str, info: RunInfo, overwrite: bool = False):
        """Create the folder and its `run.json`.

        Args:
          directory: folder of the run; it must not exist or must be empty, unless it holds a run and
            `overwrite` is given.
          info: what the run is and how it was started; the writer sets `started` to the present time if it
            is not set, sets `ended`, `status`, `error` and `files`, and blanks secrets in `command`.
          overwrite: delete the record of an earlier run in that folder.

        Raises:
          RecordError: if the folder already holds something and `overwrite` is not given, or a field of
            `info` has a wrong type.
        """
        self.directory = Path(directory)
        info = msgspec.structs.replace(
            info,
            schema_version=SCHEMA_VERSION,
            command=redact_command(info.command),
            started=info.started or now_utc(),
            ended=None,
            status="running",
            error=None,
            files=UNSET,
        )
        self.info = _as_read(info, self.directory / INFO_FILE)
        check_writable(self.directory, overwrite)
        if overwrite and self.directory.exists():
            _delete(self.directory)
        self.directory.mkdir(parents=True)
        self._lock = take_lock(self.directory)
        self._save_info()
        self._open()

    @classmethod
    def resume(
        cls, directory: Path | str, sizes: Mapping[str, int], note: Resumption
    ) -> "RunWriter":
        """Continue a record from a checkpoint; rows that were written after it are deleted.

        Args:
          directory: folder of the run.
          sizes: size in bytes of each file at the checkpoint, as `sizes` returned them.
          note: what `run.json` keeps of the resumption; secrets in its `command` are blanked.

        Raises:
          RecordError: if a file is missing, is shorter than it was, or was changed since the run
            ended; the record has not been changed then.
        """
        self = cls.__new__(cls)
        self.directory = Path(directory)
        self._lock = take_lock(self.directory)
        try:
            info = self._check_cut(sizes)
            note = msgspec.structs.replace(note, command=redact_command(note.command))
            info.resumed = [*(info.resumed or []), note]
            info.status, info.error, info.ended, info.files = "running", None, None, UNSET
            self.info = _as_read(info, self.directory / INFO_FILE)
            # First the header, without checksums: a process that is killed in between can be resumed again.
            self._save_info()
            for name, size in sizes.items():
                os.truncate(self.directory / name, size)
            self._open()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def _check_cut(self, sizes: Mapping[str, int]) -> RunInfo:
        """Check that files can be cut to their sizes at a checkpoint; return `run.json`.

        `sizes` may come from a file that somebody else wrote. Only the files of a record are cut, and none
        through a link.
        """
        for name in sizes:
            if not re.match(CUT_FILE, name):
                raise RecordError(f"{self.directory}: {name!r} is not a file that resuming cuts")
        for path in self.directory.rglob("*"):
            if path.is_symlink():
                raise RecordError(f"{path} is a link: a record with links is not resumed")
        run = read_run(self.directory)
        if problems := run.check_files(sizes):
            raise RecordError(f"{self.directory}: {problems[0]}")
        for name, size in sizes.items():
            path = self.directory / name
            found = path.stat().st_size if path.is_file() else None
            if found is None or found < size:
                what = "is missing" if found is None else f"has {found} bytes"
                raise RecordError(f"{path} {what}; it had {size} at the checkpoint")
        return run.info

    def _open(self) -> None:
        (self.directory / ACTIONS_FILE).parent.mkdir(exist_ok=True)
        self._actions = open(self.directory / ACTIONS_FILE, "ab")  # noqa: SIM115
        self._rows = {
            kind: open(self.directory / name, "ab")  # noqa: SIM115
            for kind, name in FILE_OF_ROW.items()
        }
        self._handled: list[signal.Signals] = []  # signals whose handler is this record's

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file of rows and actions, after an fsync of each."""
        sizes = {}
        for file in (*self._rows.values(), self._actions):
            file.flush()
            os.fsync(file.fileno())
            path = Path(file.name)
            sizes[path.relative_to(self.directory).as_posix()] = path.stat().st_size
        return sizes

    def write(self, *rows: Row) -> None:
        """Append rows to their files and flush them; a row's type determines the file.

        NaN and infinities, which JSON cannot express, become null.

        Raises:
          ValueError: if a field has a wrong type or is out of range; no row is written then.
        """
        lines: dict[type[Row], bytes] = {}
        for kind in {type(row): None for row in rows}:
            if kind not in self._rows:
                raise ValueError(f"{self.directory}: {kind.__name__} is not a row of a run record")
            lines[kind] = ENCODER.encode_lines([row for row in rows if type(row) is kind])
            try:
                _LINES[kind].decode_lines(lines[kind])
            except msgspec.ValidationError as error:
                path = self.directory / FILE_OF_ROW[kind]
                raise ValueError(f"{path}: not written: {describe_error(error)}") from None
        for kind, data in lines.items():
            self._rows[kind].write(data)
            self._rows[kind].flush()

    def write_actions(self, frame: bytes) -> None:
        """Append one rollout's frame of actions (see cleanba/record/actions.py) and flush it."""
        self._actions.write(frame)
        self._actions.flush()

    def close(self, status: Status, error: BaseException | str | None = None) -> None:
        """Close the record as `completed`, `failed` or `interrupted`; a second call does nothing."""
        if self.info.status != "running":
            return
        if status not in ("completed", "failed", "interrupted"):
            raise RecordError(f"{self.directory}: a run cannot end as {status!r}")
        for file in (*self._rows.values(), self._actions):
            file.close()
        if isinstance(error, BaseException):
            error = f"{type(error).__name__}: {error}"
        self.info.ended = now_utc()
        self.info.status = status
        self.info.error = redact_text(error) if error else None
        self.info.files = digest_files(self.directory)
        self._save_info()
        os.close(self._lock)

    def __enter__(self) -> "RunWriter":
        """Return the writer itself; from here on, SIGTERM and SIGHUP end the record."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, _exit_on_signal)
                    self._handled.append(number)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Close the record with the status that the exception, if any, calls for."""
        try:
            if error is None:
                self.close("completed")
            elif isinstance(error, KeyboardInterrupt):
                self.close("interrupted", "interrupted by SIGINT")
            elif isinstance(error, SystemExit):
                self.close("interrupted", f"interrupted by {_signal_name(error.code)}")
            else:
                self.close("failed", error)
        finally:
            while self._handled:
                signal.signal(self._handled.pop(), signal.SIG_DFL)

    def _save_info(self) -> None:
        text = msgspec.json.format(ENCODER.encode(self.info), indent=2)
        replace_file(self.directory / INFO_FILE, text + b"\n")


def _as_read(info: RunInfo, path: Path) -> RunInfo:
    """Return `info` after encoding and decoding it, which detects wrong types."""
    try:
        return msgspec.json.decode(ENCODER.encode(info), type=RunInfo)
    except msgspec.ValidationError as error:
        raise RecordError(f"{path}: not written: {describe_error(error)}") from None


def _exit_on_signal(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _signal_name(exit_code: object) -> str:
    """Name the signal of an exit code of 128 and more, as shells and the trainers use them."""
    try:
        return signal.Signals(int(str(exit_code)) - 128).name
    except ValueError:
        return f"exit code {exit_code}"


def check_writable(directory: Path, overwrite: bool) -> None:
    """Refuse a folder that already holds something; delete one that is empty.

    A folder with nothing but a temporary `run.json` counts as empty.

    Raises:
      RecordError: if the folder holds a run record and `overwrite` is not given, if a process is writing
        that record, or if the folder holds something that is not a run record.
    """
    if not directory.exists():
        return
    if directory.is_dir() and {p.name for p in directory.iterdir()} <= {f"{INFO_FILE}.tmp"}:
        shutil.rmtree(directory)  # empty, or left by a run that was killed in its first moment
        return
    if not (directory / INFO_FILE).is_file():
        raise RecordError(f"{directory} exists and is not a run record: move it away first")
    if not overwrite:
        raise RecordError(
            f"{directory} already holds a run: --overwrite deletes it, --resume continues it"
        )
    check_idle(directory)


def _delete(directory: Path) -> None:
    """Delete a run, `run.json` last, so that a deletion that was cut short can be repeated."""
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != INFO_FILE:
            path.unlink()
    shutil.rmtree(directory)
