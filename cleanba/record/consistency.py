"""Contradictions inside a record: between its rows, its files and what the run was asked to do.

Checksums show that a file has changed since the run ended; whoever changes a record can compute them anew.
These checks find changes that were not made everywhere at once. What a consistent forger can do all the same
is listed in docs/audit.md.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec import UNSET

from cleanba.record.reader import Run
from cleanba.record.schema import FILE_OF_ROW, Episode, Rollout, Update

ROUNDED = 2e-3  # seconds by which sums of rounded times may differ
LOSS = 1e-4  # relative: losses are rounded
LARGEST_WEIGHT = 1e9  # of a part of the loss

# The names that programs give to systems: the program, and the hyperparameters that decide the name.
OWN_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "cleanba_ppo": ("cleanba_ppo", {"concurrency": True}),
    "cleanba_ppo-sync": ("cleanba_ppo", {"concurrency": False}),
    "cleanba_impala": ("cleanba_impala", {"concurrency": True}),
    "cleanba_impala-sync": ("cleanba_impala", {"concurrency": False}),
    # The original's arithmetic without its starts of games, which are no part of the algorithm.
    "cleanba_impala-original": (
        "cleanba_impala",
        {"concurrency": True, "compat": ["alignment", "mask", "gradient-scale", "seeds"]},
    ),
    "monobeast": ("monobeast_study", {}),
    "moolib": ("moolib_atari", {}),
    "cleanrl_ppo": ("cleanrl_ppo", {}),
    **{
        f"ppo_microrts_{strategy}": ("ppo_microrts", {"strategy": strategy})
        for strategy in ("masking", "naive", "removed")
    },
    **{
        f"ppo_microrts_penalty-{penalty:g}": (
            "ppo_microrts",
            {"strategy": "penalty", "invalid_penalty": penalty},
        )
        for penalty in (0.0, 0.01, 0.1, 1.0)
    },
    **{
        f"action_guidance_{strategy}{suffix}": (
            "action_guidance",
            {"strategy": strategy, "positive_learning": bool(suffix)},
        )
        for strategy in ("sparse", "shaped", "long", "short", "mixed")
        for suffix in ("", "-plo")
    },
    "hts_rl_a2c": ("hts_rl", {"algorithm": "a2c", "schedule": "hts"}),
    "hts_rl_a2c-sync": ("hts_rl", {"algorithm": "a2c", "schedule": "synchronous"}),
    "hts_rl_ppo": ("hts_rl", {"algorithm": "ppo", "schedule": "hts"}),
    "hts_rl_ppo-sync": ("hts_rl", {"algorithm": "ppo", "schedule": "synchronous"}),
}
SCHEMES = "schemes_"  # begins the names of the worker schemes, which end with agent and scheme


class Schedule(NamedTuple):
    """What the hyperparameters of a deterministic run determine of its rows."""

    num_steps: int
    num_envs: int
    num_collectors: int  # rows of each rollout; each covers an equal share of the environments
    lag: int  # of the acting policy, in updates: 0 or, from the second rollout on, 1

    @property
    def batch(self) -> int:
        """Steps of an update."""
        return self.num_steps * self.num_envs


def schedule_of(run: Run) -> Schedule | None:
    """Return the schedule of a run of Cleanba, CleanRL's PPO or HTS-RL; None for other systems."""
    options = run.info.hyperparameters
    steps, envs = options.get("num_steps"), options.get("num_envs")
    if run.info.program == "hts_rl":
        steps, collectors = options.get("sync_interval"), envs
        lags = options.get("schedule") == "hts"
    elif run.info.program == "cleanrl_ppo":
        collectors, lags = 1, False
    else:
        collectors, lags = options.get("num_env_groups"), options.get("concurrency")
    numbers = (steps, envs, collectors)
    if not isinstance(lags, bool) or not all(isinstance(n, int) and n > 0 for n in numbers):
        return None
    if envs % collectors:
        return None
    return Schedule(*numbers, int(lags))


def contradictions(
    run: Run,
    updates: Sequence[Update],
    rollouts: Sequence[Rollout],
    episodes: Sequence[Episode],
) -> list[str]:
    """Return what contradicts itself in a record, one line for each kind of contradiction.

    Args:
      run: the record.
      updates: its rows; those of each kind are given because callers have read them.
      rollouts: its rows.
      episodes: its rows.
    """
    schedule = schedule_of(run)
    found = [*_of_run(run), *_of_updates(run, updates), *_of_rollouts(updates, rollouts)]
    found += _of_episodes(run, updates, episodes)
    if schedule is not None:
        found += _of_schedule(schedule, updates, rollouts, episodes)
    return found


def _first(rows: Iterable[tuple[int, bool]], kind: type, what: str) -> Iterator[str]:
    """Yield a line that names the first of the rows that are wrong, if one is."""
    wrong = [number for number, is_wrong in rows if is_wrong]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        yield f"{FILE_OF_ROW[kind]}, line {wrong[0]}: {what}{more}"


def _collector(row: Rollout) -> tuple[int, int, int]:
    """Return the key of those rollouts that were collected one after the other."""
    group = -1 if row.group is None else row.group
    first = -1 if row.first_env is UNSET else row.first_env
    return row.actor, group, first


def own_name(system: str) -> tuple[str, dict[str, Any]] | None:
    """Return the program and the hyperparameters of a name that this toolkit gives; None for others."""
    return ("worker_schemes", {}) if system.startswith(SCHEMES) else OWN_NAMES.get(system)


def _of_run(run: Run) -> Iterator[str]:
    program, fixed = own_name(run.info.system) or (run.info.program, {})
    options = run.info.hyperparameters
    if run.info.program != program or any(options.get(k) != v for k, v in fixed.items()):
        yield "run.json: its system contradicts its program or its hyperparameters"
    for name in ("env_id", "seed"):
        value = getattr(run.info, name)
        if run.info.hyperparameters.get(name, value) != value:
            yield f"run.json: its {name} contradicts the hyperparameters"
    if run.files:
        for name in FILE_OF_ROW.values():
            if name not in run.files and (run.path / name).is_file():
                yield f"run.json has no checksum of {name}"


def _of_updates(run: Run, updates: Sequence[Update]) -> Iterator[str]:
    pairs = list(enumerate(itertools.pairwise(updates), start=2))

    def first(wrong: Any, what: str) -> Iterator[str]:
        return _first(((n, wrong(a, b)) for n, (a, b) in pairs), Update, what)

    yield from first(
        lambda a, b: b.version <= a.version, "its version does not follow the last one"
    )
    yield from first(lambda a, b: b.step < a.step, "its step is before that of the last update")
    yield from first(lambda a, b: b.wall_time < a.wall_time, "it is done before the last update")
    rows = list(enumerate(updates, start=1))
    yield from _first(
        ((n, u.gradient_version is not UNSET and u.gradient_version >= u.version) for n, u in rows),
        Update,
        "its gradient was computed at a later version",
    )
    options = run.info.hyperparameters
    weights = [options.get(name) for name in ("vf_coef", "ent_coef")]
    if all(isinstance(w, (int, float)) and abs(w) < LARGEST_WEIGHT for w in weights):
        yield from _first(
            ((n, _is_another_sum(u, *weights)) for n, u in rows),
            Update,
            "its loss is not the sum of its parts",
        )


def _is_another_sum(row: Update, vf_coef: float, ent_coef: float) -> bool:
    parts = (row.policy_loss, row.value_loss, row.entropy)
    # IMPALA's losses are sums over steps with another entropy; PPO's have an approximate KL divergence.
    if row.approx_kl is UNSET or row.loss is None or any(x is None or x is UNSET for x in parts):
        return False
    policy, value, entropy = parts
    expected = policy + vf_coef * value - ent_coef * entropy
    size = abs(policy) + abs(vf_coef * value) + abs(ent_coef * entropy)
    return abs(row.loss - expected) > LOSS * size + 1e-5


def _of_rollouts(updates: Sequence[Update], rollouts: Sequence[Rollout]) -> Iterator[str]:
    rows = list(enumerate(rollouts, start=1))
    checks: Sequence[tuple[Any, str]] = (
        (
            lambda r: (
                not r.versions
                or (r.versions[0][0], r.versions[-1][0]) != (r.version_first, r.version_last)
                or any(a[0] >= b[0] for a, b in itertools.pairwise(r.versions))
            ),
            "its versions contradict version_first and version_last, or each other",
        ),
        (lambda r: sum(n for _, n in r.versions) != r.steps, "its versions have other steps"),
        (lambda r: r.learner_version < r.version_last, "its policy is newer than the learner"),
    )
    for wrong, what in checks:
        yield from _first(((n, wrong(r)) for n, r in rows), Rollout, what)
    ordered = sorted(rows, key=lambda row: (*_collector(row[1]), row[1].rollout))
    yield from _first(
        (
            (
                n,
                _collector(a) == _collector(b)
                and (a.rollout == b.rollout or b.wall_time < a.wall_time),
            )
            for (_, a), (n, b) in itertools.pairwise(ordered)
        ),
        Rollout,
        "it does not follow the rollout of its actor before it",
    )
    # By the version that a gradient was computed for, when the last such gradient was applied: asynchronous
    # gradients are applied to later versions.
    applied = {u.version - 1: u.wall_time for u in updates}
    for u in updates:
        if u.gradient_version is not UNSET:
            applied[u.gradient_version] = max(u.wall_time, applied.get(u.gradient_version, 0.0))
    late = ((n, r.wall_time > applied.get(r.learner_version, math.inf) + ROUNDED) for n, r in rows)
    yield from _first(late, Rollout, "it was complete after the update that learned from it")


def _of_episodes(run: Run, updates: Sequence[Update], episodes: Sequence[Episode]) -> Iterator[str]:
    # There may be millions of episodes, so that these pass over them without a line of Python for each.
    lengths = list(map(attrgetter("length"), episodes))
    if 0 in lengths:
        empty = ((n, length == 0) for n, length in enumerate(lengths, start=1))
        yield from _first(empty, Episode, "it has no steps")
    steps = list(map(attrgetter("step"), episodes))
    if run.completed and updates and max(steps, default=0) > updates[-1].step:
        beyond = ((n, step > updates[-1].step) for n, step in enumerate(steps, start=1))
        yield from _first(beyond, Episode, "it ends after the run")


def _place(row: Rollout) -> int:
    """Return which part of a rollout's environments a row is about: that of its group, or of its actor."""
    return row.actor if row.group is None else row.group


def _of_schedule(
    schedule: Schedule,
    updates: Sequence[Update],
    rollouts: Sequence[Rollout],
    episodes: Sequence[Episode],
) -> Iterator[str]:
    yield from _first(
        (
            (n, (u.version, u.step) != (n + 1, n * schedule.batch))
            for n, u in enumerate(updates, start=1)
        ),
        Update,
        "its version and step are not those of its place",
    )
    times = [0.0, *(u.wall_time for u in updates)]
    yield from _first(
        (
            (n, abs(b - a - u.update_seconds) > ROUNDED)
            for n, (u, (a, b)) in enumerate(
                zip(updates, itertools.pairwise(times), strict=True), start=1
            )
        ),
        Update,
        "update_seconds is not the time since the last update",
    )
    collectors = schedule.num_collectors
    steps = schedule.batch // collectors

    def wrong(row: Rollout) -> bool:
        version = max(1, row.rollout - schedule.lag)
        expected = (row.rollout, version, version, steps)
        return expected != (row.learner_version, row.version_first, row.version_last, row.steps)

    yield from _first(
        ((n, wrong(r)) for n, r in enumerate(rollouts, start=1)),
        Rollout,
        "its versions are not those of the run's schedule",
    )
    seen = defaultdict(set)
    for row in rollouts:
        seen[row.rollout].add(_place(row))
    for number in range(1, len(updates) + 1):
        if len(seen[number]) != collectors or max(seen[number]) >= collectors:
            yield f"rollouts.jsonl: rollout {number} is not there once for each of its {collectors} parts"
            break
    done = {(r.rollout, _place(r)): r.wall_time for r in rollouts}
    size = schedule.num_envs // collectors
    yield from _first(
        ((n, e.env_index >= schedule.num_envs) for n, e in enumerate(episodes, start=1)),
        Episode,
        "there is no such environment",
    )

    def is_misplaced(episode: Episode) -> bool:
        number = -(-episode.step // schedule.batch)
        time = done.get((number, episode.env_index // size))
        if time is None:  # the run may have ended between writing the two
            return number <= len(updates)
        return abs(episode.wall_time - time) > ROUNDED

    yield from _first(
        ((n, is_misplaced(e)) for n, e in enumerate(episodes, start=1)),
        Episode,
        "its time is not that of the rollout in which it ended",
    )
