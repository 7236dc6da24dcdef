"""Run benchmarks, print a table of each and all ratios on one page, and write the results as JSON.

    python -m experiments.benchmarks
    python -m experiments.benchmarks systems hts --hts.delays 0.01
    python -m experiments.benchmarks "trainers/impala-cartpole*" --json runs/benchmarks.json

Each field of `Args` below `json` is a benchmark; its sizes are flags, such as `--hts.delays`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from cleanba.exact.placement import cpu_model
from cleanba.record import replace_file
from cleanba.record.revision import source_revision
from cleanba.run.command_line import BadInput, run_command_line
from experiments.benchmarks.analysis import Bootstrap, Curves, Reading
from experiments.benchmarks.baselines import Baselines
from experiments.benchmarks.case import Benchmark, Case, Row, Table, header, line
from experiments.benchmarks.exactness import Actions, Reductions
from experiments.benchmarks.hts import Hts
from experiments.benchmarks.page import Results
from experiments.benchmarks.report import Report
from experiments.benchmarks.speed import cores
from experiments.benchmarks.systems import Systems
from experiments.benchmarks.trainers import Trainers


@dataclass(frozen=True)
class Args:
    """Which benchmarks to run, and at which sizes."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Benchmarks, or cases as benchmark/case, in which * matches anything; by default all."""
    json: str | None = None
    """File to write the results to, after every case."""
    trainers: Trainers = field(default_factory=Trainers)
    reductions: Reductions = field(default_factory=Reductions)
    actions: Actions = field(default_factory=Actions)
    baselines: Baselines = field(default_factory=Baselines)
    hts: Hts = field(default_factory=Hts)
    systems: Systems = field(default_factory=Systems)
    bootstrap: Bootstrap = field(default_factory=Bootstrap)
    curves: Curves = field(default_factory=Curves)
    reading: Reading = field(default_factory=Reading)
    report: Report = field(default_factory=Report)


def choose(benchmarks: dict[str, Benchmark], names: Sequence[str]) -> dict[str, list[Case]]:
    """Return the cases to measure, by benchmark.

    Args:
      benchmarks: all benchmarks by name.
      names: of benchmarks, or patterns of benchmark/case; all if empty.

    Raises:
      BadInput: if a name matches nothing.
    """
    cases = {name: benchmark.cases() for name, benchmark in benchmarks.items()}
    known = [(name, case) for name, those in cases.items() for case in those]
    for pattern in names:
        if not any(_matches(pattern, name, case) for name, case in known):
            raise BadInput(
                f"{pattern}: no such benchmark; choose from {', '.join(cases)}, or their cases, such as "
                f"{known[0][0]}/{known[0][1].name}"
            )
    chosen: dict[str, list[Case]] = {}
    for name, case in known:
        if not names or any(_matches(pattern, name, case) for pattern in names):
            chosen.setdefault(name, []).append(case)
    return chosen


def _matches(pattern: str, benchmark: str, case: Case) -> bool:
    return pattern == benchmark or fnmatchcase(f"{benchmark}/{case.name}", pattern)


def write(path: Path, seconds: float, tables: dict[str, Table]) -> None:
    """Write what was measured so far, as indented JSON."""
    found = Results(
        date=time.strftime("%Y-%m-%d"),
        revision=source_revision(Path(__file__).parent),
        processor=cpu_model(),
        cores=cores(),
        seconds=round(seconds, 1),
        tables=tables,
    )
    encoded = msgspec.json.encode(found)
    replace_file(path, msgspec.json.format(encoded, indent=2).decode() + "\n")


def main(args: Args) -> None:
    """Measure the chosen cases, print a table of each benchmark and the ratios of all, and write them."""
    start = time.monotonic()
    benchmarks = {k: v for k, v in vars(args).items() if k not in ("names", "json")}
    chosen = choose(benchmarks, args.names)
    path = Path(args.json) if args.json else None
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()  # an earlier result is replaced only by the first new one
        except OSError as error:
            raise BadInput(f"--json {path}: {error.strerror}") from None
    print(f"{cores()} cores of {cpu_model()}")
    tables: dict[str, Table] = {}
    for name, cases in chosen.items():
        benchmark = benchmarks[name]
        columns = benchmark.columns
        tables[name] = Table(title=benchmark.title(), columns=columns, rows=[])
        width = max(len(case.name) for case in cases) + 2
        print(f"\n{name}: {benchmark.title()}")
        print(header(columns, width))
        for case in cases:
            row = Row(case=case.name, values=case.measure())
            print(line(columns, width, row), flush=True)
            tables[name].rows.append(row)
            if path is not None:
                write(path, time.monotonic() - start, tables)
    print_ratios(tables)
    print(f"\n{time.monotonic() - start:.0f} s" + (f"; written: {path}" if path else ""))


def print_ratios(tables: dict[str, Table]) -> None:
    """Print the ratios of all benchmarks together."""
    compared = {name: table for name, table in tables.items() if table.ratios()}
    if compared:
        print("\nRatios")
    for name, table in compared.items():
        width = max(len(row.case) for row in table.rows) + 2
        print(f"\n{name}")
        print(header(table.ratios(), width))
        for row in table.rows:
            print(line(table.ratios(), width, row))


if __name__ == "__main__":
    run_command_line(Args, main, "Measure speed: of trainers, baselines, analysis and reports.")
