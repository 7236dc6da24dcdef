"""Sections about how the runs were executed: speed, time, policy lag, policy changes."""

import pandas as pd
from matplotlib.figure import Figure as Drawing

from analysis import lag_tables, speed, study_tables
from plots import learning_curves, policy_lag, time_spent
from plots import speed as speed_plot
from reports import cells
from reports.cells import NAMES, finite, in_order, names
from reports.page import Cell, Section
from reports.sections.parts import BANDS, by_group, figure, table
from reports.study import StudyRuns


def speeds(study: StudyRuns) -> Section | None:
    """Return one row per system, setting and environment with its speed."""
    frame = study.speeds
    if not len(frame):
        return None
    rows = [
        (
            *names(row),
            finite(row.sps),
            f"{cells.number(min(row.each))} to {cells.number(max(row.each))}",
            finite(row.sps_overall),
            finite(row.seconds),
            row.runs,
        )
        for row in in_order(frame).itertuples()
    ]
    caption = (
        "Agent steps per second without the first updates, which compile: mean over seeds; dots are "
        "seeds."
    )

    def draw() -> Drawing:
        return speed_plot.draw(frame, study.look, study.source)

    columns = ("SPS", "over seeds", "SPS with compilation", "seconds", "seeds")
    return Section(
        "speed",
        "Speed",
        at_once_text(study.done.runs),
        figure(study, "speed", caption, frame, draw),
        table((*NAMES, *columns), rows, folded=True),
    )


def at_once_text(runs: pd.DataFrame) -> str:
    """Return how many runs shared the machine, which affects their speed."""
    count = speed.at_once(runs)
    if count < 2:
        return "Runs were executed one after another." if count else ""
    return f"Up to {count} runs shared the machine."


def time(study: StudyRuns) -> Section | None:
    """Return one row per system, setting and environment with the activities of both sides."""
    frame = study.times
    if not len(frame):
        return None
    shares = ["environment", "inference", "actor_waiting", "actor_other"]
    shares += ["training", "learner_waiting", "learner_other"]
    rows = [
        (
            *names(row),
            *(cells.percent(getattr(row, share)) for share in shares),
            cells.waited(row),
        )
        for row in in_order(frame).itertuples()
    ]
    caption = (
        "Shares of wall time, without the first updates. Upper bar: actors (mean over actor threads); "
        "lower bar: learner."
    )

    def draw() -> Drawing:
        return time_spent.draw(frame, study.look, study.source)

    actors = [f"actors: {what}" for what in ("environments", "inference", "waiting", "other")]
    learner = [f"learner: {what}" for what in ("training", "waiting", "other")]
    return Section(
        "time",
        "Where the time went",
        figure=figure(study, "time_spent", caption, frame, draw),
        table=table((*NAMES, *actors, *learner, "waited more"), rows, folded=True),
    )


def lag(study: StudyRuns) -> Section | None:
    """Return one row per system, setting and environment: policy lag and gradient asynchrony."""
    frame = study.lags
    if not len(frame):
        return None
    late = by_group(lag_tables.asynchrony_table(study.done))
    rows = []
    for row in in_order(lag_tables.lag_means(frame)).itertuples():
        values = [finite(row.mean), finite(row.max)]
        if late:
            one = late.get((row.system, row.setting, row.env_id))
            values += [finite(one.mean), finite(one.max)] if one else [None, None]
        rows.append((*names(row), *values, int(row.runs)))
    caption = (
        "Share of rollouts by policy lag: the learner's version when it used the data, minus the "
        "version that produced it. Right: mean."
    )

    def draw() -> Drawing:
        return policy_lag.draw(frame, study.look, study.source)

    gradients = ("mean gradient asynchrony", "largest asynchrony") if late else ()
    columns = (*NAMES, "mean lag", "largest lag", *gradients, "seeds")
    return Section(
        "lag",
        "Policy lag",
        figure=figure(study, "policy_lag", caption, frame, draw),
        table=table(columns, rows, folded=True),
    )


def changes(study: StudyRuns) -> Section | None:
    """Return one row per system, setting and environment with the policy changes inside rollouts."""
    if not len(study.changing.runs):
        return None
    predicted = lag_tables.change_predictions(study.changing)
    paper = any(value is not None for value in predicted["paper_text"])
    rows = []
    for row in in_order(predicted).itertuples():
        reported = (row.paper_text, finite(row.paper_logs) if row.paper_text else None)
        rows.append(
            (
                *names(row),
                finite(row.measured),
                Cell(f"{cells.number(row.low)} to {cells.number(row.high)}", finite(row.low)),
                finite(row.by_actors),
                finite(row.by_time),
                int(row.runs),
                *(reported if paper else ()),
            )
        )
    text = (
        "Predicted changes per rollout: *actors / batch* if actors never wait, since all of them then "
        "finish a rollout in the same time, during which the learner makes that many updates; *rollout / "
        "update time* is the number of updates during one rollout, by the times of the other seeds. Where "
        "actors wait for free buffers, rollouts begin when an update ends, and only complete updates count."
    )
    if paper:
        text += (
            " The paper's values are from its own machine, with 80 or 40 actors; for 40 actors its text "
            "and the averages of its logs (appendix G) differ."
        )
    frame = lag_tables.lag_table(study.changing, "changes")
    caption = (
        "Share of rollouts by number of policy changes while they were collected. Right: mean."
    )

    def draw() -> Drawing:
        return policy_lag.draw(frame, study.look, study.source, "policy changes in a rollout")

    columns = ("changes per rollout", "over seeds", "actors / batch", "rollout / update time")
    columns += ("seeds", "paper: text", "paper: logs") if paper else ("seeds",)
    return Section(
        "changes",
        "Policy changes inside rollouts",
        text,
        figure(study, "policy_changes", caption, frame, draw),
        table((*NAMES, *columns), rows),
    )


def value_loss(study: StudyRuns) -> Section | None:
    """Return the value loss of the systems whose policy changes inside rollouts."""
    frame = study_tables.value_losses(study.changing)
    if not len(frame):
        return None
    caption = f"Mean over the updates between two points, then over seeds; {BANDS}."

    def draw() -> Drawing:
        return learning_curves.draw(frame, study.look, study.source, "value loss")

    drawn = figure(study, "value_losses", caption, frame, draw)
    return Section("value_loss", "Value loss", figure=drawn)
