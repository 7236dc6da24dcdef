"""Sections that compare hardware settings and systems."""

from collections.abc import Sequence

from analysis import lag_tables, verdicts
from analysis.bootstrap import FEW_RUNS
from analysis.scores import Rule, final_scores
from analysis.selection import GROUP
from analysis.summary import few_episodes
from analysis.verdicts import Verdict
from plots import style
from reports import cells
from reports.cells import NAMES, finite, in_order, names
from reports.page import Cell, Section
from reports.sections.parts import by_group, table
from reports.study import StudyRuns

YES, NO = Cell("yes", tone="good"), Cell("no", tone="bad")
COUNTS = ("pairs", "same_pairs", "compared")  # of a verdict
INTERVAL = "95% interval, or range"
SPREAD = (
    f"The interval is a bootstrap over seeds; fewer than {FEW_RUNS} seeds have their range instead."
)
OUTCOMES = {"final": "final score", "area": "area"}
P_VALUES = ("p_equivalent", "p_different")
VERDICTS = (
    "*Equivalent*: in every environment, final score and area under the curve differ by less than 10% of "
    "the level, and fewer than 10% of the runs fail (tests at 5%). *Different*: the levels differ in some "
    "environment. *Undecided*: neither is shown, usually for want of runs. The p-values are corrected for "
    "the number of comparisons in the table."
)
CURVE_TONES = {"identical": "good", "equivalent": "good", "different": "bad", "undecided": "note"}


def summary(study: StudyRuns) -> Section:
    """Return one row per environment, system and setting with the most important values."""
    scores, speeds, times = (by_group(f) for f in (study.scores, study.speeds, study.times))
    lags = by_group(lag_tables.lag_means(study.lags))
    rows = []
    for row in in_order(study.done.runs.drop_duplicates(GROUP)[GROUP]).itertuples():
        key = (row.system, row.setting, row.env_id)
        score, time = scores.get(key), times.get(key)
        rows.append(
            (
                *names(row),
                finite(score.value) if score else None,
                cells.spread(score.low, score.high, score.each) if score else None,
                score.runs if score else 0,
                finite(speeds[key].sps) if key in speeds else None,
                finite(lags[key].mean) if key in lags else None,
                cells.waited(time) if time else None,
                cells.same_bits(study.pairs, row.system, row.env_id),
            )
        )
    window = study.score_episodes
    few = few_episodes(final_scores(study.done, Rule(window))["episodes"], window)
    text = (
        f"Final score: mean return of the last {window} training episodes, averaged over seeds"
        f"{f' ({few})' if few else ''}. {SPREAD} "
        "SPS: agent steps per second without compilation. Policy lag: in policy versions, averaged "
        "over rollouts. Waited more: the side that waited longer for the other, and its share of the "
        "wall time. Same bits: whether the parameters of all runs that differ only in the hardware "
        "setting have the same fingerprints."
    )
    columns = ("final score", INTERVAL, "seeds", "SPS", "policy lag", "waited more")
    return Section("summary", "Summary", text, table=table((*NAMES, *columns, "same bits"), rows))


def bits(study: StudyRuns) -> Section | None:
    """Return one row per system and two of its settings: whether they agree; one if all agree."""
    words = {
        True: Cell("same bits", tone="good"),
        False: Cell("different bits", tone="bad"),
        None: "not compared",
    }
    found = verdicts.verdicts(study.setting_verdicts, study.pairs)
    rows = [
        (
            style.name_of(one[0].system),
            _settings_text([setting for each in one for setting in each.settings]),
            words[one[0].same],
            *(sum(getattr(each, name) for each in one) for name in COUNTS),
            one[0].difference or None,
            Cell(one[0].curves, tone=CURVE_TONES.get(one[0].curves, "")),
            one[0].note or None,
        )
        for one in _where_all_agree(found)
    ]
    if not rows:
        return None
    text = (
        "Runs that differ only in the hardware setting are compared by the SHA-256 fingerprints of "
        "their parameters, version by version.\n\n"
        "The bits are the same if every run of one setting has a partner in the other, with the "
        "same fingerprints and the same episodes. The verdict on learning curves is then *identical*; "
        f"otherwise it is a statistical test. {VERDICTS} *Not compared*: no two runs with "
        "fingerprints differ only in the hardware setting."
    )
    columns = ("system", "settings", "bits", "pairs of runs", "pairs that agree", "fingerprints")
    columns += ("first difference", "learning curves", "note")
    title = "Do the hardware settings give the same bits?"
    return Section("bits", title, text, table=table(columns, rows))


def _where_all_agree(found: Sequence[Verdict]) -> list[list[Verdict]]:
    """Return the verdicts of each system together if all settings agree, and one by one otherwise."""
    groups = []
    for system in dict.fromkeys(one.system for one in found):
        here = [one for one in found if one.system == system]
        groups += [here] if all(one.same for one in here) else [[one] for one in here]
    return groups


def _settings_text(names: Sequence[str]) -> str:
    known = sorted(set(names), key=style.setting_order)
    return " and ".join(known) if len(known) == 2 else f"all {len(known)}: {', '.join(known)}"


def pairs(study: StudyRuns) -> Section | None:
    """Return one row per pair of runs that differ only in the hardware setting, and differ.

    Pairs that agree are one row for each system and environment.
    """
    rows = []
    for (system, env_id), group in study.pairs.groupby(["system", "env_id"], sort=True):
        start = (style.name_of(str(system)), str(env_id))
        agree = (group["identical"] == True) & group["same_episodes"].astype(bool)  # noqa: E712
        same = group[agree]
        if len(same):
            settings = _settings_text([*same["setting_a"], *same["setting_b"]])
            seeds = cells.each(sorted(same["seed"].unique()), 0)
            prints = int(same["compared"].sum())
            rows.append((*start, len(same), seeds, settings, YES, prints, None))
        for row in group[~agree].itertuples():
            compared = bool(row.compared)
            first = "episodes" if row.identical is True else f"version {row.first_difference}"
            rows.append(
                (
                    *start,
                    1,
                    str(row.seed),
                    f"{row.setting_a} and {row.setting_b}",
                    NO if compared else None,
                    int(row.compared),
                    first if compared else None,
                )
            )
    columns = ("system", "environment", "pairs", "seeds", "settings", "same bits", "fingerprints")
    found = table((*columns, "first difference"), rows, folded=True)
    return Section("pairs", "Every pair of runs", table=found) if rows else None


def by_environment(study: StudyRuns) -> Section | None:
    """Return one row per verdict on settings or systems, environment and outcome."""
    rows = []
    for entry in (*study.setting_verdicts, *study.system_verdicts):
        if entry["verdict"] == "identical":
            continue
        if "system" in entry:
            of = style.name_of(entry["system"])
            names_ = (of, f"{entry['setting_a']} against {entry['setting_b']}")
        else:
            a, b = (style.name_of(entry[side]) for side in ("system_a", "system_b"))
            names_ = (entry["setting"], f"{a} against {b}")
        rows += [
            (
                *names_,
                row["env_id"],
                OUTCOMES[row["outcome"]],
                *(cells.finite(row[side]) for side in ("first", "second")),
                cells.difference(row),
                cells.finite(row["margin"]),
                *(cells.rounded(row[p], 3) for p in ("p_equivalent", "p_different")),
            )
            for row in entry["by_environment"]
        ]
    text = (
        "Levels are means over runs, of normalized scores where the environment has a reference; the "
        "difference is the second side's minus the first's, with its 90% interval. *p different* is "
        "corrected for the environments and outcomes of one comparison, and neither p-value for the number "
        "of comparisons."
    )
    columns = (
        "of",
        "compared",
        "environment",
        "outcome",
        "first",
        "second",
        "difference",
        "margin",
    )
    found = table((*columns, "p equivalent", "p different"), rows, folded=True)
    return Section("environments", "Verdicts by environment", text, table=found) if rows else None


def systems(study: StudyRuns) -> Section | None:
    """Return one row per setting and two systems: whether they have the same learning curves."""
    # A difference between systems is expected, so it is not coloured as bad.
    tones = {"equivalent": "good", "undecided": "note"}
    rows = [
        (
            entry["setting"],
            *(style.name_of(entry[side]) for side in ("system_a", "system_b")),
            Cell(entry["verdict"], tone=tones.get(entry["verdict"], "")),
            *(
                cells.difference(entry.get(name), with_interval=_enough_runs(entry))
                for name in ("final", "area")
            ),
            *(cells.rounded(entry[p], 3) if p in entry else None for p in P_VALUES),
            f"{entry['runs_a']} and {entry['runs_b']}" if "runs_a" in entry else None,
            "; ".join(filter(None, (_differs_on(entry), entry["note"]))) or None,
        )
        for entry in study.system_verdicts
    ]
    text = (
        "Every two systems under the same setting are compared by their learning curves. "
        f"{VERDICTS} Two systems are compared up to the end of the shorter runs: the final score here "
        "is the one at that step. A difference is that of the second system minus the first, of the IQM "
        "over runs and environments: a description, on which no verdict rests. From "
        f"{FEW_RUNS} runs per environment on, it has a 95% bootstrap interval."
    )
    columns = ("setting", "system", "against", "learning curves", "final score: difference")
    columns += ("area: difference", "p equivalent", "p different", "runs", "note")
    title = "Do the systems learn equally well?"
    return Section("systems", title, text, table=table(columns, rows)) if rows else None


def _enough_runs(entry: dict) -> bool:
    return min(entry.get("runs_a", 0), entry.get("runs_b", 0)) >= FEW_RUNS * entry["environments"]


def _differs_on(entry: dict) -> str:
    if entry["verdict"] != "different" or not entry["drivers"]:
        return ""
    return f"differs on {', '.join(entry['drivers'])}"
