"""Readers of run records and of other tools' logs; each returns `analysis.tables.Tables`."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.importers import (
    monobeast,
    moolib,
    openrlbenchmark,
    records,
    rliable,
    score_tables,
    tensorboard,
)
from analysis.tables import InputError, Tables, concat, tables
from cleanba.record import find_runs

MOST_NAMED = 5  # files in a problem


def read(paths: Sequence[Path | str], source: str = "auto") -> Tables:
    """Read everything at or below the given paths.

    Args:
      paths: files and folders.
      source: one of `SOURCES`; `auto` reads all kinds of logs that it finds, but the output of
        monobeast_study only if the path is the file itself.

    Raises:
      InputError: if a path does not exist, holds no such log, or is damaged.
    """
    paths = [Path(path) for path in paths]
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: no such file or folder")
    if source == "auto":
        return concat([part for path in paths for part in _read_any(path)])
    return _READERS[source](paths)


def _read_monobeast(paths: Sequence[Path]) -> Tables:
    printed = [
        path for path in paths if path.name != "logs.csv" and monobeast.is_study_output(path)
    ]
    logs = [path for path in paths if path not in printed]
    parts = [monobeast.read_study_output(printed)] if printed else []
    return concat(parts + ([monobeast.read(logs)] if logs else []))


_READERS = {
    "records": records.read_records,
    "tensorboard": tensorboard.read,
    "monobeast": _read_monobeast,
    "moolib": moolib.read,
    "scores": score_tables.read,
    "rliable": rliable.read,
    "openrlbenchmark": openrlbenchmark.read,
}
SOURCES = ("auto", *_READERS)


def read_readable(paths: Sequence[Path | str], source: str = "auto") -> Tables:
    """Read everything at or below the given paths that can be read, and name the rest in `quality`.

    Raises:
      InputError: if a path does not exist, or holds no log.
    """
    parts = []
    for path in map(Path, paths):
        if source == "auto" and path.is_dir():
            parts += _read_any(path, _read_those_readable)
            continue
        try:
            parts.append(read([path], source))
        except InputError as error:
            if not path.is_file():
                raise
            parts.append(tables(problems=[(str(path), str(error))]))
    return concat(parts)


Reader = Callable[[Sequence[Path]], Tables]


def _read_all(reader: Reader, paths: Sequence[Path]) -> list[Tables]:
    return [reader(paths)]


def _read_those_readable(reader: Reader, paths: Sequence[Path]) -> list[Tables]:
    """Read logs one by one if they cannot be read together; a damaged one becomes a problem."""
    try:
        return [reader(paths)]
    except InputError:
        pass
    parts = []
    for path in paths:
        try:
            parts.append(reader([path]))
        except InputError as error:
            parts.append(tables(problems=[(str(path), f"damaged and excluded: {error}")]))
    return parts


def _read_any(
    path: Path, call: Callable[[Reader, Sequence[Path]], list[Tables]] = _read_all
) -> list[Tables]:
    if path.is_file():
        return [_READERS[_source_of_file(path)]([path])]
    # openrlbenchmark also has a run.json, beside its run_df.csv
    record_folders = [f for f in find_runs(path) if not (f / "run_df.csv").exists()]
    # The event files in a record repeat its data, so they are not read.
    events = [f for f in tensorboard.find(path) if not set(f.parents) & set(record_folders)]
    scores = score_tables.find(path)
    arrays, refused = rliable.find(path, record_folders)
    offline = openrlbenchmark.find(path)
    logs: list[tuple[Reader, Sequence[Path]]] = [
        (records.read_records, record_folders),
        (moolib.read, [path] if call is _read_all and moolib.find(path) else moolib.find(path)),
        (monobeast.read, monobeast.find(path)),
        (openrlbenchmark.read, [path] if offline else []),
        (tensorboard.read, sorted({file.parent for file in events})),
        (score_tables.read, scores),
        (rliable.read, arrays),
    ]
    parts = [part for reader, found in logs if found for part in call(reader, found)]
    if not parts:
        raise InputError(f"{path}: no log that an importer can read")
    return [*parts, tables(problems=_not_read(path, scores, refused, record_folders))]


def _not_read(
    path: Path, scores: Sequence[Path], refused: Sequence[Path], records_at: Sequence[Path]
) -> list[tuple[str, str]]:
    """Return the problems of tables that no importer recognizes, and of links that are not followed."""
    unknown, links = list(refused), []
    for folder, folders, files in os.walk(path):
        here = Path(folder)
        links += [here / name for name in folders if (here / name).is_symlink()]
        if here in records_at:
            continue
        tables_here = [here / name for name in files if name.endswith(".csv")]
        unknown += [f for f in tables_here if f not in scores and f.name not in score_tables.OTHERS]
    problems = []
    for kind, names in (
        ("tables of a form that is not read", unknown),
        ("links to folders, not followed", links),
    ):
        if names:
            shown = ", ".join(sorted(name.name for name in names)[:MOST_NAMED])
            problems.append((str(path), f"{len(names)} {kind}: {shown}"))
    return problems


def _source_of_file(path: Path) -> str:
    names = {
        "run.json": "records",
        "logs.tsv": "moolib",
        "logs.csv": "monobeast",
        "run_df.csv": "openrlbenchmark",
        "offline.sqlite": "openrlbenchmark",
    }
    if path.name in names:
        return names[path.name]
    if path.name.startswith("events.out.tfevents"):
        return "tensorboard"
    if path.suffix in rliable.SUFFIXES:
        return "rliable"
    if path.suffix == ".csv":
        return "scores"
    if monobeast.is_study_output(path):
        return "monobeast"
    raise InputError(f"{path}: no importer can read this file")
