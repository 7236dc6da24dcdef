"""Readers of run records and of other tools' logs; each returns `analysis.tables.Tables`."""

from collections.abc import Sequence
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
from analysis.tables import InputError, Tables, concat
from cleanba.record import find_runs

SOURCES = (
    "auto",
    "records",
    "tensorboard",
    "monobeast",
    "moolib",
    "scores",
    "rliable",
    "openrlbenchmark",
)


def read(paths: Sequence[Path | str], source: str = "auto") -> Tables:
    """Read everything at or below the given paths.

    Args:
      paths: files and folders.
      source: one of `SOURCES`; `auto` reads all kinds of logs that it finds. It
        reads score dictionaries and the output of monobeast_study only if the path is the file
        itself.

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


def _read_any(path: Path) -> list[Tables]:
    if path.is_file():
        return [_READERS[_source_of_file(path)]([path])]
    parts = []
    # openrlbenchmark also has a run.json, beside its run_df.csv
    record_folders = [f for f in find_runs(path) if not (f / "run_df.csv").exists()]
    if record_folders:
        parts.append(records.read_records(record_folders))
    if moolib.find(path):
        parts.append(moolib.read([path]))
    if monobeast.find(path):
        parts.append(monobeast.read([path]))
    if openrlbenchmark.find(path):
        parts.append(openrlbenchmark.read([path]))
    # The event files in a record repeat its data, so they are not read.
    events = [f for f in tensorboard.find(path) if not set(f.parents) & set(record_folders)]
    if events:
        parts.append(tensorboard.read(sorted({file.parent for file in events})))
    if found := score_tables.find(path):
        parts.append(score_tables.read(found))
    if not parts:
        raise InputError(f"{path}: no log that an importer can read")
    return parts


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
