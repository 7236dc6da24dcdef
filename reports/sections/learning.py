"""Sections about what was learned: scores over environments, learning curves, final scores, targets."""

import pandas as pd
from matplotlib.figure import Figure as Drawing

from analysis import study_tables, summary
from analysis.bootstrap import FEW_RUNS
from analysis.scores import Rule, final_scores
from analysis.selection import Comparable, run_folder_name
from plots import efficiency as efficiency_plot
from plots import final_scores as score_plot
from plots import game_improvements as improvement_plot
from plots import intervals, learning_curves, style
from plots import profiles as profile_plot
from reports import cells
from reports.cells import NAMES, finite, in_order, names
from reports.page import Cell, Section
from reports.render import escape
from reports.sections.comparison import INTERVAL
from reports.sections.parts import BANDS, MANY_ENVIRONMENTS, figure, table
from reports.study import StudyRuns


def aggregates(study: StudyRuns) -> Section | None:
    """Return one row per system and setting with its normalized scores over all environments."""
    frame = study.aggregates
    excluded = excluded_text(study.comparable)
    if not len(frame):
        return Section("aggregates", "All environments", excluded) if excluded else None
    rows = []
    for (system, setting), group in frame.groupby(["system", "setting"], sort=False):
        metrics = {row.metric: row for row in group.itertuples()}
        values = [metrics[metric] for metric in efficiency_plot.METRICS]
        last = values[-1]
        rows.append(
            (
                style.name_of(system),
                setting,
                *(cells.with_interval(one.value, one.low, one.high) for one in values),
                int(last.environments),
                int(last.runs),
            )
        )
    text = (
        "A normalized score of 0 is random play; 1 is a professional human player on Atari, elsewhere "
        "the score at which the environment counts as solved. Brackets: 95% intervals."
    )
    caption = (
        "Median, interquartile mean (IQM), mean and optimality gap (lower is better) of the normalized "
        "final scores, each run at its own end, with 95% stratified bootstrap intervals."
    )

    def draw() -> Drawing:
        return intervals.draw(frame, study.look, study.source, study.score_name)

    columns = ("system", "setting", *efficiency_plot.METRICS.values(), "environments", "runs")
    return Section(
        "aggregates",
        "All environments",
        f"{excluded}\n\n{text}".strip(),
        figure(study, "aggregates", caption, frame, draw),
        table(columns, rows),
    )


def excluded_text(comparable: Comparable) -> str:
    """Return the exclusions from scores over all environments, with the reason, as Markdown."""
    if comparable.environments:
        excluded = escape(", ".join(comparable.environments))
        return f"Excluded: {excluded}, where some system or setting has no score."
    if comparable.systems and comparable.tables is None:
        return (
            "There are no scores over all environments: no system and setting has scores on each of "
            "them."
        )
    if comparable.systems:
        excluded = escape(style.names_under(comparable.systems))
        return f"Excluded (no score on some environment): {excluded}."
    return ""


def profiles(study: StudyRuns) -> Section | None:
    """Return performance profiles, and how often one system beats another, over many environments."""
    scores = _over_many(study)
    if scores is None:
        return None
    frame = summary.profiles(scores, summary.thresholds(scores))
    caption = (
        f"Share of runs whose {study.score_name} is above tau; 95% stratified bootstrap bands."
    )

    def draw() -> Drawing:
        return profile_plot.draw(frame, study.look, study.source, study.score_name)

    rows = []
    for one in summary.improvements(scores):
        interval = cells.with_interval(one["value"], one["low"], one["high"])
        rows.append((_side(one["x"]), _side(one["y"]), interval, one["environments"]))
    columns = ("system", "against", "probability of improvement", "environments")
    return Section(
        "profiles",
        "Performance profiles, and probability of improvement",
        "",
        figure(study, "profiles", caption, frame, draw),
        table(columns, rows),
    )


def _over_many(study: StudyRuns) -> pd.DataFrame | None:
    """Return the final scores of a study of many environments, and None for other studies."""
    tables = study.comparable.tables
    scores = final_scores(tables, Rule(study.score_episodes)) if tables is not None else None
    many = scores is not None and scores["env_id"].nunique() >= MANY_ENVIRONMENTS
    return scores if many else None


def improvements(study: StudyRuns) -> Section | None:
    """Return how much better the first side is than each other, game by game."""
    scores = _over_many(study)
    sides = style.rows_of(scores, study.look) if scores is not None else []
    if len(sides) < 2:
        return None
    first = sides[0]
    frame = summary.game_improvements(scores, first)
    name = improvement_plot.side_name(*first, study.look)
    lines = "; lines are the range over pairs of runs" if frame["low"].notna().any() else ""
    caption = (
        f"Improvement of {name} over the others: difference of the normalized scores, relative to 1 or to "
        f"the score of the other, whichever is higher{lines}."
    )

    def draw() -> Drawing:
        return improvement_plot.draw(frame, first, study.look, study.source)

    drawn = figure(study, "game_improvements", caption, frame, draw)
    return Section("improvements", "Improvement, game by game", figure=drawn)


def _side(name: str) -> str:
    """Return a side of a comparison, `system, setting`, with the display name of the system."""
    system, _, setting = name.partition(", ")
    return ", ".join(filter(None, (style.name_of(system), setting)))


def efficiency(study: StudyRuns) -> Section | None:
    """Return normalized scores over all environments against steps and time."""
    curves = study_tables.efficiency(study.comparable.tables, window=study.score_episodes)
    if not len(curves):
        return None
    bands = _bands(curves, "95% stratified bootstrap bands over seeds")
    caption = (
        "Median over environments of the mean normalized score, against steps and against the mean wall "
        f"time of the runs at the same step{'' if study.look.labelled else bands}."
    )

    def draw() -> Drawing:
        return efficiency_plot.draw(curves, study.look, study.source, study.score_name)

    drawn = figure(study, "efficiency", caption, curves, draw)
    return Section("efficiency", "All environments, against steps and time", figure=drawn)


def curves_steps(study: StudyRuns) -> Section | None:
    """Return the learning curves against steps."""
    caption = f"Mean return of the last {study.score_episodes} episodes over seeds"
    same = (
        " Where two settings of a system gave the same data, the dashed line lies in the middle of the pale "
        "one."
    )
    note = same if len(study.look.settings) > 1 else ""
    return _curves(study, "step", "curves_steps", "Learning curves", caption, note)


def curves_time(study: StudyRuns) -> Section | None:
    """Return the learning curves against wall time."""
    caption = (
        "The same curves against wall time, compilation included: mean return and mean time of the runs at "
        "the same step"
    )
    title = "Learning curves against wall time"
    return _curves(study, "seconds", "curves_time", title, caption)


def _curves(
    study: StudyRuns, x: str, name: str, title: str, caption: str, note: str = ""
) -> Section | None:
    means, runs = study.curves
    if not means[x].notna().any():
        return None
    if learning_curves.labels_settings(means, study.look):
        caption += "; the settings are named at the ends of the curves."
    else:
        thin = "; thin lines are single runs" if means["runs"].max() > 1 else ""
        caption += f"{thin}{_bands(means[means['runs'] >= FEW_RUNS], BANDS)}.{note}"

    def draw() -> Drawing:
        return learning_curves.draw(means, study.look, study.source, x=x, runs=runs)

    data: pd.DataFrame | str = "curves_steps"
    if name == data:
        shown = runs.assign(run=runs["run"].map(run_folder_name))
        if (
            means["env_id"].nunique() > learning_curves.MANY
        ):  # half of the points, to keep the page small
            shown = shown[shown.groupby("run", observed=True).cumcount(ascending=False) % 2 == 0]
            shown = shown.assign(value=[float(f"{value:.3g}") for value in shown["value"]])
        data = pd.concat([means, shown], ignore_index=True)
    return Section(name, title, figure=figure(study, name, caption, means, draw, data))


def _intervals(frame: pd.DataFrame) -> str:
    """Return what the bars of a figure of scores are, if it has any."""
    several = (frame["runs"] >= FEW_RUNS).any()
    return f"; bars are 95% bootstrap intervals of at least {FEW_RUNS} seeds" if several else ""


def _bands(frame: pd.DataFrame, what: str) -> str:
    """Return what the bands of a figure are, if it has any."""
    return f"; {what}" if frame["low"].notna().any() else ""


def scores(study: StudyRuns) -> Section | None:
    """Return one row per system, setting and environment with the scores of all seeds."""
    frame = study.scores
    if not len(frame):
        return None
    rows = [
        (
            *names(row),
            finite(row.value),
            cells.spread(row.low, row.high, row.each),
            Cell(str(row.runs), row.runs, "note") if row.runs < FEW_RUNS else row.runs,
            cells.each(row.each),
        )
        for row in in_order(frame).itertuples()
    ]
    caption = (
        f"Mean return of the last {study.score_episodes} training episodes: mean over seeds; dots are seeds"
        f"{_intervals(frame)}."
    )

    def draw() -> Drawing:
        return score_plot.draw(frame, study.look, study.source)

    return Section(
        "scores",
        "Final scores",
        figure=figure(study, "final_scores", caption, frame, draw),
        table=table((*NAMES, "mean", INTERVAL, "seeds", "each seed"), rows, folded=True),
    )


def targets(study: StudyRuns) -> Section | None:
    """Return one row per system, setting and environment with its runs' times to the target."""
    asked = study.plan.targets if study.plan else {}
    frame = study_tables.target_table(study.done, asked, study.score_episodes)
    rows = []
    for row in in_order(frame).itertuples():
        missed = row.reached < row.runs
        reached = Cell(str(row.reached), row.reached, "bad") if missed else row.reached
        fallen = Cell(str(row.fallen), row.fallen, "bad") if row.fallen else row.fallen
        steps = cells.each(row.steps, 0)
        seconds = cells.span(row.seconds)
        rows.append((*names(row), finite(row.target), row.runs, reached, fallen, steps, seconds))
    text = (
        f"Steps and seconds until the mean return of the last {study.score_episodes} training episodes "
        "first reached the target, and how many of the runs that reached it ended below it."
    )
    columns = ("target", "seeds", "reached it", "ended below it", "steps, each seed", "seconds")
    found = table((*NAMES, *columns), rows)
    return Section("targets", "Steps to the target", text, table=found) if rows else None
