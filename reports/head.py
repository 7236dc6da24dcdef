"""The head of a page: the finding, and the state of the data, in sentences.

The finding is derived from the tables of the page.
"""

from collections.abc import Sequence

from analysis.bootstrap import FEW_RUNS
from reports.page import NOTHING, Section, Table, Value, number, shown, sort_value, table_of


def finding(sections: Sequence[Section]) -> tuple[str, ...]:
    """Return the findings of a study: bits, targets, systems, then scores and speed by environment."""
    sentences = []
    for name, write in (("bits", _bits), ("targets", _targets), ("systems", _systems)):
        table = table_of(sections, name)
        sentences += write(table) if table else []
    summary = table_of(sections, "summary")
    return (*sentences, *(_environments(summary) if summary else []))


def _bits(table: Table) -> list[str]:
    compared = [row for row in table.records() if row["pairs of runs"]]
    differ: dict[str, list[dict[str, Value]]] = {}
    same: dict[str, list[dict[str, Value]]] = {}
    for row in compared:
        system = shown(row["system"])
        everywhere = all(
            one["pairs of runs"] == one["pairs that agree"]
            for one in compared
            if shown(one["system"]) == system
        )
        (same if everywhere else differ).setdefault(system, []).append(row)
    sentences = []
    if same:
        rows = [row for of_system in same.values() for row in of_system]
        pairs, prints = (
            sum(row[name] for row in rows) for name in ("pairs of runs", "fingerprints")
        )
        verb = "is" if len(same) == 1 else "are"
        sentences.append(
            f"{_listed(list(same))} {verb} bit-identical across hardware settings "
            f"({_count(pairs, 'pair')} of runs, {_count(prints, 'fingerprint')} compared)."
        )
    for system, rows in differ.items():
        pairs = sum(row["pairs of runs"] for row in rows)
        agree = sum(row["pairs that agree"] for row in rows)
        share = f"all {pairs:,}" if not agree else f"{pairs - agree:,} of {pairs:,}"
        noun = "pair" if pairs == 1 else "pairs"
        if not any(row["first difference"] for row in rows):
            sentences.append(
                f"{system} is bit-identical on {agree:,} of {pairs:,} {noun} of runs; the others lack a "
                "partner, or have no fingerprint of the same version."
            )
            continue
        sentences.append(
            f"The parameters of {system} changed with the hardware setting in {share} {noun} of runs."
        )
    return sentences


def _targets(table: Table) -> list[str]:
    rows = table.records()
    reached = sum(sort_value(row["seeds that reached it"]) for row in rows)
    return [f"{reached} of {sum(row['seeds'] for row in rows)} runs reached the target return."]


def _systems(table: Table) -> list[str]:
    verdicts = [shown(row["learning curves"]) for row in table.records()]
    counts = [
        f"{verdicts.count(name)} {name}"
        for name in ("equivalent", "different", "undecided")
        if name in verdicts
    ]
    what = "comparison" if len(verdicts) == 1 else "comparisons"
    return [f"{len(verdicts)} {what} of learning curves between systems: {', '.join(counts)}."]


def _environments(table: Table) -> list[str]:
    """Return the range of scores and speeds on each environment, with the systems at both ends."""
    rows = table.records()
    # columns that distinguish the rows of an environment
    who = [name for name in ("system", "setting") if len({row[name] for row in rows}) > 1]
    sentences = []
    for environment in dict.fromkeys(row["environment"] for row in rows):
        here = [row for row in rows if row["environment"] == environment]
        parts = [
            f"{what} {text}"
            for what, column in (("final score", "final score"), ("steps per second", "SPS"))
            if (text := _range(here, column, who)) != NOTHING
        ]
        if parts:
            sentences.append(f"{environment}: {'; '.join(parts)}.")
    return sentences


def _range(rows: Sequence[dict[str, Value]], column: str, who: Sequence[str]) -> str:
    known = sorted((row for row in rows if row[column] is not None), key=lambda row: row[column])
    if not known:
        return NOTHING
    low, high = known[0], known[-1]
    if number(low[column]) == number(high[column]):
        return number(low[column])
    ends = [
        f"{number(row[column])} ({', '.join(row[name] for name in who)})" for row in (low, high)
    ]
    return " to ".join(ends)


def status(
    completed: int, runs: int, planned: int, changed: bool, seeds: Sequence[int], problems: int
) -> tuple[str, ...]:
    """Return the completeness of the data, and the limits of their intervals.

    Args:
      completed: runs that were completed by a command of the study.
      runs: runs that have a record.
      planned: runs that the study plans; 0 if unknown.
      changed: whether some runs were completed by another command than the study's.
      seeds: number of seeds of each result.
      problems: number of problems with the data.
    """
    how = " by a command of the study" if changed else ""
    sentence = f"{completed} of {runs} runs are completed{how}"
    sentences = [
        f"{sentence}; {planned} are planned." if planned not in (0, runs) else f"{sentence}."
    ]
    if seeds and max(seeds) == 1:
        sentences.append("One seed per result: no intervals, and the spread over seeds is unknown.")
    elif seeds and min(seeds) < FEW_RUNS:
        low, high = min(seeds), max(seeds)
        count = f"{low}" if low == high else f"{low} to {high}"
        sentences.append(
            f"With {count} seeds per result, the intervals are too narrow: read them as the spread of "
            "the seeds."
        )
    found = "No problem" if not problems else _count(problems, "problem")
    sentences.append(f"{found} with the data {'was' if problems < 2 else 'were'} found.")
    return tuple(sentences)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _count(number_: int, noun: str) -> str:
    return f"{number_:,} {noun}{'' if number_ == 1 else 's'}"
