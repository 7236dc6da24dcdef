"""The results of `make bench` on one page, ratios first, and the README's table of peers.

    python -m experiments.benchmarks.page runs/benchmarks.json

writes `results/benchmarks.json`, `results/benchmarks.md` and the table between two comments in README.md, all
to be committed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from cleanba.record import replace_file
from cleanba.run.command_line import BadInput, run_command_line
from experiments.benchmarks.case import Column, Row, Table

ROOT = Path(__file__).parents[2]
COMMAND = "python -m experiments.benchmarks.page"
# Rows of the README's table: a system of Cleanba, and systems of other authors as this repository
# implements them, with their display names.
COMPARED = {
    "cleanba_ppo-sync": "Cleanba (synchronous)",
    "cleanrl_ppo": "CleanRL",
    "hts_rl_ppo": "HTS-RL",
    "cleanba_impala": "Cleanba",
    "monobeast_nature": "monobeast",
    "moolib_nature": "moolib",
    "schemes_impala-impala": "worker scheme IMPALA, on Ray",
    "cleanba_impala_resnet": "Cleanba",
    "monobeast_resnet": "monobeast",
    "moolib_resnet": "moolib",
}
NETWORKS = {"nature": "Nature CNN", "resnet": "ResNet"}
BEGIN, END = f"<!-- made by {COMMAND} -->\n", "<!-- end -->\n"


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of `make bench` measured, and where."""

    date: str  # such as 2026-01-31
    revision: str  # of the source
    processor: str
    cores: int
    seconds: float  # of all benchmarks
    tables: dict[str, Table]  # by benchmark


def page(found: Results) -> str:
    """Return the page: a table of ratios for each benchmark that has any, and all that was measured."""
    lines = [
        f"<!-- made by {COMMAND} -->",
        "# Benchmarks",
        "",
        f"`make bench` on {found.cores} cores of {article(found.processor)} took "
        f"{found.seconds / 60:.0f} minutes ({found.date}, revision {found.revision[:12]}). Each "
        "speed is that of one short run, so small differences mean little, above all on CartPole. How each "
        "benchmark measures is described in `experiments/benchmarks/`.",
        "",
        "## Ratios",
        "",
    ]
    for name, table in found.tables.items():
        if table.ratios():
            lines += [*_markdown(name, table.ratios(), table.rows), ""]
    for name, table in found.tables.items():
        lines += [f"## {name}", "", table.title.rstrip(".") + ".", ""]
        lines += [*_markdown(name, table.columns, table.rows), ""]
    return "\n".join(lines)


def readme_table(found: Results) -> str:
    """Return the README's table: Cleanba's speed beside that of its peers.

    Raises:
      BadInput: if a system was not measured.
    """
    table = found.tables.get("systems")
    systems = {row.case: row.values for row in table.rows} if table else {}
    missing = [name for name in COMPARED if name not in systems]
    if missing:
        raise BadInput(f"systems/{missing[0]} was not measured: run `make bench` without ARGS")
    rows = [
        "| algorithm, network | system | steps per second | Cleanba's speed relative to it |",
        "| --- | --- | ---: | ---: |",
    ]
    for name, shown in COMPARED.items():
        values = systems[name]
        what = f"{values['algorithm'].upper()}, {NETWORKS[values['network']]}"
        rows.append(f"| {what} | {shown} | {values['speed']:,.0f} | {values['ratio']:.2f} |")
    where = f"{found.cores} cores of {article(found.processor)}"
    caption = (
        f"Steps per second on {where}, Pong-v5, 16 environments x 20 steps "
        "([all benchmarks](results/benchmarks.md), `make bench`):"
    )
    return "\n".join([caption, "", *rows]) + "\n"


def article(noun: str) -> str:
    """Return a processor's name with its article."""
    return f"{'an' if noun[:1] in 'AEIO' else 'a'} {noun}"


def between_comments(text: str, table: str) -> str:
    """Return a text in which a table replaces what is between the two comments.

    Raises:
      BadInput: if the text does not have them.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BadInput(f"README.md: lacks the lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{begin}{table}{end}{after}"


def read(path: Path) -> Results:
    """Read the results of a run.

    Raises:
      BadInput: if the file is not one.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError) as error:
        raise BadInput(f"{path}: {error}") from None


def _markdown(name: str, columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[str]:
    yield f"| {name} | " + " | ".join(column.title for column in columns) + " |"
    yield "| --- |" + " ---: |" * len(columns)
    for row in rows:
        cells = [format(row.values[column.value], column.format) for column in columns]
        yield f"| {row.case} | " + " | ".join(cells) + " |"


@dataclass(frozen=True)
class Args:
    """Command line."""

    results: Annotated[str, tyro.conf.Positional]
    """JSON file that `make bench` wrote."""


def main(args: Args) -> None:
    """Write the page, its data, and the README's table."""
    found = read(Path(args.results))
    readme = ROOT / "README.md"
    replaced = between_comments(readme.read_text(), readme_table(found))
    replace_file(ROOT / "results" / "benchmarks.json", Path(args.results).read_text())
    replace_file(ROOT / "results" / "benchmarks.md", page(found))
    replace_file(readme, replaced)
    print("written: results/benchmarks.json, results/benchmarks.md, README.md")


if __name__ == "__main__":
    run_command_line(Args, main, "Publish the results of `make bench`.")
