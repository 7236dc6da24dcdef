"""Draws a study with openrlbenchmark, from the same records: `python -m reports.rlops runs/quickstart`.

Fills openrlbenchmark's offline database (in the folder of the installed package, where it looks for it) and
prints the `openrlbenchmark.rlops` command that draws the study's curves. This compares two tools that
share no code, on the same runs.
"""

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

import tyro

from analysis import importers
from analysis.output import bad_input
from analysis.tables import InputError, Tables, split_runs
from cleanba.run.command_line import BadInput, parse
from reports.command import run_command

ENTITY = "cleanba"
METRIC = "charts/episodic_return"
NAMES = {
    "cen": "exp_name",
    "ceik": "env_id",
    "metric": METRIC,
}  # of the columns in its filters


class User(NamedTuple):
    """The user of a run, without a name."""

    username: str = ""
    name: str = ""


class RecordedRun(NamedTuple):
    """A run record in the form of a run of Weights & Biases, which openrlbenchmark reads.

    Attributes:
      id: of the run, in its project.
      project: name of the study.
      config: fields that runs are selected by.
      history: one row per episode.
    """

    id: str
    project: str
    config: Mapping[str, Any]
    history: Sequence[Mapping[str, float]]
    entity: str = ENTITY
    state: str = "finished"
    url: str = ""
    user: User = User()
    tags: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return self.id

    @property
    def path(self) -> list[str]:
        """Return entity, project and id."""
        return [self.entity, self.project, self.id]

    def scan_history(self) -> Iterator[Mapping[str, float]]:
        """Yield all rows."""
        yield from self.history


def experiment(system: str, setting: str) -> str:
    """Return the name of the curve of one system under one setting."""
    return f"{system}__{setting}"


def recorded_runs(tables: Tables, project: str) -> list[RecordedRun]:
    """Return the completed runs, in the order of their folders.

    Args:
      tables: of run records.
      project: name for the study.
    """
    completed = set(tables.runs.loc[tables.runs["completed"].astype(bool), "run"].astype(str))
    found = []
    for key, episodes in split_runs(tables.curves):
        if str(key.run) not in completed:
            continue
        columns = {"global_step": "step", "_runtime": "wall_time", METRIC: "return"}
        history = episodes[list(columns.values())].set_axis(list(columns), axis=1)
        config = {
            "exp_name": experiment(key.system, key.setting),
            "env_id": key.env_id,
            "seed": int(key.seed),
        }
        rows = history.to_dict("records")
        found.append(RecordedRun(Path(str(key.run)).name, project, config, rows))
    return sorted(found, key=lambda run: run.id)


def fill(runs: Sequence[RecordedRun], dataset: Path) -> None:
    """Write runs into the offline database; replaces its runs of the same project.

    Args:
      runs: of one project.
      dataset: folder of openrlbenchmark's data.
    """
    import peewee
    from openrlbenchmark.cache import CachedRun
    from openrlbenchmark.offline_db import OfflineRun, OfflineRunTag, Tag, database_proxy

    folder = dataset / ENTITY / runs[0].project
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    database = peewee.SqliteDatabase(folder / "offline.sqlite")
    database_proxy.initialize(database)
    with contextlib.closing(database):
        database.connect()
        database.create_tables([OfflineRun, Tag, OfflineRunTag])
        for run in runs:
            CachedRun(run, cache_dir=str(dataset))
            OfflineRun.create(
                id=run.id,
                name=run.name,
                state=run.state,
                url=run.url,
                path=run.path,
                username=run.user.username,
                project=run.project,
                entity=run.entity,
                config=run.config,
            )


def drawable(runs: Sequence[RecordedRun]) -> tuple[list[str], list[str]]:
    """Return the environments that openrlbenchmark can draw, with runs of every curve, and the others."""
    curves = {run.config["exp_name"] for run in runs}
    there = {(run.config["env_id"], run.config["exp_name"]) for run in runs}
    environments = sorted({env_id for env_id, _ in there})
    complete = [env_id for env_id in environments if all((env_id, one) in there for one in curves)]
    return complete, [env_id for env_id in environments if env_id not in complete]


def command(runs: Sequence[RecordedRun], environments: Sequence[str], out: str) -> list[str]:
    """Return the command that draws runs from the offline database.

    Args:
      runs: of one project.
      environments: to draw.
      out: its output files, without their extensions.
    """
    filters = "&".join(
        f"{name}={quote(value, safe='/')}"
        for name, value in {"we": ENTITY, "wpn": runs[0].project, **NAMES}.items()
    )
    curves = sorted({run.config["exp_name"] for run in runs})
    return [
        os.path.relpath(sys.executable), "-m", "openrlbenchmark.rlops", "--filters", f"?{filters}",
        *(f"{curve}?cl={quote(curve.replace('__', ', '))}" for curve in curves),
        "--env-ids", *environments, "--offline", "--scan-history", "--no-check-empty-runs",
        "--pc.ncols", str(min(len(environments), 3)), "--pc.ncols-legend", "2",
        "--output-filename", out,
    ]  # fmt: skip


@dataclass(frozen=True)
class Args:
    """Command line."""

    study: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STUDY")]
    """Folder of a study's records."""
    out: str | None = None
    """Output files of the printed command, without their endings; by default site/<study>/rlops."""
    dataset: str | None = None
    """Folder of openrlbenchmark's data; by default its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 2 for bad input."""
    try:
        words = sys.argv[1:] if argv is None else argv
        options = parse(Args, words, "Draw a study's curves with openrlbenchmark.")
        folder = Path(options.study)
        project = folder.resolve().name
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder")
        runs = recorded_runs(importers.read([folder], "records"), project)
        if not runs:
            raise InputError(f"{folder}: no completed run with an episode")
        environments, left_out = drawable(runs)
        if not environments:
            raise InputError(f"{folder}: no environment has runs of every system and setting")
        if options.dataset is None:
            import openrlbenchmark

            dataset = Path(openrlbenchmark.__path__[0]) / "dataset"
        else:
            dataset = Path(options.dataset)
        fill(runs, dataset)
    except (BadInput, InputError, OSError) as error:
        return bad_input(error)
    out = options.out or f"site/{project}/rlops"
    if left_out:
        lacking = ", ".join(left_out)
        print(f"left out, without runs of every system and setting: {lacking}", file=sys.stderr)
    print(shlex.join(command(runs, environments, out)))
    return 0


if __name__ == "__main__":
    run_command(main)
