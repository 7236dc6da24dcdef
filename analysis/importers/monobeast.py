"""Reads the folders that monobeast (torchbeast) writes, and the output of monobeast_study."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from analysis.importers.records import steady_sps
from analysis.importers.text import number, read_rows, read_text
from analysis.tables import UNKNOWN, InputError, RunKey, Tables, tables
from cleanba.record.schema import LARGEST

NEEDED = ("_time", "step", "mean_episode_return")

# What monobeast_study prints when a rollout is complete (Cleanba paper, appendix G).
ROLLOUT = re.compile(
    r"actor_index (\d+) initial policy_version (\d+) policy_version after rollout (\d+)"
)
COMMAND = re.compile(r"\$\s*python\s*-m\s+torchbeast\.monobeast_study(.*)")
FLAG = re.compile(r"[-–\\]+(num_actors|learner_delay_seconds|env|batch_size|unroll_length)\s+(\S+)")


def find(path: Path) -> list[Path]:
    """Return monobeast's `logs.csv` files at or below a path, sorted."""
    if path.is_file():
        return [path] if path.name == "logs.csv" else []
    return sorted(path.glob("**/logs.csv"))


def is_study_output(path: Path) -> bool:
    """Whether a file is text in which monobeast_study printed rollouts."""
    if not path.is_file() or path.stat().st_size > 100_000_000:
        return False
    with open(path, "rb") as file:
        return b"actor_index" in file.read(1_000_000)


def read(paths: Sequence[Path]) -> Tables:
    """Read all `logs.csv` at or below the given paths.

    `step` counts agent steps. A logged return is the mean over the episodes that ended in a batch,
    NaN where none did. `meta.json` beside it, which monobeast writes when a run ends, has
    the environment, the number of actors and whether the run succeeded.

    Raises:
      InputError: if there is no log, or one is damaged; the message names file and line.
    """
    files = [file for path in paths for file in find(path)]
    if not files:
        raise InputError(f"{', '.join(map(str, paths))}: no logs.csv of monobeast here")
    curves, updates, runs, problems = [], [], [], []
    for file in dict.fromkeys(files):
        columns, torn = _read_log(file)
        key, successful, config = _read_meta(file.parent)
        problems += [(key.run, problem) for problem in torn]
        if config is None:
            problems.append((key.run, "no meta.json: environment and actors unknown"))
        if not successful:
            problems.append((key.run, "it is unknown whether this run completed"))
        ended = np.isfinite(columns["mean_episode_return"])
        empty = len(ended) - int(ended.sum())
        if empty:
            problems.append((key.run, f"no episode ended in {empty} of {len(ended)} batches"))
        curve = {
            "step": columns["step"][ended],
            "wall_time": columns["wall_time"][ended],
            "return": columns["mean_episode_return"][ended],
        }
        curves.append((key, curve))
        updates.append((key, _updates(columns)))
        steps = columns["step"].max(initial=0)
        seconds = columns["wall_time"].max(initial=0)
        runs.append(
            (
                key,
                {
                    "status": ["completed" if successful else "unknown"],
                    "completed": [successful],
                    "episodes": [int(ended.sum())],
                    "steps": [steps],
                    "seconds": [seconds],
                    "sps": [steady_sps(columns["step"], columns["wall_time"])],
                    "sps_overall": [steps / seconds if seconds > 0 else np.nan],
                    "hyperparameters": [config],
                },
            )
        )
    return tables(curves, updates=updates, runs=runs, problems=problems)


def _updates(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = {
        "total_loss": "loss",
        "pg_loss": "policy_loss",
        "baseline_loss": "value_loss",
        "entropy_loss": "entropy_loss",
    }
    updates = {"step": columns["step"], "wall_time": columns["wall_time"]}
    return updates | {new: columns[old] for old, new in names.items() if old in columns}


def _read_log(file: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the columns of a log, with `wall_time` in seconds since its start, and problems."""
    header: list[str] | None = None
    rows: list[list[float]] = []
    problems: list[str] = []
    whole = read_text(file).endswith("\n")
    lines = list(read_rows(file))
    for line, cells in lines:
        if cells[0].startswith("#"):  # a header; a resumed run writes another
            names = [cells[0].lstrip("# ").strip(), *cells[1:]]
            if header is not None and names[: len(header)] != header:
                raise InputError(
                    f"{file}, line {line}: the columns differ from the previous header"
                )
            header = names if header is None else header
            for name in NEEDED:
                if name not in header:
                    raise InputError(f"{file}, line {line}: no column {name!r}")
            continue
        if header is None:
            raise InputError(f"{file}, line {line}: no header ('# _tick,_time,...') before it")
        if line == lines[-1][0] and not whole:
            problems.append("logs.csv: torn last line left out")
            continue
        if len(cells) < len(header):
            raise InputError(f"{file}, line {line}: {len(cells)} cells for {len(header)} columns")
        limit = [LARGEST if n in ("_time", "step") else np.inf for n in header]
        rows.append(
            [
                number(c, file, line, n, m)
                for c, n, m in zip(cells[: len(header)], header, limit, strict=True)
            ]
        )
    if header is None:
        raise InputError(f"{file}, line 1: no header ('# _tick,_time,...')")
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(header))
    columns = dict(zip(header, table.T, strict=True))
    start = columns["_time"][0] if len(rows) else 0.0
    columns["wall_time"] = columns["_time"] - start
    return columns, problems


def _read_meta(folder: Path) -> tuple[RunKey, bool, dict | None]:
    file = folder / "meta.json"
    if not file.is_file():
        return RunKey(str(folder), "monobeast", UNKNOWN, UNKNOWN, 0), False, None
    try:
        meta = json.loads(read_text(file))
        args = dict(meta.get("args") or {})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{file}: not monobeast's meta.json ({error})") from None
    seed = args.get("seed", 0)
    key = RunKey(
        str(folder),
        "monobeast",
        f"{args['num_actors']} actors" if "num_actors" in args else UNKNOWN,
        str(args.get("env", UNKNOWN)),
        seed if isinstance(seed, int) and abs(seed) < LARGEST else 0,
    )
    return key, meta.get("successful") is True, args


def read_study_output(paths: Sequence[Path]) -> Tables:
    """Read the rollouts that monobeast_study printed, as in appendix G of the Cleanba paper.

    Each command line in the text starts a run; its flags name the setting. Other lines are ignored.
    Such a log has no steps, no times, and no version at use.

    Raises:
      InputError: if a file has no such line.
    """
    rollouts, runs, problems = [], [], []
    for path in paths:
        sections: list[tuple[str, list[tuple[int, int, int]]]] = []
        for line in read_text(path).splitlines():
            if command := COMMAND.search(line):
                sections.append((command.group(1), []))
            for found in ROLLOUT.finditer(line):
                if not sections:
                    sections.append(("", []))
                sections[-1][1].append(tuple(int(v) for v in found.groups()))
        sections = [section for section in sections if section[1]]
        if not sections:
            raise InputError(f"{path}: no line of monobeast_study ('actor_index ...') here")
        for index, (command, lines) in enumerate(sections, start=1):
            flags = dict(FLAG.findall(re.sub(r"[–\\]+", " --", command)))
            setting = f"{flags.get('num_actors', '?')} actors"
            if "learner_delay_seconds" in flags:
                setting += f", {flags['learner_delay_seconds']} s delay"
            env_id = flags.get("env", UNKNOWN)
            key = RunKey(f"{path}#{index}", "monobeast_study", setting, env_id, 0)
            if max(max(row) for row in lines) > LARGEST:
                raise InputError(f"{path}: a policy version is implausibly large")
            actor, first, last = np.array(lines, dtype=np.float64).T
            steps = float(flags["unroll_length"]) if _is_number(flags.get("unroll_length")) else 1.0
            rollouts.append(
                (
                    key,
                    {
                        "actor": actor,
                        "rollout": np.arange(1.0, len(actor) + 1),
                        "steps": np.full(len(actor), steps),
                        "version_first": first,
                        "version_last": last,
                        "changes": last - first,
                    },
                )
            )
            excerpt = {"status": ["excerpt"], "completed": [False], "hyperparameters": [flags]}
            runs.append((key, excerpt))
            problems.append((key.run, f"an excerpt: {len(actor)} rollouts, not a whole run"))
    return tables(rollouts=rollouts, runs=runs, problems=problems)


def _is_number(text: str | None) -> bool:
    return text is not None and re.fullmatch(r"\d{1,9}", text) is not None
