"""Learning curves: return against steps or against wall time, with the single runs and bands over seeds."""

import itertools

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.bootstrap import FEW_RUNS
from plots import end_labels, style

MARKS = 4  # number of markers on a curve
# Shift of the markers from one system to the next: the golden ratio spreads any number of systems.
SHIFT = (5**0.5 - 1) / 2
AXES = {"step": "agent steps", "seconds": "wall time (s)"}
MANY = 12  # environments, beyond which panels are small
SMALL_PER_ROW = 7


def draw(
    curves: pd.DataFrame,
    look: style.Look | None = None,
    source: str = "",
    what: str = "episodic return",
    x: str = "step",
    runs: pd.DataFrame | None = None,
) -> Figure:
    """Draw one panel per environment; of many settings, one per system and environment.

    Args:
      curves: rows of `analysis.learning_curves.curve_table`: system, setting, env_id, step, seconds, value,
        low, high, runs.
      look: names, colours and lines; by default those of a figure that stands alone.
      source: short description of the data's origin.
      what: name of the value; a loss has a logarithmic axis.
      x: column on the x axis, one of `AXES`.
      runs: rows of `analysis.learning_curves.run_table`, drawn thin.
    """
    look = look or style.look_for(curves)
    with mpl.rc_context(style.RC):
        environments = sorted(curves["env_id"].unique())
        small = len(environments) > MANY
        per_row = SMALL_PER_ROW if small else style.PANELS_PER_ROW
        labelled = labels_settings(curves, look)
        if labelled:
            runs = None  # beside so many curves they would hide each other
            drawn = set(zip(curves["system"], curves["env_id"], strict=True))
            pairs = itertools.product(look.systems, environments)
            parts = [(env_id, [system]) for system, env_id in pairs if (system, env_id) in drawn]
            per_row = min(per_row, len(environments))
        else:
            parts = [(env_id, list(look.systems)) for env_id in environments]
        height = 1.05 if small else 2.9 if labelled else 2.5
        figure, axes = style.panels(len(parts), height, per_row=per_row)
        for panel, (env_id, systems) in zip(axes, parts, strict=True):
            here = curves[(curves["env_id"] == env_id) & curves["system"].isin(systems)]
            if runs is not None:
                _draw_runs(panel, runs[runs["env_id"] == env_id], look, x, small)
            ends = []
            for (setting, system), curve in sorted(
                here.groupby(["setting", "system"], observed=True),
                key=lambda item: look.settings.index(item[0][0]),
            ):
                several = curve["runs"].max() >= FEW_RUNS
                bands = several and not labelled
                draw_curve(panel, curve, system, setting, look, x, small, bands)
                ends += end_labels.ends_of(curve, x, setting, look.colour(system, setting))
            panel.set_title(f"{look.name(systems[0])}\n{env_id}" if labelled else env_id)
            panel.set_xlabel(AXES[x])
            panel.set_xlim(left=0)
            style.thousands(panel)
            if what.endswith("loss"):
                style.logarithmic(panel)
            if small:
                _shrink(panel)
            if labelled:
                end_labels.label(panel, ends)
        if small:
            figure.supylabel(what, fontsize=8)
        for panel in [] if small else axes[::per_row]:
            panel.set_ylabel(what)
        if not labelled:
            style.systems_and_settings_legend(figure, look, curves)
        bands = style.bands_text(
            curves[curves["runs"] >= FEW_RUNS], f"{style.level_text(curves)} bootstrap over seeds"
        )
        bands = "" if labelled else bands
        thin = "thin: single runs" if _has_several(runs) else ""
        counts = style.counts_text(curves["runs"], "seeds")
        axis = AXES[x] if small else ""
        style.source_line(figure, style.sentence(axis, counts, bands, thin, source))
    return figure


def labels_settings(curves: pd.DataFrame, look: style.Look) -> bool:
    """Return whether curves have the names of their settings, and neither single runs nor bands."""
    return look.labelled and curves["env_id"].nunique() <= MANY


def draw_curve(
    panel: Axes,
    curve: pd.DataFrame,
    system: str,
    setting: str,
    look: style.Look,
    x: str = "step",
    small: bool = False,
    bands: bool = True,
) -> None:
    """Draw one curve with its band.

    Args:
      panel: the panel.
      curve: rows with the column of x, and value, low, high (NaN without a band), runs.
      system: whose colour and marker it has.
      setting: whose line it has.
      look: names, colours and lines.
      x: column on the x axis.
      small: without markers, in a small panel.
      bands: whether there are runs enough for a band.
    """
    colour, how = look.colour(system, setting), look.setting(setting)
    curve = _thinned(curve) if small else curve
    at, value, low, high = (curve[name].to_numpy(float) for name in (x, "value", "low", "high"))
    if bands and np.isfinite(low).any():
        panel.fill_between(at, low, high, color=colour, alpha=0.13, linewidth=0)
    marks = _marks(value, look.systems.index(system)) if how.filled and not small else []
    panel.plot(
        at,
        value,
        color=colour,
        ls=how.linestyle,
        lw=how.linewidth * (0.6 if small else 1.0),
        alpha=how.alpha,
        marker=look.marker(system),
        ms=4.5,
        markevery=marks,
        solid_capstyle="butt",
    )


def _thinned(curve: pd.DataFrame) -> pd.DataFrame:
    """Return every other point of a curve, the last among them: as many as a small panel can show."""
    return curve.iloc[(len(curve) - 1) % 2 :: 2]


def _draw_runs(panel: Axes, runs: pd.DataFrame, look: style.Look, x: str, small: bool) -> None:
    """Draw the single runs of systems and settings that have several."""
    for (system, setting), group in runs.groupby(["system", "setting"], observed=True):
        if group["run"].nunique() > 1:
            colour = look.colour(system, setting)
            for _, run in group.groupby("run", sort=False):
                run = _thinned(run) if small else run
                panel.plot(run[x], run["value"], color=colour, lw=0.5, alpha=0.35, zorder=1.5)


def _has_several(runs: pd.DataFrame | None) -> bool:
    if runs is None or not len(runs):
        return False
    names = ["system", "setting", "env_id"]
    return bool((runs.groupby(names, observed=True)["run"].nunique() > 1).any())


def _shrink(panel: Axes) -> None:
    style.shrink(panel)
    if panel.get_yscale() == "log":
        panel.yaxis.get_major_locator().set_params(numticks=3)
    else:
        panel.yaxis.get_major_locator().set_params(nbins=3)


def _marks(value: np.ndarray, index: int) -> list[int]:
    """Return the points of a curve that have a marker, which differ between systems.

    Coinciding curves are distinguished by their markers, so the markers must not coincide.
    """
    drawn = np.flatnonzero(np.isfinite(value))
    first = (index * SHIFT) % 1
    shares = (np.arange(MARKS) + first) / MARKS
    return drawn[(shares * len(drawn)).astype(int)].tolist() if len(drawn) else []
