"""Sections that compare hardware settings and systems."""

from analysis import lag_tables, reproducibility, verdicts
from analysis.scores import EPISODES
from analysis.selection import GROUP
from plots import style
from reports import cells
from reports.cells import NAMES, finite, in_order, names
from reports.page import Cell, Section
from reports.sections.parts import by_group, table
from reports.study import StudyRuns

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
                cells.interval(score.low, score.high) if score else None,
                score.runs if score else 0,
                finite(speeds[key].sps) if key in speeds else None,
                finite(lags[key].mean) if key in lags else None,
                cells.waited(time) if time else None,
                cells.same_bits(study.pairs, row.system, row.env_id),
            )
        )
    text = (
        f"Final score: mean return of the last {EPISODES} training episodes, averaged over seeds. "
        "SPS: agent steps per second without compilation. Policy lag: in policy versions, averaged "
        "over rollouts. Waited more: the side that waited longer for the other, and its share of the "
        "wall time. Same bits: whether the parameters of all runs that differ only in the hardware "
        "setting have the same fingerprints."
    )
    columns = ("final score", "95% interval", "seeds", "SPS", "policy lag", "waited more")
    return Section("summary", "Summary", text, table=table((*NAMES, *columns, "same bits"), rows))


def bits(study: StudyRuns) -> Section:
    """Return one row per system and two of its settings: whether they agree."""
    words = {
        True: Cell("same bits", tone="good"),
        False: Cell("different bits", tone="bad"),
        None: "not compared",
    }
    found = verdicts.verdicts(study.done, study.pairs)
    rows = [
        (
            one.system,
            " and ".join(sorted(one.settings, key=style.setting_order)),
            words[one.same],
            one.pairs,
            one.same_pairs,
            one.compared,
            one.difference or None,
            Cell(one.curves, tone=CURVE_TONES.get(one.curves, "")),
            one.note or None,
        )
        for one in found
    ]
    text = (
        "Runs that differ only in the hardware setting are compared by the SHA-256 fingerprints of "
        "their parameters, version by version.\n\n"
    )
    if not rows:
        text += "No system has completed runs under two hardware settings."
    else:
        text += (
            "The verdict on learning curves is *identical* if the bits are; otherwise it is a "
            "statistical test: *equivalent* (within the margin), *different*, or *undecided* (too few "
            "runs). *Not compared*: no two runs with fingerprints differ only in the hardware setting."
        )
    columns = ("system", "settings", "bits", "pairs of runs", "pairs that agree", "fingerprints")
    columns += ("first difference", "learning curves", "note")
    title = "Do the hardware settings give the same bits?"
    return Section("bits", title, text, table=table(columns, rows))


def pairs(study: StudyRuns) -> Section | None:
    """Return one row per pair of runs that differ only in the hardware setting."""
    words = {True: Cell("yes", tone="good"), False: Cell("no", tone="bad")}
    rows = [
        (
            str(row.system),
            str(row.env_id),
            cells.seed(row.seed),
            f"{row.setting_a} against {row.setting_b}",
            words.get(row.identical),
            int(row.compared),
            ("none" if row.identical else f"version {row.first_difference}")
            if row.compared
            else None,
        )
        for row in study.pairs.itertuples()
    ]
    columns = ("system", "environment", "seed", "settings", "same bits", "fingerprints")
    found = table((*columns, "first difference"), rows, folded=True)
    return Section("pairs", "Every pair of runs", table=found) if rows else None


def systems(study: StudyRuns) -> Section | None:
    """Return one row per setting and two systems: whether they have the same learning curves."""
    # A difference between systems is expected, so it is not coloured as bad.
    tones = {"equivalent": "good", "undecided": "note"}
    rows = [
        (
            entry["setting"],
            entry["system_a"],
            entry["system_b"],
            Cell(entry["verdict"], tone=tones.get(entry["verdict"], "")),
            *(cells.difference(entry.get(name)) for name in ("final", "area")),
            cells.rounded(entry["p"], 3) if "p" in entry else None,
            entry["environments"],
            f"{entry['runs_a']} and {entry['runs_b']}" if "runs_a" in entry else None,
            entry["note"] or None,
        )
        for entry in reproducibility.system_verdicts(study.done)
    ]
    text = (
        "Every two systems under the same setting are compared by their learning curves. They are "
        "*equivalent* if final score and area under the curve (IQM over runs and environments, "
        "normalised where a reference exists) differ by less than 10%, with 90% intervals. Two systems "
        "are compared up to the end of the shorter runs: the final score here is the one at that step. "
        "A difference is that of the second system minus the first. The p-values are not corrected for "
        "multiple comparisons."
    )
    columns = ("setting", "system", "against", "learning curves", "final score: difference")
    columns += ("area: difference", "p", "environments", "runs", "note")
    title = "Do the systems learn equally well?"
    return Section("systems", title, text, table=table(columns, rows)) if rows else None
