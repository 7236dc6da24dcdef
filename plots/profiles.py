"""Performance profiles: the share of runs that score more than tau, for every tau."""

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from plots import style
from plots.learning_curves import draw_curve


def draw(
    profiles: pd.DataFrame,
    look: style.Look | None = None,
    source: str = "",
    what: str = "normalized score",
) -> Figure:
    """Draw one panel with a profile per system and setting.

    Args:
      profiles: rows of `analysis.summary.profiles`: system, setting, tau, value, low, high, runs.
      look: names, colours and lines; by default those of a figure that stands alone.
      source: short description of the data's origin.
      what: name of tau, such as `human-normalized score`.
    """
    look = look or style.look_for(profiles)
    with mpl.rc_context(style.RC):
        figure, (panel,) = style.panels(1, height=3.0)
        for system, setting in style.rows_of(profiles, look):
            one = profiles[(profiles["system"] == system) & (profiles["setting"] == setting)]
            draw_curve(panel, one, system, setting, look, "tau")
        panel.set_xlabel(f"{what} (tau)")
        panel.set_ylabel("share of runs above tau")
        panel.set_ylim(0, 1.02)
        panel.set_xlim(profiles["tau"].min(), profiles["tau"].max())
        style.systems_and_settings_legend(figure, look, profiles)
        bands = style.bands_text(
            profiles, f"{style.level_text(profiles)} stratified bootstrap over seeds"
        )
        style.source_line(
            figure, style.sentence(style.counts_text(profiles["runs"]), bands, source)
        )
    return figure
