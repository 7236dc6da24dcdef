"""Reads Weights & Biases runs through openrlbenchmark: its offline database, or after a download.

openrlbenchmark stores downloads under `dataset/<entity>/<project>/`: `offline.sqlite`, the index of
runs, and per run a folder `<id>/` with `run.json` and `run_df.csv`. These are read directly; only
downloads need openrlbenchmark itself.
"""

import contextlib
import io
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.importers import cleanrl
from analysis.importers.text import read_text
from analysis.tables import InputError, Tables, tables

TIME, STEP = "_runtime", "global_step"


def find(path: Path) -> list[Path]:
    """Return the runs (folders with `run_df.csv`) of a database, an index or a run; sorted."""
    if path.name == "offline.sqlite" and path.is_file():
        path = path.parent
    if path.is_file():
        return [path.parent] if path.name == "run_df.csv" else []
    return sorted(file.parent for file in path.glob("**/run_df.csv"))


def download(entity: str, project: str, folder: Path) -> None:
    """Fetch all runs of a W&B project into openrlbenchmark's offline form, with its own code."""
    try:
        import wandb
        from openrlbenchmark.cache import CachedRun
    except ImportError as error:
        raise InputError(
            f"{entity}/{project}: downloading needs openrlbenchmark ({error.name} is missing)"
        ) from None
    for run in wandb.Api().runs(f"{entity}/{project}"):
        if run.state != "running":
            CachedRun(run, cache_dir=str(folder))


def read(paths: Sequence[Path]) -> Tables:
    """Read all runs at or below the given paths.

    Raises:
      InputError: if there is none, or one is damaged.
    """
    indexed: dict[str, dict[str, Any]] = {}
    folders: dict[Path, None] = {}
    for path in paths:
        index = path if path.name == "offline.sqlite" else path / "offline.sqlite"
        for file in [index] if index.is_file() else sorted(path.glob("**/offline.sqlite")):
            indexed |= _read_index(file)
        folders |= dict.fromkeys(find(path))
    if not folders and not indexed:
        raise InputError(f"{', '.join(map(str, paths))}: no openrlbenchmark data here")
    curves, runs, problems = [], [], []
    for run_id in sorted(indexed.keys() - {folder.name for folder in folders}):
        problems.append((run_id, "in the index, but its history was not downloaded"))
    for folder in folders:
        info = _read_info(folder, indexed)
        key = cleanrl.run_key(str(folder), str(info.get("name") or ""), info["config"])
        frame = _read_history(folder / "run_df.csv")
        tag = next((t for t in cleanrl.RETURNS if t in frame), None)
        if tag is None:
            raise InputError(f"{folder / 'run_df.csv'}, line 1: no column {cleanrl.RETURNS[0]}")
        rows = frame[frame[tag].notna() & frame[STEP].notna()].sort_values(STEP, kind="stable")
        length = cleanrl.LENGTHS[cleanrl.RETURNS.index(tag)]
        curve = {
            "step": rows[STEP].to_numpy(),
            "wall_time": rows[TIME].to_numpy() if TIME in rows else np.full(len(rows), np.nan),
            "return": rows[tag].to_numpy(),
        }
        if length in rows:
            curve["length"] = rows[length].to_numpy()
        curves.append((key, curve))
        completed = info.get("state") == "finished"
        if not completed:
            problems.append((key.run, f"not completed: its state in W&B is {info.get('state')!r}"))
        if not len(rows):
            problems.append((key.run, "no episodic return was logged"))
        steps, seconds = frame[STEP].max(), frame[TIME].max() if TIME in frame else np.nan
        runs.append(
            (
                key,
                {
                    "status": ["completed" if completed else str(info.get("state"))],
                    "completed": [completed],
                    "episodes": [len(rows)],
                    "steps": [steps],
                    "seconds": [seconds],
                    "sps_overall": [steps / seconds if seconds > 0 else np.nan],
                    "hyperparameters": [info["config"]],
                },
            )
        )
    return tables(curves, runs=runs, problems=problems)


def _read_info(folder: Path, indexed: dict[str, dict[str, Any]]) -> dict[str, Any]:
    file = folder / "run.json"
    if file.is_file():
        try:
            info = json.loads(read_text(file))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{file}: not JSON ({error})") from None
    else:
        info = indexed.get(folder.name)
        if info is None:
            raise InputError(f"{folder}: neither run.json nor an entry in offline.sqlite")
    config = info.get("config") if isinstance(info, dict) else None
    if not isinstance(config, dict):
        raise InputError(f"{file}: no 'config' of hyperparameters")
    return info


def _read_index(file: Path) -> dict[str, dict[str, Any]]:
    try:
        address = f"{file.resolve().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True)) as database:
            rows = database.execute("select id, name, state, config from offlinerun").fetchall()
        return {
            str(run): {"name": name, "state": state, "config": json.loads(config)}
            for run, name, state, config in rows
        }
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise InputError(f"{file}: not an openrlbenchmark database ({error})") from None


def _read_history(file: Path) -> pd.DataFrame:
    text = read_text(file)
    try:
        frame = pd.read_csv(
            io.StringIO(text), index_col=0, low_memory=False, float_precision="round_trip"
        )
    except (ValueError, pd.errors.ParserError) as error:
        raise InputError(f"{file}: not a table ({str(error).splitlines()[0]})") from None
    if STEP not in frame:
        raise InputError(f"{file}, line 1: no column {STEP!r}")
    for name in (STEP, TIME, *cleanrl.RETURNS, *cleanrl.LENGTHS):
        if name not in frame:
            continue
        values = pd.to_numeric(frame[name], errors="coerce")
        bad = np.flatnonzero(values.isna() & frame[name].notna())
        if len(bad):
            raise InputError(f"{file}, line {bad[0] + 2}: {name} is not a number")
        large = np.flatnonzero(values.abs() > (2**53 if name in (STEP, TIME) else 1e300))
        if len(large):
            raise InputError(f"{file}, line {large[0] + 2}: {name} is implausibly large")
        frame[name] = values
    return frame
