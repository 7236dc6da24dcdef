"""The tables behind the figures and pages of a report, from the tables that were read.

Everything here takes completed runs only; `problems` names what was left out and why.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import aggregates, bootstrap, quality, reproducibility
from analysis.curves import aggregate_curve_table, curve_table, update_curve_table
from analysis.importers.records import SKIPPED_UPDATES
from analysis.lag import PAPER_CHANGES, gradient_asynchrony, lag_distribution, predictions
from analysis.references import ATARI, game_name
from analysis.scores import final_scores, hts_metrics
from analysis.summary import aggregate, aggregate_frame
from analysis.tables import Tables
from plots import style

GROUP = ["system", "setting", "env_id"]

# What each side's time is made of, as columns of the updates table.
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

# By how much the times of a side may be more than the wall time, which begins in the middle of a rollout.
OVERLAP = 0.05


class Verdict(NamedTuple):
    """Whether two hardware settings of a system gave the same.

    Attributes:
      system: the system.
      settings: the two.
      same: whether they gave the same bits; None where there was nothing to compare.
      pairs: pairs of runs that differ in the setting alone.
      same_pairs: of these, how many agree in every fingerprint.
      compared: fingerprints compared, over all pairs.
      difference: the first difference in words; '' if there is none.
      curves: what the learning curves say: identical, equivalent, different or undecided.
      note: what to know about that.
    """

    system: str
    settings: tuple[str, str]
    same: bool | None
    pairs: int
    same_pairs: int
    compared: int
    difference: str
    curves: str
    note: str


def completed(tables: Tables, without: Collection[str] = ()) -> Tables:
    """Return the tables of the runs that reached their end, but for those of some names."""
    runs = tables.runs["run"][tables.runs["completed"].to_numpy(bool)]
    return of_runs(tables, [run for run in runs if _name(run) not in without])


def of_runs(tables: Tables, names: Iterable[str]) -> Tables:
    """Return the tables of some runs."""
    wanted = set(names)
    frames = {
        name: frame[frame["run"].isin(wanted)].reset_index(drop=True)
        for name, frame in zip(Tables._fields, tables, strict=True)
    }
    return Tables(**frames)


def without(tables: Tables, env_ids: Collection[str], systems: Collection[str]) -> Tables:
    """Return tables without some environments and systems, these as `Comparable` names them."""
    frames = {}
    for name, frame in zip(Tables._fields, tables, strict=True):
        if "env_id" in frame:
            who = frame["system"].astype(str) + ", " + frame["setting"].astype(str)
            frame = frame[~(frame["env_id"].isin(list(env_ids)) | who.isin(list(systems)))]
        frames[name] = frame.reset_index(drop=True)
    return Tables(**frames)


def environments(tables: Tables) -> list[str]:
    """Return the environments of the runs, sorted."""
    return sorted(tables.runs["env_id"].astype(str).unique())


class Comparable(NamedTuple):
    """What scores over environments are taken of.

    Attributes:
      tables: of these runs; None where no two environments are left to take scores over.
      environments: that are left out, sorted.
      systems: that are left out, as "system, setting", sorted.
    """

    tables: Tables | None
    environments: list[str]
    systems: list[str]


def comparable(tables: Tables) -> Comparable:
    """Return the runs that scores over environments can be compared of.

    Such a score says nothing of two systems that have it of different environments. So either the
    environments are left out on which somebody has no normalised score, or those who lack any:
    whichever leaves more.

    Args:
      tables: completed runs.
    """
    scores = final_scores(tables).dropna(subset=["normalized"])
    if scores.empty:
        return Comparable(None, [], [])
    who = scores["system"].astype(str) + ", " + scores["setting"].astype(str)
    have = scores["env_id"].astype(str).groupby(who).agg(set)
    every, shared = set.union(*have), set.intersection(*have)
    whole = set(have.index[have == every])
    if len(shared) > 1 and len(shared) * len(have) >= len(every) * len(whole):
        kept = scores["env_id"].isin(shared)
        environments, systems = sorted(every - shared), []
    else:
        kept = who.isin(whole)
        environments, systems = [], sorted(set(have.index) - whole)
    several = scores["env_id"][kept].nunique() > 1
    return Comparable(
        of_runs(tables, scores["run"][kept]) if several else None, environments, systems
    )


def learning_curves(tables: Tables, axis: str) -> pd.DataFrame:
    """Return `analysis.curves.curve_table`, each environment on a grid of its own."""
    runs = tables.runs
    # what curves are not made of would cost seconds to sort out by environment
    needed = tables._replace(updates=tables.updates.head(0), rollouts=tables.rollouts.head(0))
    frames = [
        curve_table(of_runs(needed, runs["run"][runs["env_id"] == env_id]), axis)
        for env_id in environments(tables)
    ]
    return pd.concat(frames, ignore_index=True)


def score_table(tables: Tables) -> pd.DataFrame:
    """Return the mean final score of each system, setting and environment, with its interval.

    Returns:
      system, setting, env_id, value, low, high (NaN with one run), runs, each (scores of the runs).
    """
    rows = []
    scores = final_scores(tables)
    for key, group in scores[scores["score"].notna()].groupby(GROUP, observed=True, sort=True):
        each = group["score"].to_numpy(float)
        interval = bootstrap.interval(_mean_of(each), [len(each)])
        rows.append((*key, *interval, len(each), tuple(each)))
    return pd.DataFrame(rows, columns=[*GROUP, "value", "low", "high", "runs", "each"])


def target_table(tables: Tables, targets: Mapping[str, float], episodes: int) -> pd.DataFrame:
    """Return when the runs of each system, setting and environment reached the return that was asked for.

    Args:
      tables: completed runs.
      targets: mean return of so many episodes, by environment.
      episodes: number of them.

    Returns:
      system, setting, env_id, target, runs, reached (runs that did), steps, seconds (of the runs,
      infinite where a run did not).
    """
    rows = []
    for env_id, target in targets.items():
        runs = tables.runs["run"][tables.runs["env_id"] == env_id]
        found = hts_metrics(of_runs(tables, runs), [target], window=episodes)
        for key, group in found.groupby(GROUP, observed=True, sort=True):
            steps = group[f"required_step_{target:g}"].to_numpy(float)
            seconds = group[f"required_time_{target:g}"].to_numpy(float)
            reached = int(np.isfinite(steps).sum())
            rows.append((*key, target, len(group), reached, tuple(steps), tuple(seconds)))
    return pd.DataFrame(rows, columns=[*GROUP, "target", "runs", "reached", "steps", "seconds"])


def at_once(runs: pd.DataFrame) -> int:
    """Return how many runs were at work at once, at most, by when they started and ended.

    Args:
      runs: of `analysis.tables.Tables`; rows without these times do not count.
    """
    known = [
        (start, end)
        for start, end in zip(runs["started"], runs["ended"], strict=True)
        if isinstance(start, str) and isinstance(end, str)
    ]
    # a run that ends in the second in which another starts is not at work beside it
    moments = sorted([(end, -1) for _, end in known] + [(start, 1) for start, _ in known])
    most = max(itertools.accumulate(change for _, change in moments), default=0)
    return max(most, 1) if known else 0


def aggregate_table(tables: Tables | None) -> pd.DataFrame:
    """Return `analysis.summary.aggregate_frame` of the final scores, of environments with a reference.

    Args:
      tables: completed runs; None for an empty table.

    Returns:
      Its columns, and `note`: what a reader must know of the row.
    """
    columns = [
        "system",
        "setting",
        "metric",
        "value",
        "low",
        "high",
        "runs",
        "environments",
        "note",
    ]
    entries = [] if tables is None else aggregate(final_scores(tables))
    if not entries:
        return pd.DataFrame(columns=columns)
    frame = aggregate_frame(entries)
    notes = {(entry["system"], entry["setting"]): entry["note"] for entry in entries}
    keys = zip(frame["system"], frame["setting"], strict=True)
    frame["note"] = [notes[key] for key in keys]
    return frame[frame["value"].notna()].reset_index(drop=True)


def score_name(tables: Tables) -> str:
    """Return what a normalised score is called: against humans on Atari, else what counts as solved."""
    names = set(environments(tables)) | set(tables.scores["env_id"])
    atari = all(game_name(env_id) in ATARI for env_id in names)
    return "human-normalized score" if atari else "normalised score"


def efficiency(
    tables: Tables | None, metrics: Sequence[str] = ("median",)
) -> dict[tuple[str, str], pd.DataFrame]:
    """Return `analysis.curves.aggregate_curve_table`, by metric and axis, where it has anything."""
    curves = {}
    if tables is None:
        return curves
    for axis in ("step", "time"):
        table = aggregate_curve_table(tables, axis, metrics=metrics)
        for metric in metrics:
            one = table[table["metric"] == metric] if len(table) else table
            if len(one):
                curves[metric, axis] = one
    return curves


def _mean_of(scores: np.ndarray) -> Callable[[np.ndarray | None], np.ndarray]:
    return lambda counts: aggregates.mean([scores], counts)


def speed_table(tables: Tables) -> pd.DataFrame:
    """Return the speed of each system, setting and environment, after compilation and with it.

    Returns:
      system, setting, env_id, sps (mean over runs, without the first updates, which compile),
      sps_overall, seconds (means), runs, each (sps of the runs).
    """
    rows = []
    for key, group in tables.runs.groupby(GROUP, observed=True, sort=True):
        each = tuple(group["sps"].dropna())
        means = [group[name].mean() for name in ("sps", "sps_overall", "seconds")]
        rows.append((*key, *means, len(each), each))
    columns = [*GROUP, "sps", "sps_overall", "seconds", "runs", "each"]
    return pd.DataFrame(rows, columns=columns).query("runs > 0").reset_index(drop=True)


def _mapping(value: object) -> Mapping:
    return value if isinstance(value, Mapping) else {}


def num_devices(hardware: object) -> float:
    """Return the number of devices of a run, in all its processes; NaN where its record does not say."""
    if not isinstance(hardware, Mapping):
        return np.nan
    ids = [hardware.get(name) for name in ("actor_device_ids", "learner_device_ids")]
    if not all(isinstance(one, list) for one in ids):
        return np.nan
    return len({*ids[0], *ids[1]}) * (hardware.get("num_processes") or 1)


def speed_by(tables: Tables, x: pd.Series) -> pd.DataFrame:
    """Return the speed of each system and environment by something that changes it.

    Args:
      tables: completed runs.
      x: of each row of `tables.runs`; rows without one are left out.

    Returns:
      system, env_id, x, sps (mean over runs, without the first updates, which compile), runs, each (sps
      of the runs).
    """
    runs = tables.runs.assign(x=x).dropna(subset=["x", "sps"])
    names = ["system", "env_id", "x"]
    rows = [
        (*key, group["sps"].mean(), len(group), tuple(group["sps"]))
        for key, group in runs.groupby(names, observed=True)
    ]
    return pd.DataFrame(rows, columns=[*names, "sps", "runs", "each"])


def speed_by_devices(tables: Tables) -> pd.DataFrame:
    """Return `speed_by` the number of devices, with what as many of the fewest would make (`ideal`)."""
    frame = speed_by(tables, tables.runs["hardware"].map(num_devices))
    first = frame.groupby(["system", "env_id"], observed=True)[["x", "sps"]].transform("first")
    frame["ideal"] = first["sps"] * frame["x"] / first["x"]
    shares = frame["sps"] / frame["ideal"]
    frame["note"] = [
        f"{style.short_number(sps)}\n{share:.0%}"
        for sps, share in zip(frame["sps"], shares, strict=True)
    ]
    return frame


def speed_by_option(tables: Tables, name: str) -> pd.DataFrame:
    """Return `speed_by` an option of the runs; notes say how much faster than its baseline a system is.

    Args:
      tables: completed runs; the baseline of a system is called as it is, and `-sync`.
      name: of a hyperparameter, or of a field of the hardware; runs in which it is 0 are left out.
    """
    values = [
        {**_mapping(row.hardware), **_mapping(row.hyperparameters)}.get(name)
        for row in tables.runs.itertuples()
    ]
    values = pd.to_numeric(pd.Series(values, index=tables.runs.index, dtype=object))
    frame = speed_by(tables, values.where(values > 0))
    baseline = _baselines(frame)
    frame["note"] = [
        f"{row.sps / baseline[key]:.2f}×"
        if (key := (str(row.system), row.env_id, row.x)) in baseline
        else style.short_number(row.sps)
        for row in frame.itertuples()
    ]
    return frame


def speedups(speeds: pd.DataFrame) -> pd.DataFrame:
    """Return how many times as fast as its baseline each system is.

    Args:
      speeds: of `speed_by_option`.

    Returns:
      The rows of systems that have a baseline, with ratios to its mean speed for `sps` and `each`.
    """
    baseline = _baselines(speeds)
    rows = [
        row._replace(sps=row.sps / base, each=tuple(one / base for one in row.each))
        for row in speeds.itertuples(index=False)
        if (base := baseline.get((str(row.system), row.env_id, row.x)))
    ]
    return pd.DataFrame(rows, columns=speeds.columns)


def _baselines(speeds: pd.DataFrame) -> dict[tuple, float]:
    """Return the speed of each system's baseline, by the system's name, the environment and x."""
    return {
        (str(row.system).removesuffix("-sync"), row.env_id, row.x): row.sps
        for row in speeds.itertuples()
        if str(row.system).endswith("-sync")
    }


def time_table(tables: Tables) -> pd.DataFrame:
    """Return what actors and learner did, as shares of the wall time after the first updates.

    Runs whose records do not tell, like those of other systems, are left out.

    Returns:
      system, setting, env_id, runs, environment, inference, actor_waiting, actor_other (of the
      time of the actors), training, learner_waiting, learner_other (of that of the learner); means
      over runs.
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
    """Where the time of a run went.

    Attributes:
      key: system, setting, env_id and run.
      updates: that this is of.
      spent: the parts of `WORK` as shares of the wall time, of one actor or one learner thread.
    """

    key: tuple[str, ...]
    updates: int
    spent: dict[str, float]

    @property
    def actor(self) -> float:
        """What of an actor's time is accounted for."""
        return sum(self.spent[name] for name in ACTOR_WORK)

    @property
    def learner(self) -> float:
        """What of a learner thread's time is accounted for."""
        return sum(self.spent[name] for name in LEARNER_WORK)


def _times_spent(tables: Tables) -> Iterator[_TimeSpent]:
    """Yield where the time of each run went after its first updates, for the records that tell."""
    if not set(WORK.values()) <= set(tables.updates.columns):
        return
    hyperparameters = tables.runs.set_index("run")["hyperparameters"]
    rollouts_per_actor = hyperparameters.map(_rollouts_per_actor)
    learner_threads = hyperparameters.map(_learner_threads)
    for key, updates in tables.updates.groupby([*GROUP, "run"], observed=True, sort=True):
        clock = updates["wall_time"].to_numpy(float)
        steady = updates.iloc[SKIPPED_UPDATES:]
        if not len(steady) or steady[list(WORK.values())].isna().all().any():
            continue
        begin = clock[SKIPPED_UPDATES - 1]
        spent = {}
        for name, column in WORK.items():
            took = steady[column]
            if name in WAITING:  # it may have begun long before: for a learner that had not started
                took = took.clip(upper=steady["wall_time"] - begin)
            spent[name] = took.sum() / (clock[-1] - begin)
        for name in ACTOR_WORK:
            spent[name] *= rollouts_per_actor[key[-1]]
        for name in LEARNER_WORK:
            spent[name] /= learner_threads[key[-1]]
        yield _TimeSpent(key, len(steady), spent)


def _counted_twice(tables: Tables) -> list[tuple[str, str]]:
    """Return the runs whose records account for more time than there was, and by how much."""
    found = []
    for one in _times_spent(tables):
        # the rollout of the first update that counts, and one that was waiting, began before it
        most = 1 + max(OVERLAP, 2 / one.updates)
        for side, share in (("actors", one.actor), ("learner", one.learner)):
            if share > most:
                what = f"times of the {side} add up to {share:.0%} of the wall time"
                found.append((_name(one.key[-1]), f"{what}: some of it is counted twice"))
    return found


def _rollouts_per_actor(hyperparameters: object) -> float:
    """Return how many rollouts of each actor an update learns from: 1, or a part where it takes some."""
    if not isinstance(hyperparameters, dict):
        return 1.0
    if "collection_workers" in hyperparameters:
        collectors = max(hyperparameters["collection_workers"], 1)
        taken = 1 if hyperparameters["collection"] == "asynchronous" else collectors
        return taken / collectors / _learner_threads(hyperparameters)
    if "num_actors" not in hyperparameters:
        return 1.0
    return float(hyperparameters["batch_size"]) / float(hyperparameters["num_actors"])


def _learner_threads(hyperparameters: object) -> float:
    """Return how many threads or workers make an update each, side by side."""
    if not isinstance(hyperparameters, dict):
        return 1.0
    if hyperparameters.get("gradients") == "asynchronous":
        return float(max(hyperparameters["gradient_workers"], 1))
    return float(hyperparameters.get("num_learner_threads", 1))


def _both_sides(spent: Mapping[str, float]) -> tuple[float, ...]:
    """Return the parts of the actors' time and of the learner's, either adding up to 1.

    What an actor does in a rollout besides waiting for actions and for environments is its own
    work: storing what it saw. What a learner thread does besides is mostly to wait for another one.
    """
    waiting = spent["for_parameters"] + spent["for_room"]
    actor = (spent["environment"], spent["inference"], waiting)
    learner = (spent["training"], spent["learner_waiting"])
    return (*_with_rest(actor), *_with_rest(learner))


def _with_rest(parts: Sequence[float]) -> tuple[float, ...]:
    """Return shares of a whole, and what is left of it; see `_counted_twice` for more than the whole."""
    whole = max(1.0, sum(parts))
    return (*(part / whole for part in parts), max(0.0, 1 - sum(parts)))


def value_losses(tables: Tables) -> pd.DataFrame:
    """Return `analysis.curves.update_curve_table` of the value loss, each environment on its own grid."""
    runs = tables.runs
    frames = [
        update_curve_table(of_runs(tables, runs["run"][runs["env_id"] == env_id]), "value_loss")
        for env_id in environments(tables)
    ]
    none = update_curve_table(tables, "value_loss")
    return pd.concat(frames, ignore_index=True) if frames else none


def changing(tables: Tables) -> Tables:
    """Return the tables of the systems whose policy changes inside rollouts."""
    rollouts = tables.rollouts
    systems = set(rollouts["system"][rollouts["changes"] > 0])
    return of_runs(tables, tables.runs["run"][tables.runs["system"].isin(systems)])


def change_predictions(tables: Tables) -> pd.DataFrame:
    """Return mid-rollout changes as measured and as predicted, means over seeds.

    Returns:
      system, setting, env_id, runs, measured (changes per rollout), low, high (smallest and largest
      run), by_actors, by_time (see `analysis.lag.predictions`), lag (mean), paper_text, paper_logs
      (what the Cleanba paper reports of the setting of that name, or None).
    """
    theory = predictions(tables).set_index("run")
    rows = []
    for key, group in tables.rollouts.groupby(GROUP, observed=True, sort=True):
        each = group.groupby("run", observed=True)[["changes", "lag"]].mean()
        said = theory.loc[each.index]
        rows.append(
            (
                *key,
                len(each),
                each["changes"].mean(),
                each["changes"].min(),
                each["changes"].max(),
                said["changes_by_actors"].mean(),
                said["changes_by_time"].mean(),
                each["lag"].mean(),
                *PAPER_CHANGES.get(str(key[1]), (None, None)),
            )
        )
    names = ["runs", "measured", "low", "high", "by_actors", "by_time", "lag"]
    return pd.DataFrame(rows, columns=[*GROUP, *names, "paper_text", "paper_logs"])


def lag_table(tables: Tables, column: str = "lag") -> pd.DataFrame:
    """Return how often each policy lag occurs: system, setting, env_id, value, share, runs.

    Args:
      tables: of completed runs.
      column: `lag`, or `changes` for policy changes inside rollouts.
    """
    each = lag_distribution(tables, column)
    if each.empty:
        return pd.DataFrame(columns=[*GROUP, "value", "share", "runs"])
    runs = each.groupby(GROUP, observed=True)["run"].nunique().rename("runs")
    counts = each.groupby([*GROUP, "value"], observed=True)["rollouts"].sum()
    shares = counts / counts.groupby(level=GROUP, observed=True).transform("sum")
    return shares.rename("share").reset_index().merge(runs.reset_index(), on=GROUP)


def lag_summary(lags: pd.DataFrame) -> pd.DataFrame:
    """Return the mean and the largest policy lag: system, setting, env_id, mean, max, runs."""
    rows = [
        (*key, float((one["value"] * one["share"]).sum()), one["value"].max(), one["runs"].iloc[0])
        for key, one in lags.groupby(GROUP, observed=True, sort=True)
    ]
    return pd.DataFrame(rows, columns=[*GROUP, "mean", "max", "runs"])


def asynchrony_table(tables: Tables) -> pd.DataFrame:
    """Return the gradient asynchrony of the systems that record it: system, setting, env_id, mean, max."""
    rows = []
    for key, updates in tables.updates.groupby(GROUP, observed=True, sort=True):
        late = gradient_asynchrony(updates)
        if len(late):
            rows.append((*key, late.mean(), late.max()))
    return pd.DataFrame(rows, columns=[*GROUP, "mean", "max"])


def fingerprints(tables: Tables) -> pd.DataFrame:
    """Return `analysis.reproducibility.fingerprint_table` of runs that differ in the setting."""
    pairs = reproducibility.fingerprint_table(tables)
    return pairs[pairs["setting_a"] != pairs["setting_b"]].reset_index(drop=True)


def verdicts(tables: Tables, pairs: pd.DataFrame) -> list[Verdict]:
    """Return, for every system and two of its settings, whether they gave the same.

    Args:
      tables: completed runs.
      pairs: their `fingerprints`.
    """
    return [_verdict(entry, pairs) for entry in reproducibility.verdicts(tables)]


def _verdict(entry: dict, pairs: pd.DataFrame) -> Verdict:
    settings = (str(entry["setting_a"]), str(entry["setting_b"]))
    prints = entry["fingerprints"]
    same = prints["identical"] == prints["pairs"] if prints["pairs"] else None
    return Verdict(
        str(entry["system"]),
        settings,
        same,
        prints["pairs"],
        prints["identical"],
        prints["versions_compared"],
        _first_difference(pairs, entry["system"], settings) if same is False else "",
        entry["verdict"],
        # What limits a test of curves does not limit a comparison of bits.
        "" if entry["verdict"] == "identical" else entry["note"],
    )


def _first_difference(pairs: pd.DataFrame, system: str, settings: tuple[str, str]) -> str:
    here = pairs[(pairs["system"] == system) & (pairs["identical"] == False)]  # noqa: E712
    here = here[here["setting_a"].isin(settings) & here["setting_b"].isin(settings)]
    first = here.sort_values("first_difference", kind="stable").iloc[0]
    return f"policy version {first['first_difference']} ({first['env_id']}, seed {first['seed']})"


def problems(
    tables: Tables,
    planned: Iterable[str] = (),
    settings_vary: Collection[str] = (),
    changed: Collection[str] = (),
) -> list[tuple[str, str]]:
    """Return every problem with the data as pairs of run (or system) and problem.

    Args:
      tables: all runs, completed or not.
      planned: names of the runs that the study plans; those without a record are problems.
      settings_vary: systems whose settings are to differ in more than hardware; of others,
        hyperparameters that differ between settings are a problem.
      changed: names of planned runs that another command has completed.
    """
    planned = list(planned)
    checked = quality.check(tables).itertuples(index=False, name=None)
    # what a study does not plan is not missing
    found = [
        (_name(run), what) for run, what in checked if not (planned and what.startswith("missing"))
    ]
    runs = tables.runs
    for row in runs[~runs["completed"].to_numpy(bool)].itertuples():
        error = f": {row.error}" if isinstance(row.error, str) else ""
        found.append((_name(row.run), f"left out of every figure and number{error}"))
    present = {_name(run) for run in runs["run"]}
    found += [(name, "planned, but there is no record") for name in planned if name not in present]
    if planned:
        found += [(name, "not planned by the study") for name in sorted(present - set(planned))]
    what = "made by another command than the study's: left out of every figure and number"
    found += [(name, what) for name in changed]
    complete = completed(tables, changed)
    done = complete.runs
    setting = done["setting"].astype(object).where(done["system"].isin(list(settings_vary)), "")
    for (system, env_id, _), group in done.groupby(["system", "env_id", setting], observed=True):
        found += [
            (str(system), f"{name} differs between runs on {env_id}: {', '.join(values)}")
            for name, values in _differences(group["hyperparameters"]).items()
        ]
    for system, group in done.groupby("system", observed=True):
        kinds = {str(_mapping(one).get("device_kind", "")) for one in group["hardware"]} - {""}
        if len(kinds) > 1:  # whose arithmetic differs in the last bits
            found.append(
                (str(system), f"made on several kinds of device: {', '.join(sorted(kinds))}")
            )
    revisions = len({str(value) for value in done["revision"]})
    if revisions > 1:
        found.append(("all runs", f"made with {revisions} different values of revision"))
    # systems use other packages: a version differs where two runs name another one of the same
    found += [
        ("all runs", f"made with different versions of {name}: {', '.join(values)}")
        for name, values in _differences(done["versions"]).items()
    ]
    found += [
        (_name(run), "does not say with which versions it was made")
        for run, versions in zip(done["run"], done["versions"], strict=True)
        if not isinstance(versions, dict)
    ]
    found += _counted_twice(complete)
    return list(dict.fromkeys(found))


def _differences(mappings: Iterable) -> dict[str, list[str]]:
    """Return the entries in which mappings differ, such as hyperparameters of one system's runs."""
    values: dict[str, dict[str, None]] = {}
    for mapping in mappings:
        for name, value in (mapping if isinstance(mapping, dict) else {}).items():
            if name not in ("seed", "env_id"):
                values.setdefault(name, {})[str(value)] = None
    return {name: list(seen) for name, seen in values.items() if len(seen) > 1}


def _name(run: object) -> str:
    """Return the folder name of a run: where the folder lies is nobody's business."""
    return str(run).rstrip("/").rsplit("/", 1)[-1]
