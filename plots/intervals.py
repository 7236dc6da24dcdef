"""Aggregate scores with intervals: median, IQM, mean and optimality gap, as in rliable's figures."""

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from plots import style
from plots.efficiency import METRICS


def draw(
    aggregates: pd.DataFrame,
    look: style.Look | None = None,
    source: str = "",
    what: str = "normalized score",
) -> Figure:
    """Draw one panel per metric, one row per system and setting.

    Args:
      aggregates: rows of `analysis.summary.aggregate_frame`: system, setting, metric, value, low, high
        (NaN without an interval), runs, environments, note.
      look: names and colours; by default those of a figure that stands alone.
      source: short description of the data's origin.
      what: name of the score, such as `human-normalized score`.
    """
    look = look or style.look_for(aggregates)
    with mpl.rc_context(style.RC):
        rows = style.place_rows(aggregates, look)
        figure, axes = style.panels(
            len(METRICS), height=0.75 + 0.24 * rows.height, header=0.0, per_row=len(METRICS)
        )
        for index, (panel, (metric, label)) in enumerate(zip(axes, METRICS.items(), strict=True)):
            for row in aggregates[aggregates["metric"] == metric].itertuples():
                position = rows.at[row.system, row.setting]
                colour = look.colour(row.system, row.setting)
                panel.use_sticky_edges = False
                if np.isfinite(row.low):
                    panel.barh(
                        position, row.high - row.low, left=row.low, height=0.55, color=colour, alpha=0.6
                    )  # fmt: skip
                ends = [position - 0.33, position + 0.33]
                panel.plot([row.value] * 2, ends, color=style.INK, lw=1.4)
                if not np.isfinite(row.low):
                    panel.plot(row.value, position, look.marker(row.system), color=colour, ms=6)
            panel.set_title(label[0].upper() + label[1:])
            style.label_rows(panel, rows, look, first=index == 0)
            panel.margins(x=0.12)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=3))
        with_interval = aggregates["low"].notna().any()
        bars = (
            f"bars: {style.level_text(aggregates)} stratified bootstrap intervals"
            if with_interval
            else ""
        )
        counts = style.counts_text(aggregates["runs"])
        environments = style.counts_text(aggregates["environments"], "environments")
        note = ", ".join(part for part in (counts, environments) if part)
        first = style.sentence(what, bars, note, source)
        notes = [note for note in aggregates["note"].unique() if note]
        style.source_line(figure, "\n".join([first, *notes]))
    return figure
