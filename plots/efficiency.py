"""Aggregate learning curves: a normalised score over all environments, against steps or wall time."""

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from plots import style
from plots.learning_curves import AXES, draw_curve

METRICS = {"median": "median", "iqm": "IQM", "mean": "mean", "optimality_gap": "optimality gap"}


def draw(
    curves: dict[tuple[str, str], pd.DataFrame], look: style.Look, source: str, what: str
) -> Figure:
    """Draw one panel per metric and axis.

    Args:
      curves: by metric and axis (`step` or `time`): system, setting, x, value, low, high, runs,
        environments.
      look: colours and line styles.
      source: short description of the data's origin.
      what: name of the score, such as `human-normalized score`.
    """
    with mpl.rc_context(style.RC):
        figure, axes = style.panels(len(curves), height=2.7, per_row=2)
        for panel, ((metric, axis), frame) in zip(axes, curves.items(), strict=True):
            for system, setting in style.rows_of(frame, look):
                one = frame[(frame["system"] == system) & (frame["setting"] == setting)]
                draw_curve(panel, one, system, setting, look)
            panel.set_xlabel(AXES[axis])
            panel.set_ylabel(f"{METRICS[metric]} {what}")
            panel.set_xlim(left=0)
            style.thousands(panel)
        drawn = pd.concat(curves.values())
        style.systems_and_settings_legend(figure, look, drawn)
        environments = style.counts_text(drawn["environments"], "environments")
        note = f"{style.counts_text(drawn['runs'])}, {environments}"
        bands = style.bands_text(drawn, "95% stratified bootstrap over seeds")
        ends = "a curve ends when its first run ends"
        style.source_line(figure, f"{style.sentence(bands, ends)}\n{style.sentence(note, source)}")
    return figure
