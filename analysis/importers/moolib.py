"""Reads the folders that moolib's example trainer writes."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from analysis.importers.records import steady_sps
from analysis.importers.text import number, read_rows, read_text
from analysis.tables import UNKNOWN, InputError, RunKey, Tables, tables
from cleanba.record.schema import LARGEST

RETURN, STEPS = "local/mean_episode_return", "local/steps_done"
LENGTH, EPISODES = "local/mean_episode_step", "local/episodes_done"
TRAINED, SPEED = "local/env_train_steps", "local/SPS"
UPDATES = {
    "version": "local/model_version",
    "grad_norm": "local/unclipped_grad_norm",
    "virtual_batch_size": "local/virtual_batch_size",
    "num_gradients": "local/num_gradients",
}
FOLDER = re.compile(r"(?P<game>.+?)-(?P<seed>\d+)-(?P<name>.+)")


def find(path: Path) -> list[Path]:
    """Return moolib's `logs.tsv` files at or below a path, sorted."""
    if path.is_file():
        return [path] if path.name == "logs.tsv" else []
    return sorted(path.glob("**/logs.tsv"))


def read(paths: Sequence[Path]) -> Tables:
    """Read all runs `<Game>-<seed>-<name>/peers/<peer>/logs.tsv` at or below the given paths.

    A row averages the episodes that ended within about ten seconds; `episodes` counts them. The
    logs have no time, but steps learned from and their rate, SPS: the duration of a row is its
    additional steps divided by its SPS, and the wall time is the sum of the durations.

    `quality` reports folders of that name without a log, and that of several peers' logs only the
    longest is read.

    Raises:
      InputError: if there is no log, or one is damaged; the message names file and line.
    """
    logs: dict[Path, list[Path]] = {}
    for path in paths:
        for file in find(path):
            run = file.parents[2] if file.parent.parent.name == "peers" else file.parent
            logs.setdefault(run, []).append(file)
    if not logs:
        raise InputError(f"{', '.join(map(str, paths))}: no logs.tsv of moolib here")
    curves, updates, runs, problems = [], [], [], _empty_runs(paths, logs)
    for run, files in sorted(logs.items()):
        file = max(files, key=lambda f: f.stat().st_size)
        key = _key(run)
        if len(files) > 1:
            problems.append((key.run, f"{len(files)} peers: only the longest log is read"))
        columns, torn = _read_log(file)
        problems += [(key.run, problem) for problem in torn]
        wall_time = _wall_time(columns)
        counts = np.diff(columns[EPISODES], prepend=0.0) if EPISODES in columns else None
        ended = np.isfinite(columns[RETURN])
        curve = {
            "step": columns[STEPS][ended],
            "wall_time": wall_time[ended],
            "return": columns[RETURN][ended],
        }
        if LENGTH in columns:
            curve["length"] = columns[LENGTH][ended]
        if counts is not None:
            curve["episodes"] = np.maximum(np.nan_to_num(counts[ended], nan=1.0), 1.0)
        if not ended.any():
            problems.append((key.run, "no episode was finished"))
        curves.append((key, curve))
        own = {"step": columns[STEPS], "wall_time": wall_time}
        updates.append((key, own | {n: columns[c] for n, c in UPDATES.items() if c in columns}))
        steps, seconds = columns[STEPS].max(initial=0), wall_time.max(initial=0)
        runs.append(
            (
                key,
                {
                    "status": ["unknown"],
                    "completed": [False],
                    "episodes": [curve.get("episodes", curve["step"] * 0 + 1).sum()],
                    "steps": [steps],
                    "seconds": [seconds],
                    "sps": [steady_sps(columns[STEPS], wall_time)],
                    "sps_overall": [steps / seconds if seconds > 0 else np.nan],
                },
            )
        )
    unsaid = f"moolib's logs do not record whether a run completed ({len(runs)} runs)"
    problems.append((", ".join(map(str, paths)), unsaid))
    return tables(curves, updates=updates, runs=runs, problems=problems)


def _key(run: Path) -> RunKey:
    match = FOLDER.fullmatch(run.name)
    if match is None or len(match["seed"]) > 15:
        return RunKey(str(run), "moolib", UNKNOWN, run.name, 0)
    return RunKey(str(run), "moolib", match["name"], f"{match['game']}-v5", int(match["seed"]))


def _empty_runs(paths: Sequence[Path], logs: dict[Path, list[Path]]) -> list[tuple[str, str]]:
    """Return a problem for each folder that is named like a run but holds no log."""
    problems = []
    places = {path for path in paths if path.is_dir()} | {run.parent for run in logs}
    for place in sorted(places):
        for folder in sorted(place.iterdir()):
            inside = any(run == folder or folder in run.parents for run in logs)
            match = FOLDER.fullmatch(folder.name)
            if folder.is_dir() and match and not inside:
                env_id = f"{match['game']}-v5"
                problems.append((str(folder), f"missing: no logs of {env_id} in its folder"))
    return problems


def _wall_time(columns: dict[str, np.ndarray]) -> np.ndarray:
    if TRAINED not in columns or SPEED not in columns:
        return np.full(len(columns[STEPS]), np.nan)
    added = np.diff(columns[TRAINED], prepend=0.0)
    speed = columns[SPEED]
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.where(speed > 0, added / speed, 0.0)
    return np.cumsum(np.nan_to_num(np.maximum(seconds, 0.0)))


def _read_log(file: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    lines = list(read_rows(file, "\t"))
    first, header = lines[0]
    for name in (RETURN, STEPS):
        if name not in header:
            raise InputError(f"{file}, line {first}: no column {name!r}")
    problems = []
    if len(lines) > 1 and not read_text(file).endswith("\n"):
        lines.pop()
        problems.append("logs.tsv: torn last line left out")
    rows, numbers = [], []
    for line, cells in lines[1:]:
        if cells == header:  # a resumed run writes it again
            continue
        if len(cells) != len(header):
            raise InputError(f"{file}, line {line}: {len(cells)} cells for {len(header)} columns")
        try:  # all cells at once, for speed; one by one only to locate an error
            rows.append([float(cell) if cell else np.nan for cell in cells])
            numbers.append(line)
        except ValueError:
            for cell, name in zip(cells, header, strict=True):
                number(cell, file, line, name)
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(header))
    large = np.argwhere(np.isinf(table))
    if len(large):
        row, column = large[0]
        raise InputError(f"{file}, line {numbers[row]}: {header[column]} is too large")
    columns = dict(zip(header, table.T, strict=True))
    if np.isnan(columns[STEPS]).any():
        row = int(np.flatnonzero(np.isnan(columns[STEPS]))[0])
        raise InputError(f"{file}, line {numbers[row]}: {STEPS} is missing")
    if (np.abs(columns[STEPS]) > LARGEST).any():
        row = int(np.flatnonzero(np.abs(columns[STEPS]) > LARGEST)[0])
        raise InputError(f"{file}, line {numbers[row]}: {STEPS} is implausibly large")
    return columns, problems
