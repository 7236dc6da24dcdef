"""Time spent: the activities of actors and learner, and their waiting times."""

from typing import NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from plots import style


class Activity(NamedTuple):
    """A part of the time, as a column of the table and as an area of the figure."""

    column: str
    label: str
    colour: str


ACTORS = (
    Activity("environment", "environments", style.BLUE),
    Activity("inference", "inference", style.CYAN),
    Activity("actor_waiting", "waiting for the other side", style.ORANGE),
    Activity("actor_other", "other", style.LINE),
)
LEARNER = (
    Activity("training", "training", style.GREEN),
    Activity("learner_waiting", "waiting for the other side", style.ORANGE),
    Activity("learner_other", "other", style.LINE),
)


def draw(times: pd.DataFrame, look: style.Look, source: str) -> Figure:
    """Draw one panel per environment, two bars per system and setting: actors above, learner below.

    Args:
      times: system, setting, env_id, runs, and the columns of `ACTORS` and `LEARNER`, as shares of
        the wall time.
      look: names and order.
      source: short description of the data's origin.
    """
    with mpl.rc_context(style.RC):
        environments = sorted(times["env_id"].unique())
        rows = style.place_rows(times, look, per_row=2.5)
        figure, axes = style.panels(len(environments), height=0.8 + 0.14 * rows.height)
        for index, (panel, env_id) in enumerate(zip(axes, environments, strict=True)):
            for row in times[times["env_id"] == env_id].itertuples():
                position = rows.at[row.system, row.setting]
                _draw_bar(panel, row, position, ACTORS)
                _draw_bar(panel, row, position + 1, LEARNER)
            panel.set_title(env_id)
            panel.set_xlabel("share of wall time (%)")
            panel.set_xlim(0, 100)
            first = index % style.PANELS_PER_ROW == 0
            style.label_rows(panel, rows, look, first, middle=0.5)
        parts = {part.label: part for part in (*ACTORS, *LEARNER)}
        handles = [Patch(facecolor=part.colour, alpha=0.7) for part in parts.values()]
        style.legend(figure, handles, list(parts))
        style.source_line(
            figure,
            style.sentence(
                "upper bar: actors, lower bar: learner",
                style.counts_text(times["runs"], "seeds"),
                source,
            ),
        )
    return figure


def _draw_bar(panel, row, position: float, parts: tuple[Activity, ...]) -> None:  # noqa: ANN001
    left = 0.0
    for part in parts:
        share = 100 * getattr(row, part.column)
        panel.barh(
            position,
            share,
            left=left,
            height=0.9,
            color=part.colour,
            alpha=0.7,
        )
        left += share
