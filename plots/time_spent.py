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
    hatch: str = ""


ACTORS = (
    Activity("environment", "environments", "#0072B2"),
    Activity("inference", "inference", "#56B4E9"),
    Activity("actor_waiting", "waiting for the other side", "#D55E00", "////"),
    Activity("actor_other", "other", "#cccccc"),
)
LEARNER = (
    Activity("training", "training", "#009E73"),
    Activity("learner_waiting", "waiting for the other side", "#D55E00", "////"),
    Activity("learner_other", "other", "#cccccc"),
)


def draw(times: pd.DataFrame, look: style.Look, source: str) -> Figure:
    """Draw one panel per environment, two bars per system and setting: actors above, learner below.

    Args:
      times: system, setting, env_id, runs, and the columns of `ACTORS` and `LEARNER`, as shares of
        the wall time.
      look: systems and settings, in their order.
      source: short description of the data's origin.
    """
    with mpl.rc_context(style.RC):
        environments = sorted(times["env_id"].unique())
        rows = style.rows_of(times, look)
        figure, axes = style.panels(len(environments), height=0.8 + 0.36 * len(rows))
        for index, (panel, env_id) in enumerate(zip(axes, environments, strict=True)):
            for row in times[times["env_id"] == env_id].itertuples():
                position = 2.6 * rows.index((row.system, row.setting))
                _draw_bar(panel, row, position, ACTORS)
                _draw_bar(panel, row, position + 1, LEARNER)
            panel.set_title(env_id)
            panel.set_xlabel("share of wall time (%)")
            panel.set_xlim(0, 100)
            first = index % style.PANELS_PER_ROW == 0
            _label_bars(panel, rows, first)
        parts = {part.label: part for part in (*ACTORS, *LEARNER)}
        handles = [
            Patch(facecolor=part.colour, edgecolor="white", hatch=part.hatch)
            for part in parts.values()
        ]
        style.legend(figure, handles, list(parts))
        style.source_line(
            figure,
            style.sentence(
                "upper bar: actors, lower bar: learner", style.seeds_text(times["runs"]), source
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
            edgecolor="white",
            linewidth=0.4,
            hatch=part.hatch,
        )
        left += share


def _label_bars(panel, rows: list[tuple[str, str]], first: bool) -> None:  # noqa: ANN001
    labels = [f"{system}\n{setting}" for system, setting in rows]
    positions = [2.6 * row + 0.5 for row in range(len(rows))]
    panel.set_yticks(positions, labels if first else [""] * len(rows), fontsize=7)
    panel.set_ylim(2.6 * len(rows) - 0.9, -0.8)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="y", visible=False)
