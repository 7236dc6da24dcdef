"""What a report says: its tables and sentences, as data for the templates and the terminal."""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pandas as pd

from analysis import reproducibility
from analysis.bootstrap import FEW_RUNS
from analysis.forks import call_all
from analysis.scores import EPISODES, final_scores
from analysis.tables import Tables
from cleanba import record
from experiments.pool import available_cores
from plots import style
from plots.efficiency import METRICS
from reports import summaries
from reports.summaries import GROUP, Verdict

NOTHING = "–"

# The folders of an absolute path; the slashes of an address like https://host/page are none.
_FOLDERS = re.compile(r"(?<![\w:/.~…])/(?:[^\s/'\":]+/)+")


class Cell(NamedTuple):
    """One cell: its text, what to sort it by, a tone (`good`, `bad`, `note`), a link, more text."""

    text: str
    sort: float | str = ""
    tone: str = ""
    link: str = ""
    more: str = ""


class Grid(NamedTuple):
    """A table of a page. `numeric` names the columns that are right-aligned."""

    columns: tuple[str, ...]
    numeric: frozenset[str]
    rows: list[tuple[Cell, ...]]


class FigureText(NamedTuple):
    """A figure of a page: file name (without ending), title and caption."""

    name: str
    title: str
    caption: str


class Results(NamedTuple):
    """All frames that a report shows, of completed runs."""

    steps: pd.DataFrame  # learning curves against steps
    time: pd.DataFrame  # and against wall time
    scores: pd.DataFrame
    targets: pd.DataFrame  # when runs reached what the study asks for; none where it does not ask
    aggregates: pd.DataFrame  # normalised scores over all environments; none of a single one
    comparable: summaries.Comparable  # what they are taken of
    efficiency: dict[tuple[str, str], pd.DataFrame]  # their curves, by metric and axis
    speeds: pd.DataFrame
    times: pd.DataFrame
    lags: pd.DataFrame
    asynchrony: pd.DataFrame  # of gradients, in systems that apply them late
    changes: pd.DataFrame  # policy changes inside rollouts, of systems that have any
    predicted: pd.DataFrame  # and what was predicted of them
    value_losses: pd.DataFrame  # of the same systems
    pairs: pd.DataFrame
    verdicts: list[Verdict]
    systems: list[dict]  # `analysis.reproducibility.system_verdicts`


def results(
    done: Tables, targets: Mapping[str, float] | None = None, target_episodes: int = EPISODES
) -> Results:
    """Compute everything that a report shows.

    Args:
      done: tables of completed runs.
      targets: mean return of `target_episodes` episodes that the study asks for, by environment.
      target_episodes: number of them.
    """
    pairs = summaries.fingerprints(done)
    changing = summaries.changing(done)
    comparable = summaries.comparable(done)
    # a few seconds' work each where a study is as large as the papers'; the long ones first
    calls: dict[str, Callable] = {
        "systems": partial(reproducibility.system_verdicts, done),
        "verdicts": partial(summaries.verdicts, done, pairs),
        "steps": partial(summaries.learning_curves, done, "step"),
        "time": partial(summaries.learning_curves, done, "time"),
        "efficiency": partial(summaries.efficiency, comparable.tables),
        "times": partial(summaries.time_table, done),
        "lags": partial(summaries.lag_table, done),
        "changes": partial(summaries.lag_table, changing, "changes"),
        "aggregates": partial(summaries.aggregate_table, comparable.tables),
        "scores": partial(summaries.score_table, done),
        "targets": partial(summaries.target_table, done, targets or {}, target_episodes),
        "speeds": partial(summaries.speed_table, done),
        "asynchrony": partial(summaries.asynchrony_table, done),
        "predicted": partial(summaries.change_predictions, changing),
        "value_losses": partial(summaries.value_losses, changing),
    }
    found = dict(zip(calls, call_all(list(calls.values()), len(available_cores())), strict=True))
    return Results(comparable=comparable, pairs=pairs, **found)


def number(value: float, decimals: int | None = None) -> str:
    """Write a number for reading: 7,312, 475.3, 12.34, 0.95; a dash for none.

    Args:
      value: the number.
      decimals: how many; by default the fewer, the larger the number.
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    if decimals is None:
        decimals = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    return f"{value:,.{decimals}f}"


def numeric_cell(value: float, decimals: int | None = None) -> Cell:
    """Return a cell that is sorted by its number."""
    return Cell(number(value, decimals), _sortable(float(value)))


def percent_cell(value: float) -> Cell:
    """Return a cell with a share in percent."""
    return Cell(f"{value:.0%}" if math.isfinite(value) else NOTHING, value)


def names(row: object) -> tuple[Cell, ...]:
    """Return the cells that name environment, system and setting of a row."""
    return tuple(Cell(str(value), str(value)) for value in (row.env_id, row.system, row.setting))


NAMES = ("environment", "system", "setting")


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """Sort rows by environment, system and setting as on the figures, and seed where there is one."""
    columns = [name for name in ("env_id", "system", "setting", "seed") if name in frame]

    def key(column: pd.Series) -> pd.Series:
        return (
            column.map(style.setting_order) if column.name == "setting" else column.astype(object)
        )

    return frame.astype({name: object for name in columns}).sort_values(columns, key=key)


def headline(done: Tables, found: Results) -> Grid:
    """Return the table that answers the question in short: one row per system and setting.

    Args:
      done: completed runs.
      found: what they gave.
    """
    scores = _by_group(found.scores)
    speeds = _by_group(found.speeds)
    times = _by_group(found.times)
    lags = _by_group(summaries.lag_summary(found.lags))
    rows = []
    for row in in_order(done.runs.drop_duplicates(GROUP)[GROUP]).itertuples():
        key = (row.system, row.setting, row.env_id)
        score = scores.get(key)
        rows.append(
            (
                *names(row),
                numeric_cell(score.value) if score else Cell(NOTHING),
                interval_cell(score.low, score.high) if score else Cell(NOTHING),
                Cell(str(score.runs), score.runs) if score else Cell("0", 0),
                numeric_cell(speeds[key].sps) if key in speeds else Cell(NOTHING),
                numeric_cell(lags[key].mean) if key in lags else Cell(NOTHING),
                waiting_cell(times[key]) if key in times else Cell(NOTHING),
                bits_cell(found.pairs, row.system, row.env_id),
            )
        )
    columns = ("final score", "95% interval", "seeds", "SPS", "policy lag", "waited more")
    numeric = frozenset(columns[:5])
    return Grid((*NAMES, *columns, "same bits"), numeric, rows)


def interval_cell(low: float, high: float) -> Cell:
    """Return a cell with an interval, or a dash where one run gives none."""
    if not math.isfinite(low):
        return Cell(NOTHING)
    return Cell(f"[{number(low)}, {number(high)}]", low)


def waiting_cell(row: object) -> Cell:
    """Say which side waited more, and for which part of the time."""
    learner, actors = row.learner_waiting, row.actor_waiting
    if max(learner, actors) < 0.005:
        return Cell("neither", "neither")
    side = "learner" if learner >= actors else "actors"
    return Cell(f"{side} {max(learner, actors):.0%}", side)


def bits_cell(pairs: pd.DataFrame, system: str, env_id: str) -> Cell:
    """Say whether the settings of a system gave the same bits on an environment."""
    here = pairs[(pairs["system"] == system) & (pairs["env_id"] == env_id)]
    here = here[here["compared"] > 0]
    if here.empty:
        return Cell(NOTHING)
    same = sum(value is True for value in here["identical"])
    if same == len(here):
        return Cell("yes", "yes", "good")
    return Cell(f"no ({len(here) - same} of {len(here)} pairs)", "no", "bad")


def verdict_grid(verdicts: Sequence[Verdict]) -> Grid:
    """Return one row per system and two of its settings: whether they gave the same."""
    words = {
        True: ("same bits", "good"),
        False: ("different bits", "bad"),
        None: ("not compared", ""),
    }
    tones = {"identical": "good", "equivalent": "good", "different": "bad", "undecided": "note"}
    rows = [
        (
            Cell(one.system, one.system),
            Cell(" and ".join(sorted(one.settings, key=style.setting_order))),
            Cell(words[one.same][0], words[one.same][0], words[one.same][1]),
            Cell(f"{one.same_pairs} of {one.pairs}", one.same_pairs),
            Cell(f"{one.compared:,}", one.compared),
            Cell(one.difference or NOTHING),
            Cell(one.curves, one.curves, tones.get(one.curves, "")),
            *([Cell(one.note or NOTHING)] if any(each.note for each in verdicts) else []),
        )
        for one in verdicts
    ]
    columns = ("system", "settings", "bits", "pairs that agree", "fingerprints compared")
    numeric = frozenset(columns[3:])
    further = ("first difference", "learning curves", "note")
    return Grid((*columns, *further)[: len(rows[0]) if rows else None], numeric, rows)


def system_grid(entries: Sequence[Mapping]) -> Grid:
    """Return one row per setting and two systems: whether they have the same learning curves.

    Args:
      entries: of `analysis.reproducibility.system_verdicts`.
    """
    # Two systems that differ are nothing bad: that is what they are compared for.
    tones = {"equivalent": "good", "undecided": "note"}
    rows = []
    for entry in entries:
        verdict = entry["verdict"]
        outcomes = [entry.get(name) for name in ("final", "area")]
        rows.append(
            (
                Cell(entry["setting"], entry["setting"]),
                Cell(entry["system_a"], entry["system_a"]),
                Cell(entry["system_b"], entry["system_b"]),
                Cell(verdict, verdict, tones.get(verdict, "")),
                *(_difference_cell(outcome) for outcome in outcomes),
                numeric_cell(entry.get("p", math.nan), decimals=3),
                Cell(str(entry["environments"]), entry["environments"]),
                Cell(f"{entry['runs_a']} and {entry['runs_b']}" if "runs_a" in entry else NOTHING),
                *([Cell(entry["note"] or NOTHING)] if any(e["note"] for e in entries) else []),
            )
        )
    columns = ("setting", "system", "against", "learning curves")
    columns += ("final score: difference", "area: difference", "p", "environments", "runs", "note")
    return Grid(
        columns[: len(rows[0]) if rows else None],
        frozenset({*columns[4:8]}),
        rows,
    )


def _difference_cell(outcome: Mapping | None) -> Cell:
    """Write how much higher the second of two systems is, with its interval, both signed."""
    if outcome is None:
        return Cell(NOTHING)
    difference, low, high = (outcome[name] for name in ("difference", "low", "high"))
    text = signed(difference)
    if math.isfinite(low):
        text += f" [{signed(low)}, {signed(high)}]"
    return Cell(text, difference)


def signed(value: float) -> str:
    """Write a difference for reading: +12.34, -0.018."""
    text = number(abs(value), decimals=3 if abs(value) < 1 else None)
    return f"{'-' if value < 0 else '+'}{text}"


def pair_grid(pairs: pd.DataFrame) -> Grid:
    """Return one row per pair of runs that differ in the hardware setting alone."""
    rows = []
    for row in pairs.itertuples():
        verdict = {True: ("yes", "good"), False: ("no", "bad")}.get(
            row.identical, (NOTHING, "note")
        )
        first = "none" if row.identical else f"version {row.first_difference}"
        rows.append(
            (
                Cell(str(row.system), str(row.system)),
                Cell(str(row.env_id), str(row.env_id)),
                Cell(str(row.seed), row.seed),
                Cell(f"{row.setting_a} against {row.setting_b}"),
                Cell(verdict[0], verdict[0], verdict[1]),
                Cell(str(row.compared), row.compared),
                Cell(first if row.compared else NOTHING),
            )
        )
    columns = ("system", "environment", "seed", "settings", "same bits", "fingerprints")
    return Grid((*columns, "first difference"), frozenset({"seed", "fingerprints"}), rows)


def score_grid(scores: pd.DataFrame) -> Grid:
    """Return one row per system, setting and environment with the scores of all seeds."""
    rows = [
        (
            *names(row),
            numeric_cell(row.value),
            interval_cell(row.low, row.high),
            Cell(str(row.runs), row.runs, "note" if row.runs < FEW_RUNS else ""),
            Cell(", ".join(number(score) for score in row.each)),
        )
        for row in in_order(scores).itertuples()
    ]
    columns = ("mean", "95% interval", "seeds", "each seed")
    return Grid((*NAMES, *columns), frozenset(columns[:3]), rows)


def target_grid(targets: pd.DataFrame) -> Grid:
    """Return one row per system, setting and environment with when its runs reached the target."""
    rows = []
    for row in in_order(targets).itertuples():
        missed = row.reached < row.runs
        reached = Cell(
            f"{row.reached} of {row.runs}", row.reached / row.runs, "bad" if missed else ""
        )
        seconds = Cell(range_text(row.seconds), _sortable(min(row.seconds)))
        each = Cell(", ".join(number(step, 0) for step in row.steps), _sortable(min(row.steps)))
        rows.append((*names(row), numeric_cell(row.target), reached, each, seconds))
    columns = ("target", "seeds that reached it", "steps, each seed", "seconds")
    return Grid((*NAMES, *columns), frozenset(columns[:2]), rows)


def _sortable(value: float) -> float | str:
    return value if math.isfinite(value) else ""


def range_text(values: Sequence[float]) -> str:
    """Write the smallest and the largest of some numbers, such as `12 to 34`, without infinite ones."""
    finite = [value for value in values if math.isfinite(value)]
    texts = (
        list(dict.fromkeys(number(value, 0) for value in (min(finite), max(finite))))
        if finite
        else []
    )
    return " to ".join(texts) or NOTHING


def aggregate_grid(aggregates_: pd.DataFrame) -> Grid:
    """Return one row per system and setting with its normalised scores over all environments."""
    rows = []
    for (system, setting), group in aggregates_.groupby(["system", "setting"], sort=False):
        cells = [Cell(system, system), Cell(setting, setting)]
        for metric in METRICS:
            (row,) = group[group["metric"] == metric].itertuples()
            interval = interval_cell(row.low, row.high).text
            text = number(row.value) + (f" {interval}" if interval != NOTHING else "")
            cells.append(Cell(text, row.value))
        cells += [Cell(str(row.environments), row.environments), Cell(str(row.runs), row.runs)]
        rows.append(tuple(cells))
    columns = (*METRICS.values(), "environments", "runs")
    return Grid(("system", "setting", *columns), frozenset(columns), rows)


def aggregates_note(comparable: summaries.Comparable) -> str:
    """Say what is not in the scores over all environments, and why."""
    if comparable.environments:
        return (
            f"Without {', '.join(comparable.environments)}: not every system and setting has scores "
            "there."
        )
    if comparable.systems and comparable.tables is None:
        return "Nothing is compared over environments: no system and setting has scores on all of them."
    if comparable.systems:
        return f"Without {'; '.join(comparable.systems)}: no scores on some environments."
    return ""


def at_once_text(runs: pd.DataFrame) -> str:
    """Say how many runs shared the machine, on which their speeds depend."""
    count = summaries.at_once(runs)
    if count < 2:
        return "Runs were made one after another." if count else ""
    return f"Up to {count} runs were at work at once."


def speed_grid(speeds: pd.DataFrame) -> Grid:
    """Return one row per system, setting and environment with its speed."""
    rows = [
        (
            *names(row),
            numeric_cell(row.sps),
            Cell(f"{number(min(row.each))} to {number(max(row.each))}"),
            numeric_cell(row.sps_overall),
            numeric_cell(row.seconds),
            Cell(str(row.runs), row.runs),
        )
        for row in in_order(speeds).itertuples()
    ]
    columns = ("SPS", "over seeds", "SPS with compilation", "seconds", "seeds")
    return Grid((*NAMES, *columns), frozenset({*columns} - {"over seeds"}), rows)


def time_grid(times: pd.DataFrame) -> Grid:
    """Return one row per system, setting and environment with what both sides did."""
    shares = ["environment", "inference", "actor_waiting", "actor_other"]
    shares += ["training", "learner_waiting", "learner_other"]
    rows = [
        (*names(row), *(percent_cell(getattr(row, share)) for share in shares), waiting_cell(row))
        for row in in_order(times).itertuples()
    ]
    columns = tuple(
        f"{side}: {what}"
        for side, parts in (
            ("actors", ("environments", "inference", "waiting", "other")),
            ("learner", ("training", "waiting", "other")),
        )
        for what in parts
    )
    return Grid((*NAMES, *columns, "waited more"), frozenset(columns), rows)


def lag_grid(lags: pd.DataFrame, asynchrony: pd.DataFrame) -> Grid:
    """Return one row per system, setting and environment with its policy lag and gradient asynchrony."""
    late = {tuple(getattr(row, name) for name in GROUP): row for row in asynchrony.itertuples()}
    rows = []
    for row in in_order(summaries.lag_summary(lags)).itertuples():
        cells = [*names(row), numeric_cell(row.mean), numeric_cell(row.max)]
        if late:
            one = late.get(tuple(getattr(row, name) for name in GROUP))
            cells += [numeric_cell(getattr(one, what, math.nan)) for what in ("mean", "max")]
        rows.append((*cells, Cell(str(row.runs), row.runs)))
    gradients = ("mean gradient asynchrony", "largest") if late else ()
    columns = ("mean lag", "largest lag", *gradients, "seeds")
    return Grid((*NAMES, *columns), frozenset(columns), rows)


def change_grid(predicted: pd.DataFrame) -> Grid:
    """Return one row per system, setting and environment with its policy changes inside rollouts."""
    paper = any(value is not None for value in predicted["paper_text"])
    rows = [
        (
            *names(row),
            numeric_cell(row.measured),
            Cell(f"{number(row.low)} to {number(row.high)}", row.low),
            numeric_cell(row.by_actors),
            numeric_cell(row.by_time),
            Cell(str(row.runs), row.runs),
            *(
                (
                    Cell(row.paper_text or NOTHING),
                    numeric_cell(row.paper_logs if row.paper_text else math.nan),
                )
                if paper
                else ()
            ),
        )
        for row in in_order(predicted).itertuples()
    ]
    columns = (
        "changes per rollout",
        "over seeds",
        "actors / batch",
        "rollout / update time",
        "seeds",
    )
    columns += ("paper: text", "paper: logs") if paper else ()
    return Grid((*NAMES, *columns), frozenset(columns), rows)


def quality_grid(problems: Iterable[tuple[str, str]]) -> Grid:
    """Return one row per problem with the data."""
    rows = [(Cell(run, run), Cell(neutral(problem))) for run, problem in problems]
    return Grid(("run", "problem"), frozenset(), rows)


def run_grid(tables: Tables, out: Path) -> Grid:
    """Return one row per run, completed or not, with a link to its record.

    Args:
      tables: all runs.
      out: folder of the page, where links start from.
    """
    scores = final_scores(tables).set_index("run")["score"].to_dict()
    last_prints = last_fingerprints(tables)
    rows = []
    for row in in_order(tables.runs).itertuples():
        tone = "good" if row.completed else "bad"
        rows.append(
            (
                *names(row),
                Cell(str(row.seed), row.seed),
                Cell(str(row.status), str(row.status), tone),
                numeric_cell(row.steps, decimals=0),
                numeric_cell(scores.get(row.run, math.nan)),
                numeric_cell(row.sps),
                numeric_cell(row.seconds),
                Cell(last_prints.get(row.run, "")[:12] or NOTHING),
                Cell("record", link=record_link(Path(str(row.run)), out), more=command_text(row)),
            )
        )
    columns = ("seed", "status", "steps", "score", "SPS", "seconds", "last fingerprint", "record")
    return Grid((*NAMES, *columns), frozenset(columns) - {"status", *columns[6:]}, rows)


def last_fingerprints(tables: Tables) -> dict[str, str]:
    """Return the last fingerprint of each run that has one."""
    updates = tables.updates
    present = updates[updates["fingerprint"].map(lambda value: isinstance(value, str))]
    return present.groupby("run", observed=True)["fingerprint"].last().to_dict()


def command_text(row: object) -> str:
    """Return the command of a run as one line of text that names no place on a machine."""
    words = row.command if isinstance(row.command, list) else []
    return " ".join(neutral_path(str(word)) for word in words)


def neutral_path(word: str) -> str:
    """Return a word of a command line; of an absolute path, the part that is nobody's secret."""
    if not os.path.isabs(word):
        return neutral(word)
    here = os.path.relpath(word)
    return neutral(here) if not here.startswith("..") else f"…/{Path(word).name}"


def neutral(text: str) -> str:
    """Return a text of a record on one line, without names of users, hosts and folders."""
    return " ".join(_FOLDERS.sub("…/", record.redact_text(text)).split())


def record_link(run: Path, out: Path) -> str:
    """Return the address of a record relative to the page, or '' if both are not below here.

    A link that climbs out of the working directory would tell how the machine's folders are
    called, and lead nowhere on any other machine.
    """
    here = Path.cwd().resolve()
    target, start = (run / "run.json").resolve(), out.resolve()
    if not (target.is_relative_to(here) and start.is_relative_to(here)):
        return ""
    return quote(Path(os.path.relpath(target, start)).as_posix())


def figure_texts(found: Results, source: str) -> dict[str, FigureText]:
    """Return title and caption of each figure, with the number of seeds and the source."""
    band = "95% bootstrap bands over seeds"
    seeds = style.seeds_text(found.scores["runs"])
    texts = {
        "curves_steps": (
            "Learning curves against steps",
            f"Mean return of the last {EPISODES} episodes over seeds, {band}. Where two settings "
            "of a system gave the same data, the dashed line lies in the middle of the pale one.",
            found.steps,
        ),
        "curves_time": (
            "Learning curves against wall time",
            f"The same runs against seconds since the start, compilation included; {band}. A mean "
            "ends where its first run ends.",
            found.time,
        ),
        "aggregates": (
            "Normalised scores over all environments",
            "Median, interquartile mean, mean and optimality gap (lower is better) of the normalised final "
            "scores, each run at its own end, with 95% stratified bootstrap intervals.",
            found.aggregates,
        ),
        "efficiency": (
            "Normalised scores against steps and time",
            "Median over environments of the mean normalised score, 95% stratified bootstrap bands over "
            "seeds. A curve ends where its first run ends.",
            pd.concat(found.efficiency.values()) if found.efficiency else pd.DataFrame(),
        ),
        "final_scores": (
            "Final scores",
            f"Mean return of the last {EPISODES} episodes of training: mean over seeds with its "
            "95% bootstrap interval; dots are seeds.",
            found.scores,
        ),
        "speed": (
            "Speed",
            "Agent steps per second without the first updates, which compile: mean over seeds; "
            "dots are seeds.",
            found.speeds,
        ),
        "time_spent": (
            "Where the time went",
            "Shares of wall time, without the first updates. Upper bar: actors (mean over actor "
            "threads); lower bar: learner.",
            found.times,
        ),
        "policy_lag": (
            "Policy lag",
            "Share of rollouts by policy lag: the learner's version when it used the data, less "
            "the version that produced it. Right: mean.",
            found.lags,
        ),
        "policy_changes": (
            "Policy changes inside rollouts",
            "Share of rollouts by how often the policy changed while they were collected. Right: mean.",
            found.changes,
        ),
        "value_losses": (
            "Value loss",
            f"Value loss: mean over the updates between two points, then over seeds; {band}.",
            found.value_losses,
        ),
    }
    return {
        name: FigureText(name, title, f"{words} {_counts(frame, seeds)}; {source}.")
        for name, (title, words, frame) in texts.items()
        if len(frame)
    }


def _counts(frame: pd.DataFrame, seeds: str) -> str:
    """Say of how many seeds a figure is, and where it is over environments, of how many runs and of these."""
    if "env_id" in frame:
        return style.seeds_text(frame["runs"])
    counts = (
        seeds,
        style.counts_text(frame["environments"], "environments"),
        style.counts_text(frame["runs"]),
    )
    notes = "; ".join(note for note in frame.get("note", pd.Series(dtype=object)).unique() if note)
    return ", ".join(counts) + (f" ({notes})" if notes else "")


def summary_sentences(
    found: Results, total: int, done: int, problems: int, planned: int, changed: bool = False
) -> list[str]:
    """Return the report in a few sentences; `changed`: whether some runs are not the study's any more."""
    known = [one for one in found.verdicts if one.same is not None]
    sentences = []
    if known:
        systems = {one.system for one in known}
        same = systems - {one.system for one in known if not one.same}
        pairs = sum(one.pairs for one in known)
        compared = sum(one.compared for one in known)
        sentences.append(
            f"{len(same)} of {len(systems)} systems gave the same bits under different hardware "
            f"settings ({pairs} pairs of runs, {compared:,} fingerprints compared)."
        )
    missing = f" {planned} are planned." if planned and planned != total else ""
    by = " by a command of the study" if changed else ""
    sentences.append(f"{done} of {total} runs are completed{by}.{missing}")
    if len(found.targets):
        reached, asked = found.targets["reached"].sum(), found.targets["runs"].sum()
        sentences.append(f"{reached} of {asked} runs reached the return that the study asks for.")
    fewest, most = found.scores["runs"].min(), found.scores["runs"].max()
    if len(found.scores) and most == 1:
        sentences.append(
            "With 1 seed per result there are no intervals: nothing here says how much seeds differ."
        )
    elif len(found.scores) and fewest < FEW_RUNS:
        count = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        sentences.append(
            f"With {count} seeds per result the intervals are too narrow to be trusted as such: "
            "read them as the spread of the seeds."
        )
    count = (
        "No problem" if not problems else "1 problem" if problems == 1 else f"{problems} problems"
    )
    sentences.append(f"{count} with the data {'was' if problems < 2 else 'were'} found.")
    return sentences


def hardware_lines(runs: pd.DataFrame) -> list[str]:
    """Describe, once each, the hardware that the runs found, and under which settings where it differs."""
    lines: dict[str, list[str]] = {}
    for hardware, setting in zip(runs["hardware"], runs["setting"].astype(str), strict=True):
        if isinstance(hardware, Mapping):
            cores = hardware.get("cpu_affinity")
            parts = [str(hardware.get(name) or "") for name in ("platform", "device_kind")]
            if isinstance(cores, list):
                parts.append(f"{style.counts_text([len(cores)], 'CPU cores')} for a run")
            pool = hardware.get("xla_cpu_pool_size")
            parts += [f"XLA's CPU thread pool of size {pool}"] if pool else []
            settings = lines.setdefault(neutral(", ".join(part for part in parts if part)), [])
            settings += [setting] if setting not in settings else []
    lines.pop("", None)
    if len(lines) == 1:
        return list(lines)
    return [neutral(f"{line} ({', '.join(settings)})") for line, settings in lines.items()]


def distinct(runs: pd.DataFrame, name: str) -> list[str]:
    """Return the different values of a field of the runs, as text."""
    values: dict[str, None] = {}
    for value in runs[name]:
        if isinstance(value, Mapping):
            values[", ".join(f"{key} {item}" for key, item in value.items())] = None
        elif isinstance(value, str) and value:
            values[value] = None
    return [neutral_revision(value) if name == "revision" else neutral(value) for value in values]


def neutral_revision(text: str) -> str:
    """Return a git revision; forty hexadecimal digits are blanked elsewhere, as a token would be."""
    return " ".join(text.split())


def _by_group(frame: pd.DataFrame) -> dict[tuple, object]:
    return {tuple(getattr(row, name) for name in GROUP): row for row in frame.itertuples()}
