"""Speed: steps per second of every system and setting, with every seed as a dot."""

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from plots import style

ROW = 0.2  # inches


def draw(speeds: pd.DataFrame, look: style.Look, source: str) -> Figure:
    """Draw one panel per environment, one bar per system and setting.

    Args:
      speeds: system, setting, env_id, sps (mean), runs, and each (the speeds of the single runs).
      look: names and colours.
      source: short description of the data's origin.
    """
    with mpl.rc_context(style.RC):
        environments = sorted(speeds["env_id"].unique())
        rows = style.place_rows(speeds, look)
        figure, axes = style.panels(len(environments), 0.8 + ROW * rows.height, header=0.1)
        for index, (panel, env_id) in enumerate(zip(axes, environments, strict=True)):
            here = speeds[speeds["env_id"] == env_id]
            largest = max((max(each, default=0.0) for each in here["each"]), default=1.0)
            for row in here.itertuples():
                position = rows.at[row.system, row.setting]
                colour = look.colour(row.system, row.setting)
                panel.barh(position, row.sps, height=0.8, color=colour, alpha=0.55)
                panel.plot(list(row.each), [position] * len(row.each), ".", color=style.INK, ms=3)
                end = max(row.sps, *row.each) + largest * 0.03
                panel.text(end, position, style.short_number(row.sps), va="center", fontsize=7)
            panel.set_title(env_id)
            panel.set_xlabel("steps per second")
            panel.set_xlim(0, largest * 1.22)
            style.thousands(panel)
            panel.xaxis.get_major_locator().set_params(nbins=5)
            style.label_rows(panel, rows, look, first=index % style.PANELS_PER_ROW == 0)
        counts = style.counts_text(speeds["runs"], "seeds")
        style.source_line(figure, style.sentence("dots: seeds", counts, source))
    return figure
