"""The run record: what every trainer writes and every analysis reads, and nothing else passes.

A record is a folder, described field by field in docs/run-record.md. This module is its only
writer and its only reader. It imports neither jax nor torch, so that any tool can use it.
"""

import contextlib
import fcntl
import getpass
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

SCHEMA_VERSION = 1
LINE_FILES = ("episodes", "updates", "rollouts")
ACTIONS_FILE = "actions/rollouts.bin"
CHECKPOINTS_FOLDER = "checkpoints"
TAIL_BYTES = 1 << 16  # read at once from the end of a file, for its last line
STATUSES = ("running", "completed", "failed", "interrupted")

_SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(\w+://)[^/\s@]+@")
_KNOWN_TOKEN = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|[0-9a-f]{40})\b")
BLANK = "***"


class RecordError(Exception):
    """A record that cannot be written or read; the message is one line that names the file."""


def run_name(system: str, setting: str, env_id: str, seed: int) -> str:
    """Name the folder of a run: `<system>__<setting>__<env_id>__s<seed>`."""
    return "__".join((system, setting, env_id.replace("/", "-"), f"s{seed}"))


def redact_text(text: str) -> str:
    """Blank tokens and logins in a text, and replace home folder, user and host by neutral words."""
    text = _URL_LOGIN.sub(rf"\1{BLANK}@", text)
    text = _KNOWN_TOKEN.sub(BLANK, text)
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = text.replace(home, "~")
    text = re.sub(r"/(home|Users)/[^/\s'\":]+", "~", text)
    host = socket.gethostname()
    if host and host != "localhost":
        text = re.sub(rf"\b{re.escape(host)}\b", "<host>", text)
    with contextlib.suppress(Exception):  # some containers have a user without a name
        user = getpass.getuser()
        if len(user) > 2 and user != "root":
            text = re.sub(rf"\b{re.escape(user)}\b", "<user>", text)
    return text


def redact_command(argv: Sequence[str]) -> list[str]:
    """Blank the values of flags and variables that are named like keys, tokens or passwords.

    Args:
      argv: a command line, one argument per entry.

    Returns:
      The same command line with `***` for each secret: `--api-key X`, `--api-key=X`, `TOKEN=X`,
      logins in URLs, and strings of the form of a well-known token.
    """
    redacted = []
    blank_next = False
    for arg in argv:
        name, separator, _ = arg.partition("=")
        if blank_next and not arg.startswith("--"):
            redacted.append(BLANK)
        elif separator and _SECRET_NAME.search(name):
            redacted.append(f"{name}={BLANK}")
        else:
            redacted.append(redact_text(arg))
        blank_next = arg.startswith("-") and not separator and bool(_SECRET_NAME.search(arg))
    return redacted


def source_revision(folder: Path) -> str:
    """Return the git commit of a checkout, with `+changes` if it has uncommitted ones, or ''.

    Changes in `reports/` do not count: its pages are made from records, and kept in the repository,
    so that otherwise every run after `make report` would seem to be of changed source.
    """
    import subprocess

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *args],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        ).stdout.strip()

    source = ("--", ":(top)", ":(top,exclude)reports")
    try:
        revision = git("rev-parse", "HEAD")
        return revision + ("+changes" if git("status", "--porcelain", "-uno", *source) else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def replace_file(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _check_finite_json(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None


def jsonable(value: Any) -> Any:
    """Return a value as the record has it: plain JSON types, null for NaN and infinities."""
    if isinstance(value, float):
        return _check_finite_json(value)
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, (str, int, bool)) or value is None:
        return value
    if hasattr(value, "item"):
        return jsonable(value.item())
    return str(value)


class RunWriter:
    """Writes one run record.

    The folder must not exist, or hold no run, unless `overwrite` says that it may be deleted.
    `write` appends lines and flushes them, so that a killed run leaves a readable record; `close`
    sets the final status. Used as a context manager, an exception closes the record as `failed`,
    and KeyboardInterrupt or SystemExit as `interrupted`.
    """

    def __init__(self, directory: Path | str, header: Mapping[str, Any], overwrite: bool = False):
        """Create the folder and its `run.json`.

        Args:
          directory: the folder of the run.
          header: system, setting, env_id, seed, hyperparameters, hardware, versions, revision and
            command, as docs/run-record.md describes them.
          overwrite: delete what an earlier run left in that folder.

        Raises:
          RecordError: if the folder already holds something and `overwrite` is not given.
        """
        self.directory = Path(directory)
        check_writable(self.directory, overwrite)
        if overwrite and self.directory.exists():
            _delete(self.directory)
        self.directory.mkdir(parents=True)
        self._lock = _lock(self.directory)
        missing = {"system", "setting", "env_id", "seed"} - set(header)
        if missing:
            raise RecordError(f"{self.directory}: a run record needs {sorted(missing)}")
        self.info: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            **{k: jsonable(v) for k, v in header.items()},
            "command": redact_command(header.get("command", [])),
            "started": _now(),
            "ended": None,
            "status": "running",
            "error": None,
        }
        self._save_info()
        self._open()

    @classmethod
    def resume(
        cls, directory: Path | str, sizes: Mapping[str, int], note: Mapping[str, Any]
    ) -> "RunWriter":
        """Go on with a record where a checkpoint was made; what was written after it is cut off.

        Args:
          directory: the folder of the run.
          sizes: size of each file at the checkpoint, as `sizes` returned them.
          note: what `run.json` is to keep of the resumption, under `resumed`.

        Raises:
          RecordError: if a file is missing or shorter than it was; nothing has been changed then.
        """
        self = cls.__new__(cls)
        self.directory = Path(directory)
        self._lock = _lock(self.directory)
        self.info = read_run(self.directory).info
        for name, size in sizes.items():
            path = self.directory / name
            found = path.stat().st_size if path.is_file() else None
            if found is None or found < size:
                what = "is missing" if found is None else f"has {found} bytes"
                raise RecordError(f"{path} {what}; it had {size} at the checkpoint")
        for name, size in sizes.items():
            os.truncate(self.directory / name, size)
        resumed = [*self.info.get("resumed", []), jsonable({"at": _now(), **note})]
        self.info |= {"status": "running", "error": None, "ended": None, "resumed": resumed}
        self._save_info()
        self._open()
        return self

    def _open(self) -> None:
        (self.directory / ACTIONS_FILE).parent.mkdir(exist_ok=True)
        self._actions = open(self.directory / ACTIONS_FILE, "ab")  # noqa: SIM115
        self._files = {kind: open(self.directory / f"{kind}.jsonl", "ab") for kind in LINE_FILES}  # noqa: SIM115

    def sizes(self) -> dict[str, int]:
        """Return the size of each file of lines and actions, all of it safely on disk."""
        sizes = {}
        for file in (*self._files.values(), self._actions):
            file.flush()
            os.fsync(file.fileno())
            path = Path(file.name)
            sizes[path.relative_to(self.directory).as_posix()] = path.stat().st_size
        return sizes

    def write_actions(self, frame: bytes) -> None:
        """Append one rollout's frame of actions (see cleanba/actions.py) and flush it."""
        self._actions.write(frame)
        self._actions.flush()

    def write(self, kind: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to `<kind>.jsonl` and flush them.

        Args:
          kind: `episodes`, `updates` or `rollouts`.
          rows: one mapping per line. NaN and infinities, which JSON cannot say, become null.
        """
        lines = [
            orjson.dumps(row, default=jsonable, option=orjson.OPT_SERIALIZE_NUMPY) for row in rows
        ]
        if lines:
            file = self._files[kind]
            file.write(b"\n".join(lines) + b"\n")
            file.flush()

    def close(self, status: str, error: BaseException | str | None = None) -> None:
        """Close the record as `completed`, `failed` or `interrupted`; a second call does nothing."""
        if self.info["status"] != "running":
            return
        if status not in STATUSES[1:]:
            raise RecordError(f"{self.directory}: no run ends as {status!r}")
        for file in (*self._files.values(), self._actions):
            file.close()
        if isinstance(error, BaseException):
            error = f"{type(error).__name__}: {error}"
        self.info["ended"] = _now()
        self.info["status"] = status
        self.info["error"] = redact_text(error) if error else None
        self.info["files"] = _files_of(self.directory)
        self._save_info()
        os.close(self._lock)

    def __enter__(self) -> "RunWriter":
        """Return the writer itself."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Close the record with the status that the exception, if any, calls for."""
        if error is None:
            self.close("completed")
        elif isinstance(error, KeyboardInterrupt):
            self.close("interrupted", "interrupted by SIGINT")
        elif isinstance(error, SystemExit):
            self.close("interrupted", f"interrupted by {_signal_name(error.code)}")
        else:
            self.close("failed", error)

    def _save_info(self) -> None:
        replace_file(self.directory / "run.json", json.dumps(self.info, indent=2) + "\n")


def _lock(directory: Path) -> int:
    """Take the lock of a record, which ends with the process or with the returned file's closing.

    Raises:
      RecordError: if another process has it.
    """
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise RecordError(f"{directory} is being written by another process") from None
    except OSError:
        pass  # a file system without locks
    return lock


def check_idle(directory: Path) -> None:
    """Refuse a record that a process is writing.

    Raises:
      RecordError: with one line.
    """
    os.close(_lock(directory))


def _delete(directory: Path) -> None:
    """Delete a run; killed in the middle of it, what is left is a run that can be deleted again."""
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "run.json":
            path.unlink()
    shutil.rmtree(directory)


def _files_of(directory: Path) -> list[str]:
    """Name the files of a record, but for run.json itself and checkpoints, which come and go."""
    names = (p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    own = ("run.json", f"{CHECKPOINTS_FOLDER}/")
    return sorted(name for name in names if not name.startswith(own))


def _signal_name(exit_code: object) -> str:
    """Name the signal behind an exit code of 128 and more, as shells and our trainers use them."""
    try:
        return signal.Signals(int(str(exit_code)) - 128).name
    except ValueError:
        return f"exit code {exit_code}"


def check_writable(directory: Path, overwrite: bool) -> None:
    """Refuse a folder that already holds something.

    Raises:
      RecordError: if the folder holds something and `overwrite` is not given, or if it holds
        something that is not a run record, which `overwrite` does not delete either.
    """
    if not directory.exists():
        return
    if directory.is_dir() and {path.name for path in directory.iterdir()} <= {"run.json.tmp"}:
        shutil.rmtree(directory)  # nothing, or what a run left that was killed as it began
        return
    if not (directory / "run.json").is_file():
        raise RecordError(f"{directory} exists and is not a run record: move it away first")
    if not overwrite:
        raise RecordError(
            f"{directory} already holds a run: --overwrite deletes it, --resume goes on"
        )
    check_idle(directory)


def _parse(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise RecordError(f"{where}: not JSON ({error})") from None


@dataclass
class Run:
    """One run record as read: its header, its lines by column, and what was wrong with it."""

    path: Path
    info: dict[str, Any]
    problems: list[str] = field(default_factory=list)

    @property
    def completed(self) -> bool:
        """Whether the run says of itself that it reached its end."""
        return self.info["status"] == "completed"

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Return the rows of `<kind>.jsonl`; a torn last line is reported in `problems`, and left out.

        Raises:
          RecordError: if any other line is damaged; the message names file and line.
        """
        if kind not in LINE_FILES:
            raise RecordError(f"{self.path}: no file of a run record is called {kind!r}")
        path = self.path / f"{kind}.jsonl"
        if not path.exists():
            self._report(f"{path.name} is missing")
            return []
        raw_lines = path.read_bytes().split(b"\n")
        torn = raw_lines.pop()  # what follows the last newline: empty unless the writer was killed
        if torn:
            self._report(f"{path.name}: torn last line left out")
        try:
            rows = [orjson.loads(raw) for raw in raw_lines]
        except ValueError:  # damage, or what only Python's reader knows (NaN): line by line
            rows = [_parse(raw, f"{path}, line {i}") for i, raw in enumerate(raw_lines, start=1)]
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise RecordError(f"{path}, line {number}: not a JSON object")
        return rows

    def last(self, kind: str) -> dict[str, Any] | None:
        """Return the last whole row of `<kind>.jsonl`, if it has one, without reading those before it.

        Raises:
          RecordError: if it is damaged; the message names the file.
        """
        path = self.path / f"{kind}.jsonl"
        if not path.exists():
            return None
        with path.open("rb") as file:
            start, tail = file.seek(0, os.SEEK_END), b""
            while start and tail.count(b"\n") < 2:
                end, start = start, max(0, start - TAIL_BYTES)
                file.seek(start)
                tail = file.read(end - start) + tail
        *whole, _ = tail.split(b"\n")  # what follows the last newline is torn
        if not whole:
            return None
        row = _parse(whole[-1], f"{path}, last line")
        if not isinstance(row, dict):
            raise RecordError(f"{path}, last line: not a JSON object")
        return row

    def _report(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def read_run(directory: Path | str) -> Run:
    """Read the header of a run record; its lines are read when asked for.

    Raises:
      RecordError: if there is no readable `run.json` of a schema version that this reader knows.
    """
    path = Path(directory)
    header = path / "run.json"
    try:
        info = json.loads(header.read_bytes())
    except FileNotFoundError:
        raise RecordError(f"{path}: no run record here (no run.json)") from None
    except (OSError, ValueError) as error:
        raise RecordError(f"{header}: not readable ({error})") from None
    if not isinstance(info, dict) or info.get("schema_version") != SCHEMA_VERSION:
        version = info.get("schema_version") if isinstance(info, dict) else None
        raise RecordError(
            f"{header}: schema version {version!r}; this reader knows {SCHEMA_VERSION}"
        )
    for name in ("system", "setting", "env_id", "seed", "status"):
        if name not in info:
            raise RecordError(f"{header}: the field {name!r} is missing")
    run = Run(path=path, info=info)
    if info["status"] != "completed":
        run.problems.append(f"status is {info['status']!r}, not 'completed'")
    return run


def find_runs(*paths: Path | str) -> list[Path]:
    """Return the folders of all run records at or below the given paths, sorted, each once."""
    found = set()
    for path in paths:
        # os.walk, unlike glob, goes on where a folder has gone since it was listed
        for folder, folders, files in os.walk(path):
            if "run.json" in files:
                found.add(Path(folder))
                folders.clear()  # a run holds no runs, and its checkpoints come and go
    return sorted(found)
