"""Final scores: the mean over seeds with its interval, and every seed as a dot."""

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from plots import style


def draw(scores: pd.DataFrame, look: style.Look, source: str) -> Figure:
    """Draw one panel per environment, one line per system and setting.

    Args:
      scores: system, setting, env_id, value, low, high (NaN without an interval), runs, and each:
        the scores of the single runs.
      look: colours and line styles.
      source: where the data come from, in a few words.
    """
    with mpl.rc_context(style.RC):
        environments = sorted(scores["env_id"].unique())
        rows = row_positions(look)
        figure, axes = style.panels(len(environments), height=0.8 + 0.2 * len(rows))
        for index, (panel, env_id) in enumerate(zip(axes, environments, strict=True)):
            for row in scores[scores["env_id"] == env_id].itertuples():
                _draw_row(panel, row, rows[row.system, row.setting], look)
            panel.set_title(env_id)
            panel.set_xlabel("final return")
            label_rows(panel, look, first=index % style.PANELS_PER_ROW == 0)
            panel.margins(x=0.12)
            panel.xaxis.get_major_locator().set_params(nbins=4)
        style.systems_and_settings_legend(figure, look, lines=False)
        style.source_line(figure, f"{style.seeds_text(scores['runs'])} · {source}")
    return figure


def row_positions(look: style.Look) -> dict[tuple[str, str], float]:
    """Return where the line of each system and setting is: settings of a system lie together."""
    gap = 0.6
    count = len(look.settings)
    return {
        (system, setting): s * (count + gap) + h
        for s, system in enumerate(look.systems)
        for h, setting in enumerate(look.settings)
    }


def label_rows(panel, look: style.Look, first: bool) -> None:  # noqa: ANN001
    """Label the rows with the systems, from top to bottom, on the first panel of a row only."""
    rows = row_positions(look)
    middles = [
        float(np.mean([rows[system, setting] for setting in look.settings]))
        for system in look.systems
    ]
    panel.set_yticks(middles, look.systems if first else [""] * len(middles))
    panel.set_ylim(max(rows.values()) + 0.7, -0.7)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="y", visible=False)


def _draw_row(panel, row, position: float, look: style.Look) -> None:  # noqa: ANN001
    colour = look.colour(row.system)
    filled = look.setting(row.setting).filled
    if np.isfinite(row.low):
        panel.plot([row.low, row.high], [position, position], color=colour, lw=2.2, alpha=0.7)
    panel.plot(list(row.each), [position] * len(row.each), ".", color=style.GREY, ms=3)
    panel.plot(
        row.value,
        position,
        look.marker(row.system),
        ms=6,
        color=colour,
        mfc=colour if filled else "white",
        mew=1.3,
    )
