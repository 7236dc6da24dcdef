"""Reads the TensorBoard event files of Cleanba and CleanRL."""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from analysis.importers import cleanrl
from analysis.importers.records import steady_sps
from analysis.tables import InputError, Tables, tables
from cleanba.record.files import LARGEST_TABLE, read_file

PATTERN = "events.out.tfevents*"


def find(path: Path) -> list[Path]:
    """Return the event files at or below a path, sorted."""
    if path.is_file():
        return [path] if path.name.startswith("events.out.tfevents") else []
    return sorted(path.glob(f"**/{PATTERN}"))


def read(paths: Sequence[Path]) -> Tables:
    """Read all event files at or below the given paths; the files of one folder are one run.

    Event files do not record whether a run completed. If the hyperparameters give its number of
    steps, that decides; otherwise `quality` reports that it is unknown.

    Raises:
      InputError: if there is no event file, or one is damaged; the message names file and record.
    """
    folders = sorted({file.parent for path in paths for file in find(path)})
    if not folders:
        raise InputError(f"{', '.join(map(str, paths))}: no event file here ({PATTERN})")
    curves, updates, runs, problems = [], [], [], []
    for folder in folders:
        scalars, texts, start, torn = _read_folder(folder)
        problems += [(str(folder), problem) for problem in torn]
        config = _hyperparameters(texts)
        key = cleanrl.run_key(str(folder), folder.name, config)
        tag = next((t for t in cleanrl.RETURNS if t in scalars), None)
        if tag is None:
            problems.append((key.run, "no episodic return was logged"))
            continue
        step, time, value = scalars[tag].T
        curve = {"step": step, "wall_time": time - start, "return": value}
        length = scalars.get(cleanrl.LENGTHS[cleanrl.RETURNS.index(tag)])
        if length is not None and len(length) == len(step):
            curve["length"] = length[:, 2]
        if np.isnan(value).any():
            problems.append((key.run, f"{int(np.isnan(value).sum())} returns are NaN"))
        curves.append((key, curve))
        updates.append((key, _updates(scalars, start)))
        last = max(t[-1, 0] for t in scalars.values())
        seconds = max(t[-1, 1] for t in scalars.values()) - start
        wanted = cleanrl.expected_steps(config)
        completed = bool(last >= wanted)
        if wanted != wanted:
            problems.append((key.run, "it is unknown whether this run completed"))
        elif not completed:
            total = config["total_timesteps"]
            problems.append((key.run, f"not completed: ends at step {last:.0f} of {total}"))
        speed = updates[-1][1]
        status = "completed" if completed else "unknown" if wanted != wanted else "interrupted"
        runs.append(
            (
                key,
                {
                    "status": [status],
                    "completed": [completed],
                    "episodes": [len(step)],
                    "steps": [last],
                    "seconds": [seconds],
                    "sps": [steady_sps(speed["step"], speed["wall_time"])],
                    "sps_overall": [last / seconds if seconds > 0 else np.nan],
                    "hyperparameters": [config],
                },
            )
        )
    return tables(curves, updates=updates, runs=runs, problems=problems)


def _updates(scalars: dict[str, np.ndarray], start: float) -> dict[str, np.ndarray]:
    """Put what the learner logged in one table, one row per step at which it logged."""
    own = {t: v for t, v in scalars.items() if t.startswith(("losses/", "stats/"))}
    own |= {t: v for t, v in scalars.items() if t == "charts/learning_rate"}
    learner = [t for t in own if t.startswith("losses/") or t == "charts/learning_rate"]
    steps = np.unique(np.concatenate([own[t][:, 0] for t in learner])) if learner else np.empty(0)
    columns = {"step": steps, "wall_time": np.full(len(steps), np.nan)}
    for tag, values in own.items():
        name = tag.split("/", 1)[1]
        columns[name] = np.full(len(steps), np.nan)
        at = np.searchsorted(steps, values[:, 0])
        hit = (at < len(steps)) & (steps[np.minimum(at, len(steps) - 1)] == values[:, 0]) \
            if len(steps) else np.zeros(len(values), dtype=bool)  # fmt: skip
        columns[name][at[hit]] = values[hit, 2]
        if tag in learner:
            columns["wall_time"][at[hit]] = values[hit, 1] - start
    return columns


def _hyperparameters(texts: dict[str, str]) -> dict[str, str]:
    """Read the Markdown table that CleanRL logs as text."""
    config = {}
    for text in texts.values():
        for line in text.splitlines()[2:]:
            cells = line.strip().strip("|").split("|")
            if len(cells) == 2:
                config[cells[0]] = cells[1]
    return config


def _read_folder(
    folder: Path,
) -> tuple[dict[str, np.ndarray], dict[str, str], float, list[str]]:
    """Return tag -> rows of (step, time, value), tag -> text, start time, and problems."""
    from tensorboard.compat.proto import event_pb2
    from tensorboard.util import tensor_util

    rows: dict[str, list[tuple[float, float, float]]] = {}
    texts: dict[str, str] = {}
    problems: list[str] = []
    # Time of the first record, which holds no value and is written when the file is created.
    start = np.inf
    for file in find(folder):
        if file.parent != folder:
            continue
        for number, data in _records(file, problems):
            try:
                event = event_pb2.Event.FromString(data)
                start = min(start, event.wall_time)
                for value in event.summary.value:
                    kind = value.WhichOneof("value")
                    if kind == "simple_value":
                        scalar = value.simple_value
                    elif kind == "tensor":
                        array = tensor_util.make_ndarray(value.tensor)
                        if array.dtype == object or array.dtype.kind in "SU":
                            text = array.ravel()[0] if array.size else b""
                            texts[value.tag] = bytes(text).decode("utf-8")
                            continue
                        if array.size != 1:
                            continue
                        scalar = float(array.ravel()[0])
                    else:
                        continue
                    rows.setdefault(value.tag, []).append((event.step, event.wall_time, scalar))
            except Exception as error:  # protobuf raises several kinds
                raise InputError(
                    f"{file}, record {number}: not an event ({type(error).__name__})"
                ) from None
    scalars = {tag: np.array(values, dtype=np.float64) for tag, values in rows.items()}
    for tag, values in scalars.items():
        if np.isinf(values).any() or (np.abs(values[:, :2]) > 2**53).any():
            raise InputError(f"{folder}: {tag}: a value is implausibly large")
    return scalars, texts, start, problems


def _records(file: Path, problems: list[str]) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each record (length, checksum, data, checksum) of a file."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    try:
        data = read_file(file, LARGEST_TABLE)
    except OSError as error:
        raise InputError(f"{file}: not readable ({error.strerror})") from None
    if not data:
        raise InputError(f"{file}: empty")
    position, number = 0, 0
    while position < len(data):
        number += 1
        if position + 12 > len(data):
            problems.append(f"{file.name}: torn last record left out")
            return
        length, checksum = struct.unpack_from("<QI", data, position)
        if masked_crc32c(data[position : position + 8]) != checksum:
            raise InputError(f"{file}, record {number}: not a TensorBoard record (checksum)")
        end = position + 12 + length
        if end + 4 > len(data):
            problems.append(f"{file.name}: torn last record left out")
            return
        record = data[position + 12 : end]
        (checksum,) = struct.unpack_from("<I", data, end)
        if masked_crc32c(record) != checksum:
            raise InputError(f"{file}, record {number}: damaged data (checksum)")
        yield number, record
        position = end + 4
