"""Speed against a quantity that affects it: devices, environments, step time."""

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from plots import style

STEPS_PER_SECOND = "steps per second"
LOGARITHMIC = 5.0  # smallest factor between speeds for a logarithmic axis
IDEAL = {"color": style.GREY, "lw": 1.0, "ls": (0, (4, 2))}


def draw(
    speeds: pd.DataFrame,
    look: style.Look,
    source: str,
    what: str,
    ideal: str = "",
    y: str = STEPS_PER_SECOND,
) -> Figure:
    """Draw one panel per environment, one line per system; the axis of x is logarithmic.

    Args:
      speeds: rows of `analysis.speed.speed_by`: system, env_id, x (> 0), sps (mean), runs, each (the
        speeds of the single runs), and optionally `ideal` (steps per second) or `speedup` (over a baseline).
      look: names, colours and markers.
      source: short description of the data's origin.
      what: label of the x axis.
      ideal: label of the line of `ideal`; '' for no such line.
      y: label of the y axis; it is logarithmic for steps per second that span a factor of `LOGARITHMIC`, and
        linear from 0 otherwise.
    """
    with mpl.rc_context(style.RC):
        environments = sorted(speeds["env_id"].unique())
        figure, axes = style.panels(len(environments), height=2.9, per_row=2)
        for panel, env_id in zip(axes, environments, strict=True):
            here = speeds[speeds["env_id"] == env_id]
            for system, one in here.groupby("system", observed=True):
                one = one.sort_values("x")
                colour = look.colour(system)
                if ideal:
                    panel.plot(one["x"], one["ideal"], **IDEAL)
                panel.plot(one["x"], one["sps"], color=colour, marker=look.marker(system), ms=4)
                for row in one.itertuples():
                    panel.plot([row.x] * len(row.each), row.each, ".", color=style.INK, ms=3)
                    panel.annotate(
                        _note(row, bool(ideal)), (row.x, row.sps), (0, -8), textcoords="offset points",
                        ha="center", va="top", fontsize=7,
                    )  # fmt: skip
            _label_axes(panel, np.sort(here["x"].unique()))
            highest = max(here["each"].explode().max(), here["ideal"].max() if ideal else 0.0)
            if y == STEPS_PER_SECOND and highest >= LOGARITHMIC * here["sps"].min():
                _label_speeds(panel, here["sps"].min())
            else:
                panel.set_ylim(0, 1.15 * highest)
                panel.yaxis.set_major_formatter(style.short_numbers())
            if y != STEPS_PER_SECOND:
                panel.axhline(1, **IDEAL)
            panel.set_title(env_id)
            panel.set_xlabel(what)
            panel.set_ylabel(y)
        systems = [one for one in look.systems if one in set(speeds["system"])]
        handles = [
            Line2D([], [], color=look.colour(s), marker=look.marker(s), ms=4) for s in systems
        ]
        handles += [Line2D([], [], **IDEAL)] if ideal else []
        style.legend(figure, handles, [*map(look.name, systems), *([ideal] if ideal else [])])
        style.source_line(
            figure, style.sentence(style.counts_text(speeds["runs"], "seeds"), source)
        )
    return figure


def _note(row: object, ideal: bool) -> str:
    """Return the text beside a point: its speedup, or its speed and the share of the ideal one."""
    if np.isfinite(getattr(row, "speedup", np.nan)):
        return f"{row.speedup:.2f}×"
    speed = style.short_number(row.sps)
    return f"{speed}\n{row.sps / row.ideal:.0%}" if ideal else speed


def _label_axes(panel: mpl.axes.Axes, values: np.ndarray) -> None:
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(FixedLocator(values))
    panel.xaxis.set_major_formatter(style.short_numbers())
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlim(values[0] / 1.4, values[-1] * 1.4)


def _label_speeds(panel: mpl.axes.Axes, lowest: float) -> None:
    style.logarithmic(panel)
    panel.set_ylim(lowest / 3, None)  # room for the notes below the points
