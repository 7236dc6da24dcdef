"""What verdicts rest on: the difference in every environment, with its interval, beside the margin."""

import textwrap

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from plots import style

COLOURS = {"final": style.BLUE, "area": style.ORANGE}
LABELS = {"final": "final score", "area": "mean height of the curve"}
TITLE = 36  # characters of a line
WIDEST = 5.0  # margins: what lies beyond is drawn at the edge


def draw(verdicts: pd.DataFrame, source: str = "") -> Figure:
    """Draw one panel per pair, and in it one row per environment and outcome.

    Differences are drawn in units of the margin, which differs between environments: between -1 and 1 is what
    counts as equivalent.

    Args:
      verdicts: rows of `analysis.compare`: the names of a pair, verdict, by_environment.
      source: short description of the data's origin.
    """
    most = max(map(len, verdicts["by_environment"]), default=0)
    with mpl.rc_context(style.RC):
        figure, axes = style.panels(
            len(verdicts), height=1.0 + 0.19 * max(most, 1), header=0.3, per_row=2
        )
        for panel, (_, pair) in zip(axes, verdicts.iterrows(), strict=True):
            _draw_pair(panel, pd.DataFrame(pair["by_environment"]))
            panel.set_title(textwrap.fill(f"{_names(pair)}: {pair['verdict']}", TITLE))
            panel.set_xlabel("difference (second minus first), in margins")
        outcomes = {row["outcome"] for rows in verdicts["by_environment"] for row in rows}
        shown = [name for name in COLOURS if name in outcomes]
        handles = [
            mpl.lines.Line2D([], [], color=COLOURS[name], marker="o", ms=4, lw=1.5)
            for name in shown
        ]
        style.legend(figure, handles, [LABELS[name] for name in shown])
        bars = "lines: intervals of the two one-sided tests · pale: counts as equivalent"
        if any(
            abs(row["difference"]) > WIDEST * row["margin"]
            for rows in verdicts["by_environment"]
            for row in rows
        ):
            bars += f" · beyond {WIDEST:g} margins: at the edge"
        style.source_line(figure, style.sentence(bars, source))
    return figure


def _draw_pair(panel: mpl.axes.Axes, rows: pd.DataFrame) -> None:
    panel.axvspan(-1, 1, color=style.SHADE, zorder=0)
    panel.axvline(0, color=style.GREY, lw=0.8)
    panel.set_xlim(-WIDEST, WIDEST)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="y", visible=False)
    if rows.empty:
        panel.set_yticks([])
        return
    margins = rows["margin"].where(rows["margin"] > 0)
    for position, row in enumerate(rows.assign(unit=margins).itertuples()):
        at = np.array([row.low, row.difference, row.high]) / row.unit
        low, difference, high = np.nan_to_num(at.clip(-WIDEST, WIDEST))
        if np.isfinite(at[0]):
            panel.plot([low, high], [position] * 2, color=COLOURS[row.outcome], lw=1.5)
        panel.plot(difference, position, "o", color=COLOURS[row.outcome], ms=4, clip_on=False)
    first = rows["env_id"] != rows["env_id"].shift()
    panel.set_yticks(range(len(rows)), rows["env_id"].where(first, ""))
    panel.set_ylim(len(rows) - 0.4, -0.6)


def _names(pair: pd.Series) -> str:
    if "system_a" in pair:
        return f"{pair['system_a']} and {pair['system_b']}"
    return f"{pair['system']}, {pair['setting_a']} and {pair['setting_b']}"
