"""Draws a study with openrlbenchmark, from the same records: `python -m reports.rlops runs/quickstart`.

Fills openrlbenchmark's offline database (in the folder of the installed package, where it looks for it) and
prints the `openrlbenchmark.rlops` command that draws the study's curves. So two tools that share no code
can be compared on one set of runs.
"""

import argparse
import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from analysis import importers
from analysis.output import bad_input
from analysis.tables import InputError, Tables, split_runs

ENTITY = "cleanba"
METRIC = "charts/episodic_return"
NAMES = {
    "cen": "exp_name",
    "ceik": "env_id",
    "metric": METRIC,
}  # of the columns, as its filters say them


class User(NamedTuple):
    """Who made a run: nobody's name is kept."""

    username: str = ""
    name: str = ""


class RecordedRun(NamedTuple):
    """A run record, as openrlbenchmark sees a run of Weights & Biases.

    Attributes:
      id: of the run, in its project.
      project: name of the study.
      config: the names that runs are chosen by.
      history: a row for each episode.
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
        """Return what names the run."""
        return [self.entity, self.project, self.id]

    def scan_history(self) -> Iterator[Mapping[str, float]]:
        """Yield all rows."""
        yield from self.history


def experiment(system: str, setting: str) -> str:
    """Return what a curve is called: runs of one system on one setting."""
    return f"{system}__{setting}"


def recorded_runs(tables: Tables, project: str) -> list[RecordedRun]:
    """Return the completed runs, in the order of their folders.

    Args:
      tables: of run records.
      project: what to call the study.
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
    """Write runs into the offline database, in the place of what it had of their project.

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


def command(runs: Sequence[RecordedRun], out: str) -> list[str]:
    """Return the command that draws runs from the offline database.

    Args:
      runs: of one project.
      out: its output files, without their extensions.
    """
    filters = "&".join(
        f"{name}={quote(value, safe='/')}"
        for name, value in {"we": ENTITY, "wpn": runs[0].project, **NAMES}.items()
    )
    curves = sorted({run.config["exp_name"] for run in runs})
    environments = sorted({run.config["env_id"] for run in runs})
    return [
        os.path.relpath(sys.executable), "-m", "openrlbenchmark.rlops", "--filters", f"?{filters}",
        *(f"{curve}?cl={quote(curve.replace('__', ', '))}" for curve in curves),
        "--env-ids", *environments, "--offline", "--scan-history", "--no-check-empty-runs",
        "--pc.ncols", str(min(len(environments), 3)), "--pc.ncols-legend", "2",
        "--output-filename", out,
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m reports.rlops", description=__doc__)
    parser.add_argument("study", help="folder of a study's records")
    parser.add_argument("--out", help="output of the command (default: reports/<study>/rlops)")
    parser.add_argument("--dataset", help="folder of openrlbenchmark's data (default: its own)")
    options = parser.parse_args(argv)
    folder = Path(options.study)
    project = folder.resolve().name
    try:
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder")
        runs = recorded_runs(importers.read([folder], "records"), project)
        if not runs:
            raise InputError(f"{folder}: no completed run with an episode")
        if options.dataset is None:
            import openrlbenchmark

            dataset = Path(openrlbenchmark.__path__[0]) / "dataset"
        else:
            dataset = Path(options.dataset)
        fill(runs, dataset)
    except (InputError, OSError) as error:
        return bad_input(error)
    out = options.out or f"reports/{project}/rlops"
    print(shlex.join(command(runs, out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
