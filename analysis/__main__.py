"""The command: `python -m analysis aggregate|curves|lag|reproducibility|quality PATH...`.

Unreadable input gives one line on stderr and exit code 2.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from analysis import (
    bootstrap,
    fingerprints,
    importers,
    lag,
    learning_curves,
    output,
    quality,
    reproducibility,
    selection,
    summary,
    variation,
)
from analysis.importers import SOURCES
from analysis.references import NORMALIZATIONS
from analysis.scores import Rule, final_scores, hts_metrics
from analysis.tables import InputError, Tables

MOST_ACTORS = 40


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and exit with code 2."""
        self.exit(2, f"error: {message}\n")


def _whole(smallest: int, largest: int) -> Callable[[str], int]:
    """Return a parser of whole numbers in a range."""

    def parse(text: str) -> int:
        value = int(text) if text.lstrip("+-").isdecimal() and len(text) < 30 else None
        if value is None or not smallest <= value <= largest:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {smallest} to {largest}"
            )
        return value

    return parse


def _between(low: float, high: float) -> Callable[[str], float]:
    """Return a parser of numbers between two others, which are excluded."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low < value < high:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number between {low:g} and {high:g}"
            )
        return value

    return parse


_EPISODES = _whole(1, 10**9)
_REPETITIONS = _whole(1, 1_000_000)
_LEVEL = _between(0, 1)
_AT = _between(-1, 2**53)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m analysis", description="Compute statistics of runs and logs.")
    commands = parser.add_subparsers(dest="command", required=True)
    shared = _Parser(add_help=False)
    shared.add_argument("paths", nargs="+", metavar="PATH", help="runs, logs, or folders of them")
    shared.add_argument("--source", choices=SOURCES, default="auto", help="kind of log")
    shared.add_argument("--format", choices=output.FORMATS, default="table")
    shared.add_argument("--strict", action="store_true", help="fail if the data have any problem")
    shared.add_argument("--normalization", choices=NORMALIZATIONS, default="human")
    scored = _Parser(add_help=False, parents=[shared])
    scored.add_argument(
        "--seed", type=_whole(0, 2**53), default=0, help="seed of bootstrap and permutations"
    )
    scored.add_argument(
        "--include-incomplete", action="store_true", help="keep runs that did not complete"
    )

    aggregate = commands.add_parser("aggregate", parents=[scored], help="scores with intervals")
    aggregate.add_argument("--episodes", type=_EPISODES, default=100, help="episodes per score")
    when = aggregate.add_mutually_exclusive_group()
    when.add_argument("--at-step", type=_AT, help="score at this step")
    when.add_argument("--at-time", type=_AT, help="score at this wall time (s)")
    aggregate.add_argument("--best", action="store_true", help="best consecutive episodes")
    aggregate.add_argument("--repetitions", type=_REPETITIONS, default=bootstrap.REPETITIONS)
    aggregate.add_argument("--level", type=_LEVEL, default=bootstrap.LEVEL, help="confidence level")
    aggregate.add_argument("--method", choices=("percentile", "bca"), default="percentile")
    aggregate.add_argument("--profiles", action="store_true", help="also performance profiles")
    aggregate.add_argument(
        "--targets",
        type=_between(-1e300, 1e300),
        nargs="+",
        help="HTS-RL's metrics, with these target scores",
    )

    learning = commands.add_parser("curves", parents=[scored], help="learning curves with bands")
    learning.add_argument("--points", type=_whole(1, 100_000), default=learning_curves.POINTS)
    learning.add_argument("--episodes", type=_EPISODES, default=100, help="episodes per point")
    learning.add_argument("--repetitions", type=_REPETITIONS, default=2000)
    learning.add_argument("--level", type=_LEVEL, default=bootstrap.LEVEL, help="confidence level")

    commands.add_parser("lag", parents=[shared], help="policy lag")

    same = commands.add_parser("reproducibility", parents=[scored], help="verdicts on settings")
    same.add_argument("--axis", choices=tuple(learning_curves.AXES), default="step")
    same.add_argument(
        "--margin",
        type=_between(0, 10),
        default=reproducibility.MARGIN,
        help="share that counts as equal",
    )
    same.add_argument("--alpha", type=_LEVEL, default=reproducibility.ALPHA)
    same.add_argument(
        "--between",
        choices=("settings", "systems"),
        default="settings",
        help="compare the settings of each system, or the systems under each setting",
    )
    same.add_argument(
        "--long", action="store_true", help="all columns, and a row per environment and outcome"
    )

    commands.add_parser("quality", parents=[shared], help="problems with the data")
    return parser


def _aggregate(tables: Tables, args: argparse.Namespace) -> dict[str, Any]:
    rule = Rule(args.episodes, args.at_step, args.at_time, args.best)
    if len(tables.scores) and rule != Rule():
        what = "--episodes, --at-step, --at-time and --best do not apply to score tables"
        print(f"{what}: {len(tables.scores)} scores are as published", file=sys.stderr)
    scores, shared = selection.over_shared(final_scores(tables, rule, args.normalization))
    draws = {"level": args.level, "seed": args.seed}
    results: dict[str, Any] = {
        "aggregate": summary.aggregate(
            scores, args.repetitions, method=args.method, window=args.episodes, **draws
        )
    }
    if args.format in output.FOR_READING:
        notes = [{k: e[k] for k in ("system", "setting", "note")} for e in results["aggregate"]]
        results["aggregate"] = summary.aggregate_frame(results["aggregate"]).drop(columns="note")
        results["notes"] = [note for note in notes if note["note"]]
    results["probability_of_improvement"] = summary.improvements(scores, args.repetitions, **draws)
    timed = shared.environments or selection.environments(tables)
    results["run_times"] = summary.run_times(selection.on_environments(tables, timed))
    if args.profiles:
        taus = np.round(np.linspace(0, 8, 81), 2)
        results["profiles"] = summary.profiles(scores, taus, args.repetitions, **draws)
    if args.targets:
        results["hts_metrics"] = hts_metrics(tables, args.targets, args.at_time, args.episodes)
    return _with_shared(results, shared, args.format)


def _with_shared(results: dict[str, Any], shared: selection.Shared, form: str) -> dict[str, Any]:
    """Return results with the environments that their rows are over, above the first table."""
    if form in output.FOR_READING:
        return {"environments": shared.sentence()} | results
    return results | {"environments": shared._asdict()}


def _curves(tables: Tables, args: argparse.Namespace) -> dict[str, Any]:
    if tables.curves.empty:
        raise InputError(f"{args.paths[0]}: no learning curves, only scores")
    grid = {"points": args.points, "window": args.episodes}
    draws = {"repetitions": args.repetitions, "level": args.level, "seed": args.seed}
    measured = learning_curves.run_curves(tables, **grid)
    shared = selection.shared_environments(final_scores(tables, normalization=args.normalization))
    over = learning_curves.run_curves(
        selection.on_environments(tables, shared.environments), **grid
    )
    results = {
        "curves": learning_curves.curve_table(measured, **draws),
        "aggregate_curves": learning_curves.aggregate_curve_table(
            learning_curves.normalized(over, args.normalization), **draws
        ),
    }
    return _with_shared(results, shared, args.format)


def _lag(tables: Tables, args: argparse.Namespace) -> dict[str, Any]:
    if tables.rollouts.empty:
        raise InputError(f"{args.paths[0]}: no rollouts are recorded, so there is no policy lag")
    results: dict[str, Any] = {
        "lag": lag.lag_summary(tables),
        "predictions": lag.predictions(tables),
        "changes_distribution": lag.lag_distribution(tables, "changes"),
        "lag_distribution": lag.lag_distribution(tables, "lag"),
        "over_time": lag.lag_over_time(tables, bins=10),
        "by_actor": lag.lag_by_actor(tables),
    }
    if args.format == "json":
        results["version_shares"] = lag.all_version_shares(tables)
    elif len(results["by_actor"]) > MOST_ACTORS:
        print(
            f"by_actor: {len(results.pop('by_actor'))} rows, only in --format json", file=sys.stderr
        )
    return results


def _reproducibility(tables: Tables, args: argparse.Namespace) -> dict[str, Any]:
    options = (args.axis, args.margin, args.alpha)
    if args.between == "systems":
        found = reproducibility.system_verdicts(
            tables, *options, seed=args.seed, normalization=args.normalization
        )
        if not found:
            raise InputError(f"{args.paths[0]}: no hardware setting has two or more systems")
        further = {}
    else:
        found = reproducibility.verdicts(
            tables, *options, seed=args.seed, normalization=args.normalization
        )
        if not found:
            raise InputError(f"{args.paths[0]}: no system has two or more hardware settings")
        further = {"variation": variation.variation(final_scores(tables), seed=args.seed)}
    if args.format in output.FOR_READING and not args.long:
        return _short(found) | further
    if args.between == "settings":
        further = {"fingerprints": fingerprints.pairs(tables)} | further
    return _with_environments(found) | further


def _short(entries: Sequence[dict]) -> dict[str, Any]:
    """Return verdicts in few columns, and their notes."""
    rows, notes = [], []
    for entry in entries:
        names = {k: v for k, v in entry.items() if k.startswith(("system", "setting"))}
        row = names | {
            k: entry.get(k) for k in ("verdict", "p_equivalent", "p_different", "drivers")
        }
        if "fingerprints" in entry:
            prints = entry["fingerprints"]
            row["bits"] = (
                f"{prints['identical']} of {prints['expected']}" if prints["pairs"] else None
            )
        row["runs"] = f"{entry['runs_a']}, {entry['runs_b']}" if "runs_a" in entry else None
        rows.append(row | {"more_seeds": entry.get("more_seeds")})
        if entry["note"]:
            notes.append(names | {"note": entry["note"]})
    return {"reproducibility": rows, "notes": notes}


def _with_environments(entries: Sequence[dict]) -> dict[str, Any]:
    """Return verdicts, and the rows by environment that they rest on as a table of their own."""
    names = ("system", "system_a", "system_b", "setting", "setting_a", "setting_b")
    rows = [
        {name: entry[name] for name in names if name in entry} | row
        for entry in entries
        for row in entry["by_environment"]
    ]
    verdicts = [{k: v for k, v in entry.items() if k != "by_environment"} for entry in entries]
    return {"reproducibility": verdicts, "by_environment": rows}


_COMMANDS = {
    "aggregate": _aggregate,
    "curves": _curves,
    "lag": _lag,
    "reproducibility": _reproducibility,
    "quality": lambda tables, args: {},
}
_OF_COMPLETED = ("aggregate", "curves", "reproducibility")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    try:
        read = importers.read_readable if args.command == "quality" else importers.read
        tables = read(args.paths, args.source)
        problems = quality.check(tables, args.normalization)
        if args.command in _OF_COMPLETED and not args.include_incomplete:
            tables, problems = quality.without_incomplete(tables, problems, args.paths[0])
        if args.strict:
            quality.refuse(problems)
        results = _COMMANDS[args.command](tables, args)
    except (InputError, OSError) as error:
        return output.bad_input(error)
    except quality.Refused as refused:
        print(" ".join(str(refused).split()), file=sys.stderr)
        return 1
    results["quality"] = problems
    try:
        print(output.render(results, args.format), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    alone = args.format not in ("table", "json")  # one table is printed
    if alone and args.command != "quality" and len(problems):
        print(output.render({"quality": problems}, "table"), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
