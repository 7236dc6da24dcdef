"""Values of tables, from the numbers and names of an analysis."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from analysis.bootstrap import FEW_RUNS
from cleanba import record
from plots import style
from reports.page import NOTHING, Cell, Value, number

NAMES = ("environment", "system", "setting")

# The folders of an absolute path; the slashes of an address like https://host/page do not match.
_FOLDERS = re.compile(r"(?<![\w:/.~…])/(?:[^\s/'\":]+/)+")


def names(row: object) -> tuple[str, str, str]:
    """Return environment, display name of the system, and setting of a row, as in `NAMES`."""
    return str(row.env_id), style.name_of(str(row.system)), str(row.setting)


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """Sort rows by environment, system, setting (in the order of the figures) and seed."""
    columns = [name for name in ("env_id", "system", "setting", "seed") if name in frame]

    def key(column: pd.Series) -> pd.Series:
        return (
            column.map(style.setting_order) if column.name == "setting" else column.astype(object)
        )

    return frame.astype({name: object for name in columns}).sort_values(columns, key=key)


def finite(value: float | None) -> float | None:
    """Return a number to ten significant digits, or None for NaN and infinities."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.10g}")


def rounded(value: float, decimals: int) -> Value:
    """Return a number that is shown with `decimals` decimals."""
    return Cell(number(value, decimals), finite(value)) if math.isfinite(value) else None


def percent(value: float) -> Value:
    """Return a share, shown in percent."""
    return Cell(f"{value:.0%}", finite(value)) if math.isfinite(value) else None


def seed(value: int) -> Value:
    """Return a seed, shown without separators."""
    return int(value) if value < 1000 else Cell(str(value), int(value))


def interval(low: float, high: float) -> Value:
    """Return an interval, sorted by its lower end; None where one run gives none."""
    return Cell(f"[{number(low)}, {number(high)}]", finite(low)) if math.isfinite(low) else None


def spread(low: float, high: float, each: Sequence[float]) -> Value:
    """Return an interval; the range of a few runs, for which no interval is valid; None of one run."""
    if len(each) >= FEW_RUNS:
        return interval(low, high)
    if len(each) < 2:
        return None
    low, high = min(each), max(each)
    return Cell(f"{number(low)} to {number(high)}", finite(low), "note")


def with_interval(value: float, low: float, high: float) -> Value:
    """Return a number with its interval, if it has one."""
    if not math.isfinite(low):
        return finite(value)
    return Cell(f"{number(value)} [{number(low)}, {number(high)}]", finite(value))


def waited(row: object) -> Value:
    """Return which side waited more, and for which share of the time."""
    learner, actors = row.learner_waiting, row.actor_waiting
    if max(learner, actors) < 0.005:
        return "neither"
    return f"{'learner' if learner >= actors else 'actors'} {max(learner, actors):.0%}"


def same_bits(pairs: pd.DataFrame, system: str, env_id: str) -> Value:
    """Return whether the settings of a system gave the same bits on an environment."""
    here = pairs[(pairs["system"] == system) & (pairs["env_id"] == env_id)]
    here = here[here["compared"] > 0]
    if here.empty:
        return None
    agree = (here["identical"] == True) & here["same_episodes"].astype(bool)  # noqa: E712
    if not agree.all():
        return Cell(f"no ({(~agree).sum()} of {len(here)} pairs)", tone="bad")
    return Cell("yes", tone="good") if here["to_the_end"].all() else None


def difference(outcome: Mapping | None, *, with_interval: bool = True) -> Value:
    """Return the signed difference of two systems (second minus first), with its interval."""
    if outcome is None:
        return None
    value, low, high = (outcome[name] for name in ("difference", "low", "high"))
    text = signed(value)
    if with_interval and math.isfinite(low):
        text += f" [{signed(low)}, {signed(high)}]"
    return Cell(text, finite(value))


def signed(value: float) -> str:
    """Format a difference: +12.34, -0.018."""
    text = number(abs(value), decimals=3 if abs(value) < 1 else None)
    return f"{'-' if value < 0 else '+'}{text}"


def span(values: Sequence[float]) -> Value:
    """Return the smallest and the largest of some numbers, such as `12 to 34`, without infinite ones."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return None
    texts = dict.fromkeys(number(value, 0) for value in (min(known), max(known)))
    return Cell(" to ".join(texts), finite(min(known)))


def each(values: Sequence[float], decimals: int | None = None) -> str:
    """Return several numbers in one text."""
    return ", ".join(number(value, decimals) for value in values) or NOTHING


def neutral(text: str) -> str:
    """Return a text of a record on one line, without names of users, hosts and folders."""
    return " ".join(_FOLDERS.sub("…/", record.redact_text(text)).split())


def neutral_path(word: str) -> str:
    """Return a word of a command line, without the part of an absolute path that identifies the machine."""
    if not os.path.isabs(word):
        return neutral(word)
    here = os.path.relpath(word)
    return neutral(here) if not here.startswith("..") else f"…/{Path(word).name}"


def command(words: object) -> str:
    """Return the command of a run as one line, without paths that identify the machine."""
    return " ".join(neutral_path(str(word)) for word in (words if isinstance(words, list) else []))


def file_link(file: Path, out: Path) -> str:
    """Return the address of a file relative to the page, or '' if one is outside the working directory.

    A link out of the working directory would show the names of the machine's folders, and would not
    work on any other machine.
    """
    here = Path.cwd().resolve()
    target, start = file.resolve(), out.resolve()
    if not (target.is_relative_to(here) and start.is_relative_to(here)):
        return ""
    return quote(Path(os.path.relpath(target, start)).as_posix())
