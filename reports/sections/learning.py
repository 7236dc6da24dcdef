"""Sections about what was learned: scores over environments, learning curves, final scores, targets."""

from matplotlib.figure import Figure as Drawing

from analysis import study_tables
from analysis.bootstrap import FEW_RUNS
from analysis.scores import EPISODES
from analysis.selection import Comparable
from plots import efficiency as efficiency_plot
from plots import final_scores as score_plot
from plots import intervals, learning_curves
from reports import cells
from reports.cells import NAMES, finite, in_order, names
from reports.page import Cell, Section
from reports.render import escape
from reports.sections.parts import BANDS, figure, table
from reports.study import StudyRuns


def aggregates(study: StudyRuns) -> Section | None:
    """Return one row per system and setting with its normalised scores over all environments."""
    frame = study_tables.aggregate_table(study.comparable.tables)
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
                system,
                setting,
                *(cells.with_interval(one.value, one.low, one.high) for one in values),
                int(last.environments),
                int(last.runs),
            )
        )
    text = (
        "A normalised score of 0 is random play; 1 is a professional human player on Atari, elsewhere "
        "the score at which the environment counts as solved. Brackets: 95% intervals."
    )
    caption = (
        "Median, interquartile mean (IQM), mean and optimality gap (lower is better) of the normalised "
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
        excluded = escape("; ".join(comparable.systems))
        return f"Excluded: {excluded}, which have no score on some environment."
    return ""


def efficiency(study: StudyRuns) -> Section | None:
    """Return normalised scores over all environments against steps and time."""
    curves = study_tables.efficiency(study.comparable.tables)
    if not len(curves):
        return None
    caption = (
        "Median over environments of the mean normalised score, 95% stratified bootstrap bands over "
        "seeds. A curve ends where its first run ends."
    )

    def draw() -> Drawing:
        return efficiency_plot.draw(curves, study.look, study.source, study.score_name)

    drawn = figure(study, "efficiency", caption, curves, draw)
    return Section("efficiency", "All environments, against steps and time", figure=drawn)


def curves_steps(study: StudyRuns) -> Section | None:
    """Return the learning curves against steps."""
    caption = (
        f"Mean return of the last {EPISODES} episodes over seeds, {BANDS}. Where two settings of a "
        "system gave the same data, the dashed line lies in the middle of the pale one."
    )
    return _curves(study, "step", "curves_steps", "Learning curves", caption)


def curves_time(study: StudyRuns) -> Section | None:
    """Return the learning curves against wall time."""
    caption = (
        f"The same runs against seconds since the start, compilation included; {BANDS}. A mean ends "
        "where its first run ends."
    )
    return _curves(study, "time", "curves_time", "Learning curves against wall time", caption)


def _curves(study: StudyRuns, axis: str, name: str, title: str, caption: str) -> Section | None:
    frame = study_tables.learning_curves(study.done, axis)
    if not len(frame):
        return None

    def draw() -> Drawing:
        return learning_curves.draw(frame, study.look, study.source)

    return Section(name, title, figure=figure(study, name, caption, frame, draw))


def scores(study: StudyRuns) -> Section | None:
    """Return one row per system, setting and environment with the scores of all seeds."""
    frame = study.scores
    if not len(frame):
        return None
    rows = [
        (
            *names(row),
            finite(row.value),
            cells.interval(row.low, row.high),
            Cell(str(row.runs), row.runs, "note") if row.runs < FEW_RUNS else row.runs,
            cells.each(row.each),
        )
        for row in in_order(frame).itertuples()
    ]
    caption = (
        f"Mean return of the last {EPISODES} training episodes: mean over seeds with its 95% bootstrap "
        "interval; dots are seeds."
    )

    def draw() -> Drawing:
        return score_plot.draw(frame, study.look, study.source)

    return Section(
        "scores",
        "Final scores",
        figure=figure(study, "final_scores", caption, frame, draw),
        table=table((*NAMES, "mean", "95% interval", "seeds", "each seed"), rows, folded=True),
    )


def targets(study: StudyRuns) -> Section | None:
    """Return one row per system, setting and environment with its runs' times to the target."""
    asked = study.plan.targets if study.plan else {}
    frame = study_tables.target_table(study.done, asked, study.target_episodes)
    rows = []
    for row in in_order(frame).itertuples():
        missed = row.reached < row.runs
        reached = Cell(str(row.reached), row.reached, "bad") if missed else row.reached
        steps = cells.each(row.steps, 0)
        rows.append(
            (*names(row), finite(row.target), row.runs, reached, steps, cells.span(row.seconds))
        )
    text = (
        f"Steps and seconds until the mean return of the last {study.target_episodes} training episodes "
        "first reached the target."
    )
    columns = ("target", "seeds", "seeds that reached it", "steps, each seed", "seconds")
    found = table((*NAMES, *columns), rows)
    return Section("targets", "Steps to the target", text, table=found) if rows else None
