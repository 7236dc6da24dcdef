"""Run times: means over environments and seeds."""

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from plots import style

ROW = 0.24  # inches


def draw(times: pd.DataFrame, look: style.Look, source: str) -> Figure:
    """Draw one bar per system and setting.

    Args:
      times: rows of `analysis.summary.run_times`: system, setting, seconds, runs, times_the_fastest.
      look: names and colours.
      source: short description of the data's origin.
    """
    with mpl.rc_context(style.RC):
        rows = style.place_rows(times, look)
        figure, (panel,) = style.panels(1, height=0.7 + ROW * rows.height, header=0.0)
        longest = times["seconds"].max()
        unit, name = (60, "min") if longest >= 120 else (1, "s")
        for row in times.itertuples():
            position, length = rows.at[row.system, row.setting], row.seconds / unit
            colour = look.colour(row.system, row.setting)
            panel.barh(position, length, height=0.7, color=colour, alpha=0.55)
            text = f"{length:,.1f} {name} ({row.times_the_fastest:.1f}×)"
            panel.text(length + longest / unit * 0.01, position, text, va="center", fontsize=7)
        style.label_rows(panel, rows, look, first=True)
        panel.set_xlim(0, longest / unit * 1.2)
        panel.set_xlabel("minutes per run" if unit == 60 else "seconds per run")
        style.source_line(figure, style.sentence(style.counts_text(times["runs"]), source))
    return figure
