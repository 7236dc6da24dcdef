"""Sections about how the runs were executed: speed, time, policy lag, policy changes."""

import math

import pandas as pd
from matplotlib.figure import Figure as Drawing

from analysis import lag_tables, selection, speed, study_tables
from analysis.bootstrap import FEW_RUNS
from analysis.selection import MOST_NAMED
from plots import learning_curves, policy_lag, speed_curves, time_spent
from plots import run_times as run_time_plot
from plots import speed as speed_plot
from reports import cells
from reports.cells import NAMES, finite, in_order, names
from reports.page import Cell, Section
from reports.sections.parts import BANDS, by_group, figure, table
from reports.study import StudyRuns

PREDICTED = "predicted"  # of the policy changes in a rollout
# What may be varied to see how speed scales -> its name on an axis.
SCALES = {
    "step_delay_seconds": "mean step time (s), exponential",
    "sync_interval": "steps between synchronizations",
    "devices": "devices",
    "num_envs": "environments",
    "num_actors": "actors",
}


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


def run_times(study: StudyRuns) -> Section | None:
    """Return the mean run time of each system and setting."""
    frame = study.run_times
    if len(frame) < 2:
        return None
    shared = selection.environments_of_all(study.done)
    caption = "Mean wall time of a run, compilation included, and how many times the shortest it is"
    if len(shared) < study.done.runs["env_id"].nunique():
        what = ", ".join(shared) if len(shared) <= MOST_NAMED else f"{len(shared)} environments"
        caption += f"; over the environments that all have: {what}"
    caption += "."

    def draw() -> Drawing:
        return run_time_plot.draw(frame, study.look, study.source)

    counted = frame.assign(environments=len(shared))
    drawn = figure(study, "run_times", caption, counted, draw)
    return Section("run_times", "Run times", figure=drawn)


def scaling(study: StudyRuns) -> Section | None:
    """Return the speed against the quantity that the hardware settings vary."""
    name, frame = _varied(study)
    if frame is None:
        return None
    ideal = "in proportion to the fewest" if name == "devices" else ""
    drawn = frame if "ideal" in frame else frame.assign(ideal=math.nan)
    caption = f"Agent steps per second against {SCALES[name]}; dots are seeds."

    def draw() -> Drawing:
        return speed_curves.draw(drawn, study.look, study.source, SCALES[name], ideal)

    found = figure(study, "scaling", caption, frame, draw)
    return Section("scaling", f"Speed against {SCALES[name]}", figure=found)


def speedups(study: StudyRuns) -> Section | None:
    """Return the speed relative to the synchronous system of the same code, where step times vary."""
    name, speeds = _varied(study)
    if name != "step_delay_seconds" or speeds is None:
        return None
    frame = speed.speedups(speeds)
    if not len(frame):
        return None
    frame["x"] = (1000 * frame["x"]) ** 2  # variance of an exponential distribution
    what, y = "variance of a step's time (ms²)", "times as fast as the synchronous system"
    caption = "Speed relative to the synchronous system of the same code, against the variance of step times."

    def draw() -> Drawing:
        return speed_curves.draw(frame, study.look, study.source, what, y=y)

    found = figure(study, "speedups", caption, frame, draw)
    return Section("speedups", "Speedup over the synchronous system", figure=found)


def _varied(study: StudyRuns) -> tuple[str, pd.DataFrame | None]:
    """Return the first quantity of `SCALES` that a system's settings vary, and the speeds by it."""
    for name in SCALES:
        by_devices = name == "devices"
        frame = (
            speed.speed_by_devices(study.done)
            if by_devices
            else speed.speed_by_option(study.done, name)
        )
        if (
            len(frame)
            and frame.groupby(["system", "env_id"], observed=True)["x"].nunique().min() > 2
        ):
            return name, frame
    return "", None


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
    references = _references(predicted)
    by_actors = predicted["by_actors"].notna().any()
    text = (
        "Predicted changes per rollout: *actors / batch* if actors never wait, since all of them then "
        "finish a rollout in the same time, during which the learner makes that many updates; *rollout / "
        "update time* is the number of updates during one rollout, by the times of the other seeds. Where "
        "actors wait for free buffers, rollouts begin when an update ends, and only complete updates count."
        if references or by_actors
        else ""
    )
    if paper:
        text += (
            " The paper's values are from its own machine, with 80 or 40 actors; for 40 actors its text "
            "and the averages of its logs (appendix G) differ."
        )
    frame = lag_tables.lag_table(study.changing, "changes")
    caption = "Share of rollouts by number of policy changes while they were collected"
    if any(one.label == PREDICTED for one in references):
        caption += "; cross: as predicted by the times of the other seeds"
    caption += "."

    def draw() -> Drawing:
        what = "policy changes in a rollout"
        return policy_lag.draw(frame, study.look, study.source, what, references)

    columns = ("changes per rollout", "over seeds", "actors / batch", "rollout / update time")
    columns += ("seeds", "paper: text", "paper: logs") if paper else ("seeds",)
    return Section(
        "changes",
        "Policy changes inside rollouts",
        text,
        figure(study, "policy_changes", caption, frame, draw),
        table((*NAMES, *columns), rows),
    )


def _references(predicted: pd.DataFrame) -> list[policy_lag.Reference]:
    """Return the predicted changes, and those that the paper reports."""
    columns = {"by_time": (PREDICTED, "x"), "paper_logs": ("paper (its own machine)", "D")}
    keys = list(zip(*(predicted[name] for name in ("system", "setting", "env_id")), strict=True))
    found = []
    for column, (label, marker) in columns.items():
        values = pd.to_numeric(predicted[column]).to_numpy(float)
        known = {
            key: value for key, value in zip(keys, values, strict=True) if math.isfinite(value)
        }
        found += [policy_lag.Reference(label, marker, known)] if known else []
    return found


def value_loss(study: StudyRuns) -> Section | None:
    """Return the value loss of the systems whose policy changes inside rollouts."""
    frame = study_tables.value_losses(study.changing)
    if not len(frame):
        return None
    several = (frame["runs"] >= FEW_RUNS).any()
    bands = f"; {BANDS}" if several else ""
    caption = f"Mean over the updates between two points, then over seeds{bands}; logarithmic."

    def draw() -> Drawing:
        return learning_curves.draw(frame, study.look, study.source, "value loss")

    drawn = figure(study, "value_losses", caption, frame, draw)
    return Section("value_loss", "Value loss", figure=drawn)
