"""Names at the ends of curves, where more settings are drawn than lines can distinguish."""

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy.optimize import isotonic_regression

from plots import style

SIZE = 6  # points
GAP = 1.25  # between the middles of two names, in heights of a line
ROOM = 0.34  # share of a panel for the names, for the longest of `LETTERS` letters
LETTERS = 12
TEXT = 0.8  # share of the room for the text, the rest for lines to it


class End(NamedTuple):
    """The last point of a curve, in the coordinates of the data."""

    name: str
    x: float
    y: float
    colour: str


def ends_of(curve: pd.DataFrame, x: str, name: str, colour: str) -> list[End]:
    """Return the end of a curve; [] for a curve without a value.

    Args:
      curve: rows with the column of x, and value.
      x: column on the x axis.
      name: of the curve.
      colour: of its name.
    """
    last = curve[curve["value"].notna() & curve[x].notna()].iloc[-1:]
    return [End(name, at, value, colour) for at, value in zip(last[x], last["value"], strict=True)]


def label(panel: Axes, ends: list[End]) -> None:
    """Write each name to the right of its curve, one below the other, with a thin line to the curve's end.

    Args:
      panel: with everything else drawn; its x axis is made longer.
      ends: of the curves.
    """
    if not ends:
        return
    low = panel.get_xlim()[0]
    longest = max(len(end.name) for end in ends)
    right = max(end.x for end in ends)
    room = min(ROOM * max(longest / LETTERS, 0.5), 0.6)
    panel.set_xlim(low, low + (max(right, low + 1e-9) - low) / (1 - room))
    panel.set_ylim(panel.get_ylim())
    height = panel.get_position().height * panel.figure.get_figheight() * 72  # points
    step = GAP * SIZE / height
    to_share = panel.transData + panel.transAxes.inverted()
    ends = sorted(reversed(ends), key=lambda end: end.y)  # of equal ends, the first is above
    wanted = np.array([to_share.transform((end.x, end.y))[1] for end in ends])
    start = 1 - TEXT * room
    for end, share in zip(ends, spread(wanted, step), strict=True):
        panel.text(
            start,
            share,
            end.name,
            transform=panel.transAxes,
            fontsize=SIZE,
            color=end.colour,
            verticalalignment="center",
        )
        panel.annotate(
            "",
            (end.x, end.y),
            (start, share),
            textcoords="axes fraction",
            arrowprops={
                "arrowstyle": "-",
                "color": style.GREY,
                "lw": 0.4,
                "shrinkA": 1,
                "shrinkB": 0,
            },
        )


def spread(wanted: np.ndarray, step: float) -> np.ndarray:
    """Return positions at least a step apart and as near as possible to those wanted, within 0 and 1.

    Args:
      wanted: ascending positions.
      step: smallest distance; smaller where the positions would not fit.

    Returns:
      Ascending positions, with the least sum of squared distances to those wanted.
    """
    steps = min(step, 1 / max(len(wanted) - 1, 1)) * np.arange(len(wanted))
    # Less their steps, positions at least a step apart are those that do not descend.
    return np.clip(isotonic_regression(wanted - steps).x, 0, 1 - steps[-1]) + steps
