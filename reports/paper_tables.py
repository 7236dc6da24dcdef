"""Tables of the Cleanba paper, its README, and HTS-RL's paper: `python -m reports.paper_tables table1`.

From records of runs; the README's run times also without (`--source published`).

Table 1: which policy made which data, and which data made which policy, in the first iterations of both
architectures: not as they are meant to be, but as the actors and learners of real runs logged it.

Run times: how long one run takes on the README's 14 hardware settings, beside what it says.

HTS-RL's table 3 is left out: its agents, up to three in one game, are more than EnvPool's football has.
"""

import argparse
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analysis import scaling
from analysis.output import bad_input
from analysis.scores import hts_metrics
from analysis.tables import InputError, Tables
from experiments.study import StudyError
from plots import style
from reports import content, paper

ITERATIONS = 5
ONE_DEVICE = scaling.README_RUN_TIMES[1]  # which the other layouts are compared with
ARCHITECTURES = {True: "Synchronous architecture", False: "Cleanba's architecture"}


def composition(rollouts: pd.DataFrame, iterations: int) -> list[tuple[int, int]]:
    """Return what the first rollouts of a run were made by, and what the learner was when it used them.

    Args:
      rollouts: of one run.
      iterations: how many.

    Returns:
      For each rollout, the version that acted in it and the learner's.

    Raises:
      InputError: if several versions made one of them: then the run is of neither architecture.
    """
    found = []
    for number in range(1, iterations + 1):
        one = rollouts[rollouts["rollout"] == number]
        versions = one[["version_first", "version_last", "learner_version"]].drop_duplicates()
        first, last, learner = versions.to_numpy(int)[0]
        if len(versions) > 1 or first != last:
            raise InputError(f"rollout {number} was made by several policies")
        found.append((int(first), int(learner)))
    return found


def table1(tables: Tables, iterations: int = ITERATIONS) -> list[str]:
    """Return the table, as lines of Markdown.

    Args:
      tables: completed runs, of which those of the Cleanba trainers count.
      iterations: rows of it.

    Raises:
      InputError: if runs of one architecture differ.
    """
    columns = {}
    for synchronous, title in ARCHITECTURES.items():
        runs = [
            (run, rollouts)
            for run, rollouts in tables.rollouts.groupby("run", observed=True)
            if (system := str(rollouts["system"].iloc[0])).startswith("cleanba_")
            and system.endswith("-sync") == synchronous
        ]
        if not runs:
            raise InputError(f"no completed run of the {title.lower()}")
        found = {str(run): composition(rollouts, iterations) for run, rollouts in runs}
        first, *others = found
        different = [run for run in others if found[run] != found[first]]
        if different:
            raise InputError(f"{different[0]} and {first} differ in what made their data")
        columns[title] = (found[first], len(found))
    titles = [f"{title} ({count} runs)" for title, (_, count) in columns.items()]
    lines = [
        "| iteration |" + "".join(f" {title}: actor | learner |" for title in titles),
        "| ---: |" + " --- | --- |" * len(titles),
    ]
    for iteration in range(1, iterations + 1):
        cells = [str(iteration)]
        for rows, _ in columns.values():
            made_by, _ = rows[iteration - 1]
            # the learner's work of an iteration is the one that makes its policy: version i makes i + 1
            delay = rows[1][0] == 1  # the second rollout was made by the first policy too
            used = iteration - 1 - delay
            cells.append(f"π{made_by} → D(π{made_by})")
            if used < 0:
                cells.append("")
            else:
                data, learner = rows[used]
                cells.append(f"D(π{data}) → π{learner + 1}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def runtimes(tables: Tables) -> list[str]:
    """Return how long a run takes on each layout, beside the README's times, as lines of Markdown.

    Args:
      tables: completed runs of the Cleanba trainers, whose settings are called after their layouts.

    Raises:
      InputError: if no run is of a layout of the README.
    """
    done = tables.runs[tables.runs["completed"].astype(bool)]
    minutes = (done.groupby("setting", observed=True)["seconds"].mean() / 60).to_dict()
    prints = _last_fingerprints(tables)
    published = {row.layout for row in scaling.README_RUN_TIMES if row.layout}
    own = {setting: minutes[setting] for setting in minutes if setting in published}
    if not own:
        raise InputError("no completed run is of a layout of the README")
    lines = [
        "| layout | README | minutes | of one device's | here: minutes | of one device's | fingerprint |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    rows = [
        scaling.PublishedTime("", setting, math.nan) for setting in sorted(set(minutes) - published)
    ]
    for row in [*scaling.README_RUN_TIMES, *rows]:
        here = minutes.get(row.layout, math.nan)
        cells = [
            *_published_cells(row),
            _number(here, ".2f"),
            _number(here / own.get(ONE_DEVICE.layout, math.nan), ".0%"),
            prints.get(row.layout, ""),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def published_runtimes() -> list[str]:
    """Return the README's run times alone, as lines of Markdown."""
    lines = ["| layout | README | minutes | of one device's |", "| --- | --- | ---: | ---: |"]
    for row in scaling.README_RUN_TIMES:
        lines.append("| " + " | ".join(_published_cells(row)) + " |")
    return lines


def _published_cells(row: scaling.PublishedTime) -> list[str]:
    return [
        row.layout or "not named",
        row.hardware,
        _number(row.minutes, ".1f"),
        _number(row.minutes / ONE_DEVICE.minutes, ".0%") if "A100" in row.hardware else "",
    ]


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else format(value, form)


def _last_fingerprints(tables: Tables) -> dict[str, str]:
    """Return, for each setting, the first digits of a hash of the last fingerprints of its runs.

    Of the systems, environments and seeds that all settings with fingerprints have, so that settings
    that give the same bits have the same digits; none where there is no such run.
    """
    found = content.last_fingerprints(tables)
    prints: dict[str, dict[tuple, str]] = {}
    for row in tables.runs.itertuples():
        if row.run in found:
            of_setting = prints.setdefault(str(row.setting), {})
            of_setting[str(row.system), str(row.env_id), row.seed] = found[row.run]
    shared = sorted(set.intersection(*map(set, prints.values()))) if prints else []
    return {
        setting: hashlib.sha256(repr([(one, own[one]) for one in shared]).encode()).hexdigest()[:8]
        for setting, own in prints.items()
        if shared
    }


def hts_table1(tables: Tables) -> list[str]:
    """Return HTS-RL's table 1: the score of each system when the fastest of them has ended.

    The "final time metric": mean return of the last 100 training episodes before the time at which the first
    run on the same game ended; mean and standard deviation over seeds.
    """
    metrics = hts_metrics(tables, ())
    return _by_game_and_system(
        metrics, lambda group: _mean_and_deviation(group["final_time_metric"])
    )


FOOTBALL_TARGETS = (0.4, 0.8)  # scoring rates, of table 2


def hts_table2(tables: Tables) -> list[str]:
    """Return HTS-RL's table 2: minutes until the scoring rate is 0.4 and 0.8.

    The "required time metric": until the mean return of the last 100 training episodes is that high; mean
    over seeds, and a dash where not every seed got there.
    """
    metrics = hts_metrics(tables, FOOTBALL_TARGETS)
    names = [f"required_time_{target:g}" for target in FOOTBALL_TARGETS]

    def minutes(group: pd.DataFrame) -> str:
        means = [group[name].mean() / 60 for name in names]
        return " / ".join(f"{mean:.1f}" if math.isfinite(mean) else "–" for mean in means)

    return _by_game_and_system(metrics, minutes)


def _by_game_and_system(metrics: pd.DataFrame, cell: Callable[[pd.DataFrame], str]) -> list[str]:
    systems = sorted(metrics["system"].unique())
    lines = [
        "| game | " + " | ".join(systems) + " | seeds |",
        "| --- |" + " ---: |" * (len(systems) + 1),
    ]
    for game, rows in metrics.groupby("env_id", observed=True):
        groups = [rows[rows["system"] == system] for system in systems]
        cells = [cell(group) if len(group) else "" for group in groups]
        seeds = " to ".join(map(str, sorted({len(group) for group in groups if len(group)})))
        lines.append(f"| {game} | " + " | ".join(cells) + f" | {seeds} |")
    return lines


def _mean_and_deviation(values: pd.Series) -> str:
    deviation = f" ± {values.std():.4g}" if len(values) > 1 else ""
    return f"{values.mean():.4g}{deviation}"


def speeds_and_scores(tables: Tables) -> list[str]:
    """Return HTS-RL's tables 4 and 5: speed and average score by setting, and whether the bits differ.

    The average score is the mean return of the last 100 training episodes.
    """
    metrics = hts_metrics(tables, ()).set_index("run")
    prints = _last_fingerprints(tables)
    lines = [
        "| setting | steps per second | average score | seeds | fingerprint |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    groups = {str(name): group for name, group in tables.runs.groupby("setting", observed=True)}
    for setting in sorted(groups, key=style.setting_order):
        runs = groups[setting]
        scores = metrics.loc[metrics.index.isin(runs["run"]), "final_metric"]
        cells = [
            setting,
            content.number(runs["sps"].mean(), 0),
            _mean_and_deviation(scores),
            str(len(runs)),
            prints.get(setting, ""),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


class Table(NamedTuple):
    """A table that can be made.

    Attributes:
      title: of its page.
      study: whose records it is made from.
      lines: makes it.
      published: makes it of what has been published, where that is enough.
    """

    title: str
    study: str
    lines: Callable[[Tables], list[str]]
    published: Callable[[], list[str]] | None = None


TABLES = {
    "table1": Table(
        "Table 1 of the Cleanba paper: which policy made which data", "architectures", table1
    ),
    "runtimes": Table(
        "Run times of the layouts of Cleanba's README", "layouts", runtimes, published_runtimes
    ),
    "hts_table1": Table(
        "Table 1 of HTS-RL: scores in the time of the fastest system", "hts_atari", hts_table1
    ),
    "hts_table2": Table(
        "Table 2 of HTS-RL: minutes to scoring rates of 0.4 and 0.8", "hts_football", hts_table2
    ),
    "hts_table4": Table("Table 4 of HTS-RL: number of actors", "hts_actors", speeds_and_scores),
    "hts_table5": Table(
        "Table 5 of HTS-RL: synchronisation interval", "hts_intervals", speeds_and_scores
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m reports.paper_tables", description=__doc__)
    parser.add_argument("name", choices=TABLES, metavar="|".join(TABLES))
    parser.add_argument("--source", choices=("runs", "published"), default="runs")
    parser.add_argument("--runs", default="runs", help="folder of all records (default: runs)")
    parser.add_argument("--preset", default="cpu", help="size of the study (default: cpu)")
    parser.add_argument("--out", default="reports/paper", help="folder for the table")
    options = parser.parse_args(argv)
    table = TABLES[options.name]
    suffix = "" if options.preset == "cpu" else f"_{options.preset}"
    try:
        if options.source == "published":
            if table.published is None:
                raise InputError(f"{options.name}: nothing is published that it could be made from")
            lines, words, suffix = table.published(), "the README of Cleanba", "_published"
        else:
            source = paper.read_runs(table.study, Path(options.runs), options.preset)
            lines, words = table.lines(source.tables), source.words
        page = Path(options.out) / f"{options.name}{suffix}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("\n".join([f"# {table.title}", "", *lines, "", f"From {words}.", ""]))
    except (InputError, StudyError, OSError) as error:
        return bad_input(error)
    print("\n".join(lines))
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
