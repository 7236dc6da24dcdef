"""Speed: steps per second of every system and setting, with every seed as a dot."""

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from plots import style
from plots.final_scores import label_rows, row_positions


def draw(speeds: pd.DataFrame, look: style.Look, source: str) -> Figure:
    """Draw one panel per environment, one bar per system and setting.

    Args:
      speeds: system, setting, env_id, sps (mean), runs, and each (the speeds of the single runs).
      look: colours and line styles.
      source: short description of the data's origin.
    """
    with mpl.rc_context(style.RC):
        environments = sorted(speeds["env_id"].unique())
        rows = row_positions(speeds, look)
        figure, axes = style.panels(len(environments), height=0.8 + 0.2 * len(rows))
        for index, (panel, env_id) in enumerate(zip(axes, environments, strict=True)):
            here = speeds[speeds["env_id"] == env_id]
            largest = max((max(each, default=0.0) for each in here["each"]), default=1.0)
            for row in here.itertuples():
                position = rows[row.system, row.setting]
                panel.barh(
                    position,
                    row.sps,
                    height=0.85,
                    color=look.colour(row.system, row.setting),
                    edgecolor="white",
                    hatch=look.setting(row.setting).hatch,
                )
                panel.plot(list(row.each), [position] * len(row.each), ".", color="#222222", ms=3)
                panel.text(
                    max(row.sps, *row.each) + largest * 0.03,
                    position,
                    style.short_number(row.sps),
                    va="center",
                    fontsize=7,
                )
            panel.set_title(env_id)
            panel.set_xlabel("steps per second")
            panel.set_xlim(0, largest * 1.22)
            style.thousands(panel)
            panel.xaxis.get_major_locator().set_params(nbins=5)
            label_rows(panel, rows, first=index % style.PANELS_PER_ROW == 0)
        handles = [
            Patch(
                facecolor=look.colour(look.systems[0], setting)
                if len(look.systems) == 1
                else "#999999",
                edgecolor="white",
                hatch=look.setting(setting).hatch,
            )
            for setting in look.settings
        ]
        style.legend(figure, handles, look.settings)
        style.source_line(figure, style.sentence(style.seeds_text(speeds["runs"]), source))
    return figure
