"""Probability of improvement: how often a run of one system beats one of another, for every two systems."""

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from plots import style


def draw(improvements: pd.DataFrame, source: str = "") -> Figure:
    """Draw one row per pair of systems.

    Args:
      improvements: rows of `analysis.probability_of_improvement`: x, y, value, low, high, environments.
      source: short description of the data's origin.
    """
    with mpl.rc_context(style.RC):
        figure, (panel,) = style.panels(1, height=0.9 + 0.26 * len(improvements), header=0.0)
        for position, row in enumerate(improvements.itertuples()):
            if np.isfinite(row.low):
                panel.barh(
                    position,
                    row.high - row.low,
                    left=row.low,
                    height=0.55,
                    color=style.BLUE,
                    alpha=0.6,
                )
            panel.plot([row.value] * 2, [position - 0.33, position + 0.33], color=style.INK, lw=1.4)
        panel.axvline(0.5, color=style.GREY, lw=0.8, ls=(0, (4, 2)))
        labels = [f"{_name(row.x)} over {_name(row.y)}" for row in improvements.itertuples()]
        panel.set_yticks(range(len(improvements)), labels)
        panel.set_ylim(len(improvements) - 0.4, -0.6)
        panel.set_xlim(0, 1)
        panel.set_xlabel("probability that a run of the first beats one of the second")
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="y", visible=False)
        with_interval = improvements["low"].notna().any()
        bars = (
            f"bars: {style.level_text(improvements)} stratified bootstrap intervals"
            if with_interval
            else ""
        )
        environments = style.counts_text(improvements["environments"], "environments")
        style.source_line(figure, style.sentence(bars, environments, source))
    return figure


def _name(side: str) -> str:
    """Return a side without a setting that is unknown."""
    return side.removesuffix(", -")
