"""Where the wall time of actors and learners went."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from analysis.actors import actors_and_learners
from analysis.importers.records import SKIPPED_UPDATES
from analysis.selection import GROUP, run_folder_name
from analysis.tables import Tables

# Activity -> its column in the table of updates (seconds).
WORK = {
    "environment": "env_time",
    "inference": "inference_time",
    "for_parameters": "params_queue_get_time",
    "for_room": "rollout_queue_put_time",
    "training": "training_time",
    "learner_waiting": "rollout_queue_get_time",
}
ACTOR_WORK = ("environment", "inference", "for_parameters", "for_room")
LEARNER_WORK = ("training", "learner_waiting")
WAITING = ("for_parameters", "for_room", "learner_waiting")

# Tolerated excess of a side's times over the wall time, because the clock starts within a rollout.
OVERLAP = 0.05


def time_table(tables: Tables) -> pd.DataFrame:
    """Return the activities of actors and learner as shares of the wall time after the first updates.

    Runs whose records lack these times are left out.

    Returns:
      system, setting, env_id, runs, then means over runs: environment, inference, actor_waiting,
      actor_other (sum 1), training, learner_waiting, learner_other (sum 1).
    """
    rows = [(*one.key, *_both_sides(one.spent)) for one in _times_spent(tables)]
    sides = ["environment", "inference", "actor_waiting", "actor_other"]
    sides += ["training", "learner_waiting", "learner_other"]
    each = pd.DataFrame(rows, columns=[*GROUP, "run", *sides])
    groups = each.groupby(GROUP, sort=True)
    means = groups[sides].mean()
    means.insert(0, "runs", groups.size())
    return means.reset_index()


class _TimeSpent(NamedTuple):
    """The activities of one run.

    Attributes:
      key: system, setting, env_id and run.
      updates: number of updates measured.
      spent: activity of `WORK` -> share of the wall time of one actor or one learner thread.
    """

    key: tuple[str, ...]
    updates: int
    spent: dict[str, float]

    @property
    def actor(self) -> float:
        """Sum of the actor's shares."""
        return sum(self.spent[name] for name in ACTOR_WORK)

    @property
    def learner(self) -> float:
        """Sum of the learner thread's shares."""
        return sum(self.spent[name] for name in LEARNER_WORK)


def _times_spent(tables: Tables) -> Iterator[_TimeSpent]:
    """Yield the shares of each run after its first updates; records without times are skipped."""
    if not set(WORK.values()) <= set(tables.updates.columns):
        return
    hyperparameters = tables.runs.set_index("run")["hyperparameters"]
    concurrency = hyperparameters.map(actors_and_learners)
    for key, updates in tables.updates.groupby([*GROUP, "run"], observed=True, sort=True):
        clock = updates["wall_time"].to_numpy(float)
        steady = updates.iloc[SKIPPED_UPDATES:]
        if not len(steady) or steady[list(WORK.values())].isna().all().any():
            continue
        begin = clock[SKIPPED_UPDATES - 1]
        spent = {}
        for name, column in WORK.items():
            took = steady[column]
            if name in WAITING:  # may have begun earlier, such as before the learner started
                took = took.clip(upper=steady["wall_time"] - begin)
            spent[name] = took.sum() / (clock[-1] - begin)
        for name in ACTOR_WORK:
            spent[name] *= concurrency[key[-1]].rollouts_per_actor
        for name in LEARNER_WORK:
            spent[name] /= concurrency[key[-1]].learner_threads
        yield _TimeSpent(key, len(steady), spent)


def counted_twice(tables: Tables) -> list[tuple[str, str]]:
    """Return (run, problem) for runs whose activities sum to more than the wall time."""
    found = []
    for one in _times_spent(tables):
        # Up to two rollouts of the first counted update began before it.
        most = 1 + max(OVERLAP, 2 / one.updates)
        for side, share in (("actors", one.actor), ("learner", one.learner)):
            if share > most:
                what = f"times of the {side} add up to {share:.0%} of the wall time"
                found.append((run_folder_name(one.key[-1]), f"{what}: some of it is counted twice"))
    return found


def _both_sides(spent: Mapping[str, float]) -> tuple[float, ...]:
    """Return the shares of the actors' time, then those of the learner's; each part sums to 1.

    The remainder of an actor is mostly storing observations; that of a learner thread is mostly
    waiting for another learner thread.
    """
    waiting = spent["for_parameters"] + spent["for_room"]
    actor = (spent["environment"], spent["inference"], waiting)
    learner = (spent["training"], spent["learner_waiting"])
    return (*_with_rest(actor), *_with_rest(learner))


def _with_rest(parts: Sequence[float]) -> tuple[float, ...]:
    """Return shares and their remainder to 1; shares that exceed 1 in total are scaled down."""
    whole = max(1.0, sum(parts))
    return (*(part / whole for part in parts), max(0.0, 1 - sum(parts)))
