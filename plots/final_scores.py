"""Final scores: the mean over seeds with its interval, and every seed as a dot."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.bootstrap import FEW_RUNS
from plots import style
from plots.learning_curves import MANY, SMALL_PER_ROW

ROW = 0.2  # inches


def draw(
    scores: pd.DataFrame,
    look: style.Look,
    source: str,
    bars: str = "95% bootstrap intervals",
) -> Figure:
    """Draw one panel per environment, one row per system and setting.

    Args:
      scores: system, setting, env_id, value, low, high (NaN without an interval), runs, and each
        (the scores of the single runs).
      look: names, colours and lines.
      source: short description of the data's origin.
      bars: what low and high are; of intervals, few seeds have none.
    """
    with mpl.rc_context(style.RC):
        environments = sorted(scores["env_id"].unique())
        small = len(environments) > MANY
        per_row = SMALL_PER_ROW if small else style.PANELS_PER_ROW
        rows = style.place_rows(scores, look)
        height = 0.55 + 0.1 * rows.height if small else 0.8 + ROW * rows.height
        figure, axes = style.panels(
            len(environments), height, header=0.45 if small else 0.1, per_row=per_row
        )
        for index, (panel, env_id) in enumerate(zip(axes, environments, strict=True)):
            here = scores[scores["env_id"] == env_id]
            for row in here.itertuples():
                _draw_row(panel, row, rows.at[row.system, row.setting], look, small)
            _draw_seeds(panel, here, rows, small)
            panel.set_title(env_id)
            panel.set_xlabel("final return")
            style.label_rows(panel, rows, look, first=not small and index % per_row == 0)
            panel.margins(x=0.12)
            panel.xaxis.get_major_locator().set_params(nbins=4)
            if small:
                style.shrink(panel)
        if small:
            style.systems_and_settings_legend(figure, look, scores)
        has_bars = any(map(_has_bar, scores.itertuples()))
        dots = "dots: seeds" if scores["each"].map(len).any() else ""
        words = f"bars: {bars}" if has_bars else ""
        words = style.sentence(dots, words, style.counts_text(scores["runs"], "seeds"), source)
        style.source_line(figure, words)
    return figure


def _draw_seeds(panel: Axes, here: pd.DataFrame, rows: style.Rows, small: bool) -> None:
    """Draw every seed as a dot; equal scores lie beside each other, not on top of each other."""
    seeds = here[["system", "setting", "each"]].explode("each").astype({"each": float})
    seeds["row"] = [rows.at[pair] for pair in zip(seeds["system"], seeds["setting"], strict=True)]
    if small:
        panel.plot(seeds["each"], seeds["row"], ".", color=style.GREY, ms=2)
        return
    sns.swarmplot(
        seeds, x="each", y="row", orient="y", native_scale=True, size=2, color=style.GREY, ax=panel
    )
    panel.set_ylabel("")


def _draw_row(panel: Axes, row, position: float, look: style.Look, small: bool) -> None:  # noqa: ANN001
    colour = look.colour(row.system, row.setting)
    filled = look.setting(row.setting).filled
    if _has_bar(row):
        panel.plot([row.low, row.high], [position, position], color=colour, lw=2.2, alpha=0.7)
    panel.plot(
        row.value,
        position,
        look.marker(row.system),
        ms=3.5 if small else 6,
        color=colour,
        mfc=colour if filled else "none",
        mew=1.3,
    )


def _has_bar(row) -> bool:  # noqa: ANN001
    return np.isfinite(row.low) and not row.runs < FEW_RUNS  # of published scores, runs is NaN
