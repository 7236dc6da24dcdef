"""Caveats: what limits a page's findings, in sentences."""

from collections.abc import Sequence

from analysis.bootstrap import FEW_RUNS
from analysis.output import span


def caveats(
    completed: int,
    runs: int,
    planned: int,
    changed: bool,
    seeds: Sequence[int],
    problems: Sequence[tuple[str, str]],
    saved: Sequence[float] = (),
) -> tuple[str, ...]:
    """Return the completeness of the data, and the limits of their intervals.

    Args:
      completed: runs that were completed by a command of the study.
      runs: runs that have a record.
      planned: runs that the study plans; 0 if unknown.
      changed: whether some runs were completed by another command than the study's.
      seeds: number of seeds of each result.
      problems: with the data: pairs of a run or system and its problem.
      saved: seconds that the compilation cache saved, one per run that used it.
    """
    how = " by a command of the study" if changed else ""
    sentence = f"{completed} of {runs} runs are completed{how}"
    sentences = [
        f"{sentence}; {planned} are planned." if planned not in (0, runs) else f"{sentence}."
    ]
    if seeds and max(seeds) == 1:
        sentences.append("One seed per result: the spread over seeds is unknown.")
    elif seeds and min(seeds) < FEW_RUNS:
        few = [count for count in seeds if count < FEW_RUNS]
        noun = "seed is" if max(few) == 1 else "seeds are"
        which = "" if len(few) == len(seeds) else f" ({len(few)} of {len(seeds)} results)"
        sentences.append(
            f"{span(few)} {noun} too few for an interval on one environment{which}: "
            "figures show the single runs."
        )
    if saved:
        sentences.append(
            f"{len(saved)} of {completed} runs used the compilation cache, which saved at least "
            f"{span(saved, '.1f')} s per run."
        )
    if len(problems) == 1:
        ((where, what),) = problems
        sentences.append(f"1 problem with the data was found: {where}: {what}.")
    elif problems:
        sentences.append(f"{len(problems)} problems with the data were found.")
    return tuple(sentences)
