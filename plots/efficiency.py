"""Aggregate learning curves: a normalized score over all environments, against steps and wall time."""

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from plots import end_labels, style
from plots.learning_curves import AXES, draw_curve

METRICS = {"median": "median", "iqm": "IQM", "mean": "mean", "optimality_gap": "optimality gap"}


def draw(
    curves: pd.DataFrame,
    look: style.Look | None = None,
    source: str = "",
    what: str = "normalized score",
) -> Figure:
    """Draw one panel per metric and axis; against wall time only where it is known.

    Args:
      curves: rows of `analysis.learning_curves.aggregate_curve_table`: system, setting, metric, step,
        seconds, value, low, high, runs, environments.
      look: names, colours and lines; by default those of a figure that stands alone.
      source: short description of the data's origin.
      what: name of the score, such as `human-normalized score`.
    """
    look = look or style.look_for(curves)
    each = [
        (metric, x, frame)
        for metric, frame in curves.groupby("metric", sort=False)
        for x in AXES
        if frame[x].notna().any()
    ]
    with mpl.rc_context(style.RC):
        figure, axes = style.panels(len(each), height=2.7, per_row=2)
        for panel, (metric, x, frame) in zip(axes, each, strict=True):
            ends = []
            for system, setting in style.rows_of(frame, look):
                one = frame[(frame["system"] == system) & (frame["setting"] == setting)]
                draw_curve(panel, one, system, setting, look, x, bands=not look.labelled)
                ends += end_labels.ends_of(one, x, setting, look.colour(system, setting))
            panel.set_xlabel(AXES[x])
            panel.set_ylabel(f"{METRICS[metric]} {what}")
            panel.set_xlim(left=0)
            style.thousands(panel)
            if look.labelled:
                end_labels.label(panel, ends)
        style.systems_and_settings_legend(figure, look, curves)
        environments = style.counts_text(curves["environments"], "environments")
        note = f"{style.counts_text(curves['runs'])}, {environments}"
        bands = style.bands_text(
            curves, f"{style.level_text(curves)} stratified bootstrap over seeds"
        )
        bands = "" if look.labelled else bands
        time = "time: mean of the runs at the same step" if curves["seconds"].notna().any() else ""
        style.source_line(figure, f"{style.sentence(bands, time)}\n{style.sentence(note, source)}")
    return figure
