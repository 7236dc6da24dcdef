"""The command: `python -m analysis aggregate|curves|lag|reproducibility|quality PATH...`.

Input that cannot be read ends it with one line on stderr and exit code 2.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis import bootstrap, curves, importers, lag, output, quality, reproducibility, summary
from analysis.importers import SOURCES
from analysis.references import NORMALIZATIONS
from analysis.scores import Rule, final_scores, hts_metrics
from analysis.tables import InputError, Tables

MOST_ACTORS = 40


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m analysis", description="What can honestly be said of runs."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("paths", nargs="+", metavar="PATH", help="runs, logs, or folders of them")
    shared.add_argument("--source", choices=SOURCES, default="auto", help="kind of log")
    shared.add_argument("--format", choices=output.FORMATS, default="table")
    shared.add_argument("--seed", type=int, default=0, help="of the bootstrap and permutations")
    shared.add_argument("--strict", action="store_true", help="refuse data with any problem")
    shared.add_argument("--normalization", choices=NORMALIZATIONS, default="human")

    aggregate = commands.add_parser("aggregate", parents=[shared], help="scores with intervals")
    aggregate.add_argument("--episodes", type=_positive, default=100, help="episodes per score")
    when = aggregate.add_mutually_exclusive_group()
    when.add_argument("--at-step", type=float, help="score at this step")
    when.add_argument("--at-time", type=float, help="score at this wall time (s)")
    aggregate.add_argument("--best", action="store_true", help="best mean of episodes in a row")
    aggregate.add_argument("--repetitions", type=_positive, default=bootstrap.REPETITIONS)
    aggregate.add_argument("--level", type=_level, default=bootstrap.LEVEL, help="of confidence")
    aggregate.add_argument("--method", choices=("percentile", "bca"), default="percentile")
    aggregate.add_argument("--profiles", action="store_true", help="performance profiles, too")
    aggregate.add_argument(
        "--targets", type=float, nargs="+", help="HTS-RL's metrics, with these scores to reach"
    )

    learning = commands.add_parser("curves", parents=[shared], help="learning curves with bands")
    learning.add_argument("--axis", choices=tuple(curves.AXES), default="step")
    learning.add_argument("--points", type=_positive, default=curves.POINTS)
    learning.add_argument("--episodes", type=_positive, default=100, help="episodes per point")
    learning.add_argument("--repetitions", type=_positive, default=2000)
    learning.add_argument("--level", type=_level, default=bootstrap.LEVEL, help="of confidence")

    commands.add_parser("lag", parents=[shared], help="policy lag")

    same = commands.add_parser("reproducibility", parents=[shared], help="verdicts on settings")
    same.add_argument("--axis", choices=tuple(curves.AXES), default="step")
    same.add_argument(
        "--margin", type=float, default=reproducibility.MARGIN, help="share that counts as equal"
    )
    same.add_argument("--alpha", type=_level, default=reproducibility.ALPHA)
    same.add_argument(
        "--between",
        choices=("settings", "systems"),
        default="settings",
        help="compare the settings of each system, or the systems under each setting",
    )

    commands.add_parser("quality", parents=[shared], help="what is wrong with the data")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"not a positive number: {text}")
    return value


def _level(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"not between 0 and 1: {text}")
    return value


def _aggregate(tables: Tables, args: argparse.Namespace) -> dict[str, Any]:
    rule = Rule(args.episodes, args.at_step, args.at_time, args.best)
    scores = final_scores(tables, rule, args.normalization)
    draws = {"level": args.level, "seed": args.seed}
    results: dict[str, Any] = {
        "aggregate": summary.aggregate(scores, args.repetitions, method=args.method, **draws)
    }
    if args.format == "table":
        notes = [{k: e[k] for k in ("system", "setting", "note")} for e in results["aggregate"]]
        results["aggregate"] = summary.aggregate_frame(results["aggregate"])
        results["notes"] = [note for note in notes if note["note"]]
    results["probability_of_improvement"] = summary.improvements(scores, **draws)
    results["run_times"] = summary.run_times(tables)
    if args.profiles:
        taus = np.round(np.linspace(0, 8, 81), 2)
        results["profiles"] = summary.profiles(scores, taus, **draws)
    if args.targets:
        results["hts_metrics"] = hts_metrics(tables, args.targets, args.at_time, args.episodes)
    return results


def _curves(tables: Tables, args: argparse.Namespace) -> dict[str, Any]:
    options = {
        "axis": args.axis,
        "points": args.points,
        "window": args.episodes,
        "repetitions": args.repetitions,
        "level": args.level,
        "seed": args.seed,
    }
    return {
        "curves": curves.curve_table(tables, **options),
        "aggregate_curves": curves.aggregate_curve_table(
            tables, normalization=args.normalization, **options
        ),
    }


def _lag(tables: Tables, args: argparse.Namespace) -> dict[str, Any]:
    if tables.rollouts.empty:
        raise InputError(f"{args.paths[0]}: no rollouts recorded, so nothing to say of policy lag")
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
        del results["by_actor"]  # too long to look at; JSON has it
    return results


def _reproducibility(tables: Tables, args: argparse.Namespace) -> dict[str, Any]:
    options = (args.axis, args.margin, args.alpha)
    if args.between == "systems":
        found = reproducibility.system_verdicts(tables, *options, seed=args.seed)
        if not found:
            raise InputError(f"{args.paths[0]}: no hardware setting with two or more systems here")
        return {"reproducibility": found}
    found = reproducibility.verdicts(tables, *options, seed=args.seed)
    if not found:
        raise InputError(f"{args.paths[0]}: no system with two or more hardware settings here")
    return {
        "reproducibility": found,
        "fingerprints": reproducibility.fingerprint_table(tables),
        "variation": reproducibility.variation(final_scores(tables)),
    }


_COMMANDS = {
    "aggregate": _aggregate,
    "curves": _curves,
    "lag": _lag,
    "reproducibility": _reproducibility,
    "quality": lambda tables, args: {},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    try:
        tables = importers.read(args.paths, args.source)
        problems = quality.check(tables, args.normalization)
        if args.strict:
            quality.refuse(problems)
        results = _COMMANDS[args.command](tables, args)
    except InputError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    results["quality"] = problems
    try:
        print(output.render(results, args.format), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if args.format == "csv" and args.command != "quality" and len(problems):
        print(output.render({"quality": problems}, "table"), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
