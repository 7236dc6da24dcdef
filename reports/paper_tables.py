"""Tables of the papers and of Cleanba's README: `python -m reports.paper_tables table1`.

Tables are made from run records; the README's run times also without records (`--source published`).

Table 1: which policy produced which data, and which data trained which policy, in the first iterations of
both architectures, according to the records.

Run times: the duration of a run on the README's 14 hardware settings, beside the README's values.

Invalid action masking and action guidance: tables 2 and 1 of their papers, with the papers' values.

HTS-RL's table 3 is left out: it needs up to three agents in one game, which EnvPool's football does not have.
"""

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import pandas as pd
import tyro

from analysis import fingerprints, scaling
from analysis.invalid_actions import masking_metrics
from analysis.output import bad_input
from analysis.scores import final_scores, hts_metrics
from analysis.tables import InputError, Tables
from cleanba.record import replace_file
from cleanba.run.command_line import BadInput, parse
from experiments.study import StudyError
from plots import style
from reports import paper
from reports.command import run_command
from reports.page import number

ITERATIONS = 5
ONE_DEVICE = scaling.README_RUN_TIMES[1]  # baseline of the other layouts
ARCHITECTURES = {True: "Synchronous architecture", False: "Cleanba's architecture"}


def composition(rollouts: pd.DataFrame, iterations: int) -> list[tuple[int, int]]:
    """Return the policy versions of the first rollouts of a run, and the learner's when it used them.

    Args:
      rollouts: rollouts of one run.
      iterations: number of rollouts.

    Returns:
      For each rollout, the version that collected it and the learner's version.

    Raises:
      InputError: if several versions collected one of them, as in neither architecture.
    """
    found = []
    for iteration in range(1, iterations + 1):
        one = rollouts[rollouts["rollout"] == iteration]
        versions = one[["version_first", "version_last", "learner_version"]].drop_duplicates()
        if one.empty:
            raise InputError(f"a run has only {iteration - 1} rollouts")
        first, last, learner = versions.to_numpy(int)[0]
        if len(versions) > 1 or first != last:
            raise InputError(f"rollout {iteration} was collected by several policies")
        found.append((int(first), int(learner)))
    return found


def table1(tables: Tables, iterations: int = ITERATIONS) -> list[str]:
    """Return the table, as lines of Markdown.

    Args:
      tables: completed runs; only those of the Cleanba trainers count.
      iterations: number of rows.

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
            raise InputError(f"{different[0]} and {first} differ in the policies of their rollouts")
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
            # in iteration i the learner computes version i + 1
            delay = rows[1][0] == 1  # the first policy also collected the second rollout
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
    """Return the run times of each layout, beside those of the README, as lines of Markdown.

    Args:
      tables: completed runs of the Cleanba trainers, whose settings are named after their layouts.

    Raises:
      InputError: if no run has a layout of the README.
    """
    done = tables.runs[tables.runs["completed"].astype(bool)]
    minutes = (done.groupby("setting", observed=True)["seconds"].mean() / 60).to_dict()
    prints = _last_fingerprints(tables)
    published = {row.layout for row in scaling.README_RUN_TIMES if row.layout}
    own = {setting: minutes[setting] for setting in minutes if setting in published}
    if not own:
        raise InputError("no completed run has a layout of the README")
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

    The hash covers the systems, environments and seeds that all settings with fingerprints have, so
    settings that give the same bits have the same digits. Settings without such runs have none.
    """
    found = fingerprints.last_fingerprints(tables)
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
    """Return HTS-RL's table 1: the score of each system at the time when the fastest system ended.

    The "final time metric": mean return of the last 100 training episodes before the time at which the first
    run on the same game ended; mean and standard deviation over seeds.
    """
    metrics = hts_metrics(tables, ())
    return _by_game_and_system(
        metrics, lambda group: _mean_and_deviation(group["final_time_metric"])
    )


FOOTBALL_TARGETS = (0.4, 0.8)  # scoring rates in table 2


def hts_table2(tables: Tables) -> list[str]:
    """Return HTS-RL's table 2: minutes until the scoring rate is 0.4 and 0.8.

    The "required time metric": until the mean return of the last 100 training episodes is that high; mean
    over seeds, or a dash if not every seed reached it.
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
            number(runs["sps"].mean(), 0),
            _mean_and_deviation(scores),
            str(len(runs)),
            prints.get(setting, ""),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


# Return, invalid actions (null, busy, owner), shares of the steps until solved and until the first reward.
MASKING_PAPER = {
    ("masking", "4x4"): "40.00 | – | 8.67% | 0.07%",
    ("masking", "10x10"): "40.00 | – | 11.13% | 0.05%",
    ("masking", "16x16"): "40.00 | – | 11.47% | 0.08%",
    ("naive", "4x4"): "59.61 | – | 11.74% | 0.07%",
    ("naive", "10x10"): "40.00 | – | 13.97% | 0.05%",
    ("naive", "16x16"): "40.00 | – | 30.59% | 0.10%",
    ("removed", "4x4"): "33.53 | 63.57 / 0.00 / 17.57 | 76.42% | –",
    ("removed", "10x10"): "25.93 | 128.76 / 0.00 / 7.75 | 94.15% | –",
    ("removed", "16x16"): "17.32 | 165.12 / 0.00 / 0.52 | – | –",
    ("penalty-0", "4x4"): "30.25 | 2.17 / 0.22 / 2.70 | 36.00% | 0.60%",
    ("penalty-0", "10x10"): "0.25 | 90.10 / 0.00 / 102.95 | – | 3.41%",
    ("penalty-0", "16x16"): "1.00 | 184.68 / 0.00 / 2.53 | – | 0.40%",
    ("penalty-0.01", "4x4"): "40.00 | 0.02 / 0.00 / 0.00 | 14.32% | 0.51%",
    ("penalty-0.01", "10x10"): "0.50 | 0.00 / 0.00 / 0.00 | – | 1.57%",
    ("penalty-0.01", "16x16"): "1.00 | 0.02 / 0.00 / 0.00 | – | 0.44%",
    ("penalty-0.1", "4x4"): "30.00 | 0.02 / 0.00 / 0.00 | 50.94% | 0.52%",
    ("penalty-0.1", "10x10"): "0.00 | 0.00 / 0.00 / 0.00 | – | 2.18%",
    ("penalty-0.1", "16x16"): "0.75 | 0.00 / 0.00 / 0.00 | – | 0.44%",
    ("penalty-1", "4x4"): "0.00 | 0.00 / 0.00 / 0.00 | – | 0.53%",
    ("penalty-1", "10x10"): "0.00 | 0.00 / 0.00 / 0.00 | – | 3.43%",
    ("penalty-1", "16x16"): "0.25 | 0.00 / 0.00 / 0.00 | – | 0.44%",
}


def masking_table2(tables: Tables) -> list[str]:
    """Return table 2 of the paper on invalid action masking: means over seeds, and the paper's values.

    As in the paper, a seed that has not solved the task counts as solved at the end of its run.
    """
    metrics = masking_metrics(tables)
    lines = [
        "| strategy | map | seeds | return | null / busy / owner | solved at | first reward by |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    groups = {name: group for name, group in metrics.groupby(["system", "env_id"], observed=True)}
    for (strategy, size), published in MASKING_PAPER.items():
        group = groups.get((f"ppo_microrts_{strategy}", f"MicrortsMining{size}F9-v0"))
        if group is None:
            continue
        kinds = " / ".join(f"{group[kind].mean():.2f}" for kind in ("null", "busy", "owner"))
        shares = [_mean_share(group["solve"], never=1.0), _mean_share(group["first"])]
        cells = [strategy, size, str(len(group)), f"{group['return'].mean():.2f}", kinds, *shares]
        lines += ["| " + " | ".join(cells) + " |", f"| – the paper | {size} | 4 | {published} |"]
    return lines


# Sparse returns in three tasks, mean and standard deviation over ten seeds.
GUIDANCE_TASKS = (
    "MicrortsAttackHRL-v1",
    "MicrortsProduceCombatUnitHRL-v1",
    "MicrortsRandomEnemyHRL3-v1",
)
GUIDANCE_PAPER = {
    "sparse": ("3.30 ± 5.04", "0.00 ± 0.01", "-0.07 ± 0.03"),
    "sparse-plo": ("0.00 ± 0.00", "0.00 ± 0.01", "-0.05 ± 0.03"),
    "shaped": ("10.00 ± 0.00", "9.57 ± 0.30", "0.08 ± 0.17"),
    "long": ("11.00 ± 0.00", "8.31 ± 2.62", "0.11 ± 0.35"),
    "long-plo": ("11.00 ± 0.01", "6.96 ± 4.04", "0.52 ± 0.35"),
    "mixed": ("11.00 ± 0.00", "9.67 ± 0.17", "0.40 ± 0.37"),
    "mixed-plo": ("10.67 ± 0.12", "9.36 ± 0.35", "0.30 ± 0.42"),
    "short": ("11.00 ± 0.01", "2.95 ± 4.48", "-0.06 ± 0.04"),
    "short-plo": ("11.00 ± 0.00", "9.48 ± 0.51", "-0.05 ± 0.03"),
}


def guidance_table1(tables: Tables) -> list[str]:
    """Return table 1 of the paper on action guidance: final sparse returns, and the paper's values.

    The return is the mean of the last 100 training episodes; mean and standard deviation over seeds.
    """
    scores = final_scores(tables)
    lines = [
        "| strategy | task | seeds | sparse return | the paper, 10 seeds and 10 million steps |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    groups = {name: group for name, group in scores.groupby(["system", "env_id"], observed=True)}
    for strategy, published in GUIDANCE_PAPER.items():
        for env_id, value in zip(GUIDANCE_TASKS, published, strict=True):
            group = groups.get((f"action_guidance_{strategy}", env_id))
            if group is not None:
                own = _mean_and_deviation(group["score"])
                lines.append(f"| {strategy} | {env_id} | {len(group)} | {own} | {value} |")
    return lines


def _mean_share(shares: pd.Series, never: float | None = None) -> str:
    """Return the mean of the shares, and how many are finite if not all; '–' if none is.

    Args:
      shares: infinite for what never happened.
      never: what infinite shares count as; None leaves them out.
    """
    finite = shares[shares < math.inf]
    if finite.empty:
        return "–"
    counted = finite if never is None else shares.replace(math.inf, never)
    text = f"{counted.mean():.2%}"
    return text if len(finite) == len(shares) else f"{text} ({len(finite)} of {len(shares)})"


class Table(NamedTuple):
    """A table that can be made.

    Attributes:
      title: of its page.
      study: the study whose records it is made from.
      lines: makes it from records.
      published: makes it from published data, if they suffice.
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
        "Table 5 of HTS-RL: synchronization interval", "hts_intervals", speeds_and_scores
    ),
    "guidance_table1": Table(
        "Table 1 of action guidance: sparse returns", "action_guidance", guidance_table1
    ),
    "masking_table2": Table(
        "Table 2 of invalid action masking: four strategies", "masking", masking_table2
    ),
}


@dataclass(frozen=True)
class Args:
    """Command line."""

    name: tyro.conf.Positional[Literal[tuple(TABLES)]]
    """Table to make."""
    source: Literal["runs", "published"] = "runs"
    """Source of the data."""
    runs: str = "runs"
    """Folder of all records."""
    preset: str = "cpu"
    """Size of the study."""
    out: str = "site/paper"
    """Folder for the table."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 2 for bad input."""
    try:
        options = parse(Args, sys.argv[1:] if argv is None else argv, "Make a table of a paper.")
        table = TABLES[options.name]
        suffix = "" if options.preset == "cpu" else f"_{options.preset}"
        if options.source == "published":
            if table.published is None:
                raise InputError(f"{options.name}: there are no published data to make it from")
            lines, words, suffix = table.published(), "the README of Cleanba", "_published"
        else:
            source = paper.read_runs(table.study, Path(options.runs), options.preset)
            lines, words = table.lines(source.tables), source.words
        page = Path(options.out) / f"{options.name}{suffix}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        replace_file(page, "\n".join([f"# {table.title}", "", *lines, "", f"From {words}.", ""]))
    except (BadInput, InputError, StudyError, OSError) as error:
        return bad_input(error)
    print("\n".join(lines))
    print(page)
    return 0


if __name__ == "__main__":
    run_command(main)
