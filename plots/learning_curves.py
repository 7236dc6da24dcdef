"""Learning curves: return against steps or against wall time, with bands over seeds."""

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots import style

MARKS = 4  # number of markers on a curve
# Shift of the markers from one system to the next: the golden ratio spreads any number of systems.
SHIFT = (5**0.5 - 1) / 2
AXES = {"step": "agent steps", "time": "wall time (s)"}


def draw(
    curves: pd.DataFrame,
    look: style.Look | None = None,
    source: str = "",
    what: str = "episodic return",
) -> Figure:
    """Draw one panel per environment.

    Args:
      curves: rows of `analysis.learning_curves.curve_table`: system, setting, env_id, axis (one for all),
        x, value, low, high, runs.
      look: colours and line styles; by default those of a figure that stands alone.
      source: short description of the data's origin.
      what: name of the value.
    """
    look = look or style.look_for(curves)
    axis = curves["axis"].iloc[0]
    with mpl.rc_context(style.RC):
        environments = sorted(curves["env_id"].unique())
        figure, axes = style.panels(len(environments), height=2.5)
        for panel, env_id in zip(axes, environments, strict=True):
            here = curves[curves["env_id"] == env_id]
            for (setting, system), curve in sorted(
                here.groupby(["setting", "system"], observed=True),
                key=lambda item: look.settings.index(item[0][0]),
            ):
                draw_curve(panel, curve, system, setting, look)
            panel.set_title(env_id)
            panel.set_xlabel(AXES[axis])
            panel.set_xlim(left=0)
            style.thousands(panel)
        for panel in axes[:: style.PANELS_PER_ROW]:
            panel.set_ylabel(what)
        style.systems_and_settings_legend(figure, look, curves)
        bands = style.bands_text(curves, "95% bootstrap over seeds")
        style.source_line(figure, style.sentence(style.seeds_text(curves["runs"]), bands, source))
    return figure


def draw_curve(
    panel: Axes, curve: pd.DataFrame, system: str, setting: str, look: style.Look
) -> None:
    """Draw one curve with its band (x, value, low, high; NaN without a band)."""
    colour, how = look.colour(system, setting), look.setting(setting)
    x, value, low, high = (curve[name].to_numpy(float) for name in ("x", "value", "low", "high"))
    if np.isfinite(low).any():
        panel.fill_between(x, low, high, color=colour, alpha=0.1, linewidth=0)
    marks = _marks(value, look.systems.index(system)) if how.filled else []
    panel.plot(
        x,
        value,
        color=colour,
        ls=how.linestyle,
        lw=how.linewidth,
        alpha=how.alpha,
        marker=look.marker(system),
        ms=4.5,
        markevery=marks,
        solid_capstyle="butt",
    )


def _marks(value: np.ndarray, index: int) -> list[int]:
    """Return the points of a curve that have a marker, which differ between systems.

    Coinciding curves are distinguished by their markers, so the markers must not coincide.
    """
    drawn = np.flatnonzero(np.isfinite(value))
    first = (index * SHIFT) % 1
    shares = (np.arange(MARKS) + first) / MARKS
    return drawn[(shares * len(drawn)).astype(int)].tolist() if len(drawn) else []
