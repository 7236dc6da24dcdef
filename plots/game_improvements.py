"""Improvement of one system over others, game by game: bars in the order of the improvement."""

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from plots import style

ROW = 0.1  # inches


def draw(
    improvements: pd.DataFrame,
    first: tuple[str, str],
    look: style.Look | None = None,
    source: str = "",
) -> Figure:
    """Draw one panel per other side, one bar per environment; the colour is that of the better side.

    Args:
      improvements: rows of `analysis.summary.game_improvements`.
      first: system and setting of the first side.
      look: names and colours; by default those of a figure that stands alone.
      source: short description of the data's origin.
    """
    look = look or style.look_of(
        [*improvements["system"], first[0]], [*improvements["setting"], first[1]]
    )
    sides = style.rows_of(improvements, look)
    longest = improvements.groupby(["system", "setting"], observed=True).size().max()
    with mpl.rc_context(style.RC):
        figure, axes = style.panels(len(sides), height=0.75 + ROW * longest, header=0.25)
        figure.suptitle(f"{side_name(*first, look)} over", fontsize=9)
        for panel, (system, setting) in zip(axes, sides, strict=True):
            here = improvements[
                (improvements["system"] == system) & (improvements["setting"] == setting)
            ].sort_values(["value", "env_id"], ascending=[False, True])
            at = np.arange(len(here))
            colours = [
                look.colour(*(first if value >= 0 else (system, setting)))
                for value in here["value"]
            ]
            panel.barh(at, here["value"], height=0.72, color=colours, alpha=0.75)
            panel.hlines(at, here["low"], here["high"], color=style.INK, lw=0.7)
            panel.axvline(0, color=style.INK, lw=0.8)
            names = [env_id.removesuffix("-v5") for env_id in here["env_id"]]
            panel.set_yticks(at, names, fontsize=5)
            panel.set_ylim(len(here) - 0.4, -0.6)
            panel.tick_params(axis="y", length=0, pad=1)
            panel.grid(axis="y", visible=False)
            ends = here[["value", "low", "high"]]
            _percent(panel, ends.min().min(), ends.max().max())
            panel.set_title(side_name(system, setting, look), fontsize=8)
        ranges = "lines: range over pairs of runs" if improvements["low"].notna().any() else ""
        counts = style.counts_text(improvements["runs"], "seeds")
        scale = "improvement, logarithmic beyond ±100%"
        style.source_line(figure, style.sentence(scale, ranges, counts, source))
    return figure


def side_name(system: str, setting: str, look: style.Look) -> str:
    """Return the name of a side, with its setting where there are several."""
    several = len(look.settings) > 1
    return f"{look.name(system)}, {setting}" if several else look.name(system)


def _percent(panel: Axes, low: float, high: float) -> None:
    """Give the x axis a scale in percent, linear up to 100%, with ticks at 0, 100% and its ends."""
    panel.set_xscale("symlog", linthresh=1.0)
    ticks = {0.0}
    for sign, end in ((-1.0, -low), (1.0, high)):
        power = int(np.ceil(np.log10(max(end, 1.0))))
        ticks |= {sign, sign * 10.0**power}
    ticks -= {-1.0} if low > -0.2 else set()
    panel.set_xticks(sorted(ticks))
    panel.set_xlim(min(ticks) * 1.2 - 0.25, max(ticks) * 1.2)
    panel.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{style.short_number(100 * value)}%")
    )
    panel.xaxis.set_minor_locator(NullLocator())
    panel.tick_params(axis="x", labelsize=6)
