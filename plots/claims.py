"""HTS-RL's claims about run time and latency: formulas and simulations."""

from collections.abc import Sequence

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from plots import style

FORMULA = {"color": style.ORANGE, "lw": 1.8}
SIMULATED = {"color": style.INK, "ls": "", "marker": "o", "ms": 4}


def draw(claims: Sequence[tuple[str, str, pd.DataFrame]], source: str) -> Figure:
    """Draw one panel per claim, a line for its formula and dots for simulations.

    Args:
      claims: title, y axis, and rows with the independent variable in the first column, formula, simulated.
      source: short description of the data's origin.
    """
    with mpl.rc_context(style.RC):
        figure, axes = style.panels(len(claims), height=2.6)
        for panel, (title, what, frame) in zip(axes, claims, strict=True):
            x = frame.columns[0]
            panel.plot(frame[x], frame["formula"], **FORMULA)
            panel.plot(frame[x], frame["simulated"], **SIMULATED)
            if frame[x].min() > 0 and frame[x].max() / frame[x].min() > 50:
                panel.set_xscale("log", base=2)
                panel.xaxis.set_major_formatter(style.short_numbers())
            panel.set_ylim(0, None)
            panel.set_title(title)
            panel.set_xlabel(x)
            panel.set_ylabel(what)
        handles = [Line2D([], [], **FORMULA), Line2D([], [], **SIMULATED)]
        style.legend(figure, handles, ["formula", "simulation"])
        style.source_line(figure, source)
    return figure
