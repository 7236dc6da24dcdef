"""Findings: the sentences that answer a study's question, computed from its tables.

A study file names the kinds of findings that answer its question (`findings`); each kind is a function here.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from analysis import lag_tables, study_tables, verdicts
from analysis.bootstrap import FEW_RUNS
from analysis.selection import GROUP
from experiments.study import Finding
from plots.style import name_of
from reports.page import number
from reports.study import StudyRuns

MOST_NAMED = 3  # environments, or results, that a finding names one by one
MOST_PAIRS = 2  # likewise
Sentences = Iterable[str]


def findings(study: StudyRuns) -> tuple[str, ...]:
    """Return the findings that a study asks for, or by default those that its tables allow."""
    asked = study.plan.findings if study.plan else ()
    for kinds in (asked, ("targets", "bits"), ("scores", "speeds")):
        if found := tuple(sentence for kind in kinds for sentence in KINDS[kind](study)):
            return found
    return ()


def _bits(study: StudyRuns) -> Sentences:
    """Whether hardware settings give the same bits."""
    by_system: dict[str, list[verdicts.Verdict]] = {}
    for one in verdicts.verdicts(study.setting_verdicts, study.pairs):
        if one.same is not None:
            by_system.setdefault(one.system, []).append(one)
    same: dict[frozenset[str], list[str]] = {}  # settings -> systems
    for name, of_it in by_system.items():
        if all(one.same for one in of_it):
            settings = frozenset(setting for one in of_it for setting in one.settings)
            same.setdefault(settings, []).append(name)
    for settings, names in same.items():
        pairs = sum(one.pairs for name in names for one in by_system[name])
        yield (
            f"{_listed(_names(study, names))}: the same bits on {len(settings)} hardware settings"
            f"{_processes(study, names, settings)} ({pairs:,} of {_count(pairs, 'pair')} of runs)."
        )
    for name, of_it in by_system.items():
        if any(name in names for names in same.values()):
            continue
        pairs, agree = (
            sum(getattr(one, what) for one in of_it) for what in ("pairs", "same_pairs")
        )
        of_pairs = study.pairs[study.pairs["system"] == name]
        differ = int((of_pairs["identical"] == False).sum())  # noqa: E712
        if differ:
            yield (
                f"{name_of(name)}: different bits on different hardware settings "
                f"({differ:,} of {_count(pairs, 'pair')} of runs)."
            )
            continue
        # equal fingerprints to the end, and other episodes
        whole = (of_pairs["identical"] == True) & of_pairs["to_the_end"].astype(bool)  # noqa: E712
        other = int((whole & ~of_pairs["same_episodes"].astype(bool)).sum())
        parts = [f"the same bits in {agree:,} of {_count(pairs, 'pair')} of runs"]
        parts += [f"other episodes in {other:,}"] if other else []
        left = pairs - agree - other
        parts += [f"{left:,} could not be compared to their end"] if left > 0 else []
        yield f"{name_of(name)}: {'; '.join(parts)}."


def _processes(study: StudyRuns, systems: Collection[str], settings: Collection[str]) -> str:
    """Return in how many processes the runs of systems and settings were made, if in several."""
    planned = study.plan.runs if study.plan else ()
    counts = [
        run.setting.processes
        for run in planned
        if run.system in systems and run.setting.name in settings
    ]
    most = max(counts, default=1)
    return f" in up to {most} processes" if most > 1 else ""


def _targets(study: StudyRuns) -> Sentences:
    """How many runs reached their target return, and which ended below it."""
    asked = study.plan.targets if study.plan else {}
    table = study_tables.target_table(study.done, asked, study.score_episodes)
    if not len(table):
        return
    reached, runs = int(table["reached"].sum()), int(table["runs"].sum())
    made = set(table["env_id"])
    targets = ", ".join(f"{asked[env_id]:,g} on {env_id}" for env_id in sorted(made))
    yield f"{reached} of {_count(runs, 'run')} reached the target return ({targets})."
    table["missed"] = table["runs"] - table["reached"]
    yield from _counted(study, "Missed by", table[table["missed"] > 0], "missed", "runs")
    fallen = table[table["fallen"] > 0]
    yield from _counted(study, "Below it again at the end:", fallen, "fallen", "reached")


def _counted(study: StudyRuns, what: str, rows: pd.DataFrame, part: str, whole: str) -> Sentences:
    """One sentence on how many runs of each result something is true of; none without rows."""
    named = [
        f"{_who(study, row)} on {row.env_id} ({getattr(row, part)} of {getattr(row, whole)})"
        for row in rows.itertuples()
    ]
    if len(named) > MOST_NAMED:
        yield f"{what} runs of {len(named)} results, such as {named[0]}."
    elif named:
        yield f"{what} {'; '.join(named)}."


def _verdicts(study: StudyRuns) -> Sentences:
    """Whether systems learn equally well."""
    entries = study.system_verdicts
    if not entries:
        return
    if len(entries) > MOST_PAIRS:
        yield f"{len(entries)} comparisons of learning curves: {_verdict_counts(entries)}."
        return
    for entry in entries:
        both = _listed([name_of(entry[side]) for side in ("system_a", "system_b")])
        p = {"equivalent": "p_equivalent", "different": "p_different"}.get(entry["verdict"], "")
        note = f" (p = {entry[p]:.2g})" if p in entry else ""
        where = f", {entry['setting']}" if len(study.look.settings) > 1 else ""
        yield f"{both}{where}: {_verdict(entry)}{_drivers(entry)}{note}."


def _scores(study: StudyRuns) -> Sentences:
    """The lowest and the highest final score on each environment."""
    if study.scores["env_id"].nunique() > MOST_NAMED:
        yield from _aggregates(study)
    else:
        yield from _by_environment(study, "Final score", study.scores, "value", _score)


def _aggregates(study: StudyRuns) -> Sentences:
    """The lowest and the highest interquartile mean over all environments."""
    frame = study.aggregates
    iqm = frame[frame["metric"] == "iqm"] if len(frame) else frame
    if len(iqm):

        def text(row: object) -> str:
            return _bracketed(row.value, row.low, row.high)

        count = int(iqm["environments"].max())
        over = _count(count, "environment")
        notes = "".join(f"; {note}" for note in iqm["note"].unique() if note)
        yield f"IQM {study.score_name} over {over}: {_range(study, iqm, 'value', text)}{notes}."


def _differences(study: StudyRuns) -> Sentences:
    """Whether hardware settings of a system learn equally well."""
    by_system: dict[str, list[dict]] = {}
    for entry in study.setting_verdicts:
        if entry["verdict"] != "identical":
            by_system.setdefault(entry["system"], []).append(entry)
    for system, entries in by_system.items():
        who = f"{name_of(system)}, " if len(study.look.systems) > 1 else ""
        if len(entries) <= MOST_PAIRS:
            for one in entries:
                yield f"{who}{_sides(one)}: {_verdict(one)}{_drivers(one)}."
            continue
        differ = [_sides(one) + _drivers(one) for one in entries if one["verdict"] == "different"]
        which = f" ({'; '.join(differ)})" if differ else ""
        yield f"{who}{len(entries)} comparisons of settings: {_verdict_counts(entries)}{which}."


def _speeds(study: StudyRuns) -> Sentences:
    """The lowest and the highest speed on each environment."""
    what = "Steps per second"

    def text(row: object) -> str:
        return number(row.sps, 0)

    if study.speeds["env_id"].nunique() > MOST_NAMED:
        yield f"{what}: {_range(study, study.speeds, 'sps', text)}."
    else:
        yield from _by_environment(study, what, study.speeds, "sps", text)


def _speedup(study: StudyRuns) -> Sentences:
    """The speed of each system relative to the synchronous one of the same code: geometric mean, range."""
    speeds = {tuple(getattr(r, n) for n in GROUP): r.sps for r in study.speeds.itertuples()}
    parts = []
    for system in study.look.systems:
        ratios = [
            sps / base
            for key, sps in speeds.items()
            if key[0] == system and (base := speeds.get((f"{system}-sync", *key[1:])))
        ]
        if ratios:
            mean = math.exp(np.log(ratios).mean())
            low, high = (f"{end(ratios):.2f}" for end in (min, max))
            spread = f" ({low} to {high})" if low != high else ""
            parts.append(f"{name_of(system)} {mean:.2f} times{spread}")
    if parts:
        yield f"Speed relative to the synchronous architecture: {', '.join(parts)}."


def _run_times(study: StudyRuns) -> Sentences:
    """The shortest and the longest mean run time."""
    frame = study.run_times
    if len(frame):
        unit, name = (60, "minutes") if frame["seconds"].max() >= 120 else (1, "seconds")
        text = _range(study, frame, "seconds", lambda row: number(row.seconds / unit))
        yield f"A run takes {text} {name}."


def _lag(study: StudyRuns) -> Sentences:
    """The mean policy lag, and the mean gradient asynchrony of those that record one."""
    lags = lag_tables.lag_means(study.lags)
    if len(lags):
        by = "system" if lags["system"].nunique() > 1 else "setting"
        who = _by_value(study, lags, by)
        text = next(iter(who)) if len(who) == 1 else _with_names(who)
        yield f"Mean policy lag in versions: {text}."
        if len(late := lag_tables.asynchrony_table(study.done)):
            yield f"Mean gradient asynchrony in versions: {_with_names(_by_value(study, late, by))}."


def _by_value(study: StudyRuns, means: pd.DataFrame, by: str) -> dict[str, list[str]]:
    """Return the names of the systems or settings with each mean, the smallest mean first."""
    who: dict[str, list[str]] = {}
    for name, mean in sorted(
        means.groupby(by, observed=True)["mean"].mean().items(), key=lambda item: item[1]
    ):
        who.setdefault(f"{mean:.2f}", []).append(str(name))
    return {mean: _names(study, them) if by == "system" else them for mean, them in who.items()}


def _with_names(who: Mapping[str, Sequence[str]]) -> str:
    separator = "; " if any("," in name for them in who.values() for name in them) else ", "
    return ", ".join(f"{mean} ({separator.join(them)})" for mean, them in who.items())


def _changes(study: StudyRuns) -> Sentences:
    """The measured and the predicted policy changes inside rollouts."""
    if not len(study.changing.runs):
        return
    rows = lag_tables.change_predictions(study.changing)
    several = rows["env_id"].nunique() > 1
    parts = (
        f"{_who(study, row)}{f' on {row.env_id}' if several else ''} {number(row.measured)}"
        f"{f' ({number(row.by_time)})' if math.isfinite(row.by_time) else ''}"
        for row in rows.itertuples()
    )
    yield f"Policy changes per rollout, measured (and predicted): {', '.join(parts)}."


KINDS: Mapping[Finding, Callable[[StudyRuns], Sentences]] = {
    "bits": _bits,
    "targets": _targets,
    "verdicts": _verdicts,
    "differences": _differences,
    "scores": _scores,
    "aggregates": _aggregates,
    "speeds": _speeds,
    "speedup": _speedup,
    "run_times": _run_times,
    "lag": _lag,
    "changes": _changes,
}


def _by_environment(
    study: StudyRuns, what: str, frame: pd.DataFrame, column: str, text: Callable[[object], str]
) -> Sentences:
    """The lowest and the highest value on each environment."""
    parts = (
        f"{env_id} {_range(study, frame[frame['env_id'] == env_id], column, text)}"
        for env_id in frame["env_id"].unique()
    )
    if len(frame):
        yield f"{what}: {'; '.join(parts)}."


def _verdict_counts(entries: Sequence[Mapping]) -> str:
    words = [entry["verdict"] for entry in entries]
    ordered = sorted(set(words), key=lambda word: (-words.count(word), word))
    return ", ".join(f"{words.count(word)} {word}" for word in ordered)


def _sides(entry: Mapping) -> str:
    return f"{entry['setting_a']} and {entry['setting_b']}"


def _verdict(entry: Mapping) -> str:
    if entry["verdict"] == "undecided":
        return "undecided whether the learning curves differ"
    return f"{entry['verdict']} learning curves"


def _drivers(entry: Mapping) -> str:
    """Return the environments that show a difference; '' if the verdict is another."""
    differ = entry["verdict"] == "different" and entry.get("drivers")
    return f" on {', '.join(entry['drivers'])}" if differ else ""


def _score(row: object) -> str:
    if row.runs >= FEW_RUNS:
        return _bracketed(row.value, row.low, row.high)
    return number(row.value)


def _bracketed(value: float, low: float, high: float) -> str:
    if not math.isfinite(low):
        return number(value)
    return f"{number(value)} [{number(low)}, {number(high)}]"


def _range(
    study: StudyRuns, frame: pd.DataFrame, column: str, text: Callable[[object], str]
) -> str:
    """Return the lowest and the highest row, with what distinguishes them from the others."""
    known = frame[np.isfinite(frame[column].astype(float))].sort_values(column, kind="stable")
    if known.empty:
        return "unknown"
    low, high = (next(known.iloc[[i]].itertuples()) for i in (0, -1))
    if text(low) == text(high):
        return text(low)
    names = [n for n in ("system", "setting", "env_id") if n in known and known[n].nunique() > 1]

    def end(row: object) -> str:
        who = ", ".join(
            name_of(row.system) if n == "system" else str(getattr(row, n)) for n in names
        )
        return f"{text(row)} ({who})" if who else text(row)

    return f"{end(low)} to {end(high)}"


def _who(study: StudyRuns, row: object) -> str:
    """Return the system or setting of a row, whichever distinguishes it."""
    return (
        str(row.setting)
        if len(study.look.systems) == 1 and len(study.look.settings) > 1
        else name_of(row.system)
        if len(study.look.settings) == 1
        else f"{name_of(row.system)}, {row.setting}"
    )


def _names(study: StudyRuns, systems: Iterable[str]) -> list[str]:
    """Return display names; of a system and its synchronous version, one."""
    names = [name_of(one) for one in study.look.systems if one in set(systems)]
    both = [n for n in names if f"{n} (synchronous)" in names]
    kept = [n for n in names if n.removesuffix(" (synchronous)") not in both or n in both]
    return [f"{n} (both architectures)" if n in both else n for n in kept]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _count(number_: int, noun: str) -> str:
    return f"{number_:,} {noun}{'' if number_ == 1 else 's'}"
