"""Table 1 of the Cleanba paper from records: `python -m reports.paper_tables`.

Which policy made which data, and which data made which policy, in the first iterations of both
architectures: not as they are meant to be, but as the actors and learners of real runs logged it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.tables import InputError, Tables
from experiments.study import StudyError
from reports import paper

STUDY = paper.FIGURES["fig6"]  # of both architectures
ITERATIONS = 5
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
      tables: completed runs of the Cleanba trainers.
      iterations: rows of it.

    Raises:
      InputError: if runs of one architecture differ.
    """
    columns = {}
    for synchronous, title in ARCHITECTURES.items():
        runs = [
            (run, rollouts)
            for run, rollouts in tables.rollouts.groupby("run", observed=True)
            if str(rollouts["system"].iloc[0]).endswith("-sync") == synchronous
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m reports.paper_tables", description=__doc__)
    parser.add_argument("--runs", default="runs", help="folder of all records (default: runs)")
    parser.add_argument("--preset", default="cpu", help="size of the study (default: cpu)")
    parser.add_argument("--out", default="reports/paper", help="folder for table1.md")
    options = parser.parse_args(argv)
    try:
        source = paper.read_runs(STUDY, Path(options.runs), options.preset)
        lines = table1(source.tables)
    except (InputError, StudyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    page = Path(options.out) / "table1.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    title = "# Table 1 of the Cleanba paper: which policy made which data"
    page.write_text("\n".join([title, "", *lines, "", f"From {source.words}.", ""]))
    print("\n".join(lines))
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
