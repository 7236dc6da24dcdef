"""Policy lag: the age, in versions, of the policy that collected the learner's data."""

from collections.abc import Sequence
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import TICKUP

from plots import style

ROW = 0.42  # inches
HEIGHT = 0.66  # of a bar with all rollouts, relative to a row
BINS = 20
RARE = 0.02  # share of a row's rollouts at each end that does not extend the axis
MARK = {"color": style.INK, "mfc": "none", "ms": 6, "mew": 1.1}  # of a reference
# Mark of a mean: upwards from the baseline, because the row below begins closely under it.
MEAN = {"marker": TICKUP, "color": style.INK, "ms": 6, "mew": 1.6}


class Reference(NamedTuple):
    """Values to compare the mean of each row with: a prediction, or what a paper reports.

    Attributes:
      label: in the legend.
      marker: its marker.
      values: (system, setting, env_id) -> value.
    """

    label: str
    marker: str
    values: dict[tuple[str, str, str], float]


def draw(
    shares: pd.DataFrame,
    look: style.Look,
    source: str,
    what: str = "policy lag (versions)",
    references: Sequence[Reference] = (),
) -> Figure:
    """Draw one panel per environment, one row per system and setting.

    Args:
      shares: system, setting, env_id, value (policy lag, or another count of versions), share (of the
        rollouts), runs.
      look: names and colours.
      source: short description of the data's origin.
      what: name of the value.
      references: marked beside the mean.
    """
    with mpl.rc_context(style.RC):
        environments = sorted(shares["env_id"].unique())
        rows = style.place_rows(shares, look)
        figure, axes = style.panels(
            len(environments), 0.8 + ROW * rows.height, header=0.3 if references else 0.0
        )
        for index, (panel, env_id) in enumerate(zip(axes, environments, strict=True)):
            here = shares[shares["env_id"] == env_id]
            others = [v for one in references for key, v in one.values.items() if key[2] == env_id]
            edges = _edges(here, others)
            for (system, setting), one in here.groupby(["system", "setting"], observed=True):
                position = rows.at[system, setting]
                mean = _draw_row(panel, one, edges, position, look)
                panel.plot(mean, position + 0.5, **MEAN)
                for reference in references:
                    value = reference.values.get((system, setting, env_id))
                    if value is not None:
                        panel.plot(value, position + 0.5, reference.marker, **MARK)
            panel.set_title(env_id)
            panel.set_xlabel(what)
            panel.set_xlim(edges[0] - 0.2, edges[-1] + 0.42 * (edges[-1] - edges[0]))
            panel.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            first = index % style.PANELS_PER_ROW == 0
            style.label_rows(panel, rows, look, first=first, middle=0.2)
        if references:
            handles = [Line2D([], [], ls="", **MEAN)]
            handles += [Line2D([], [], ls="", marker=one.marker, **MARK) for one in references]
            style.legend(figure, handles, ["mean, measured", *(one.label for one in references)])
        words = "height: share of the rollouts; the number is that of the highest bar"
        counts = style.counts_text(shares["runs"], "seeds")
        style.source_line(figure, style.sentence(words, counts, source))
    return figure


def _edges(shares: pd.DataFrame, others: Sequence[float]) -> np.ndarray:
    """Return bins of one version each, or wider ones where the values spread far."""
    ends = [np.array([value for value in others if np.isfinite(value)])]
    for _, row in shares.groupby(["system", "setting"], observed=True):
        ordered = row.sort_values("value")
        reached = ordered["share"].cumsum() / ordered["share"].sum()
        ends.append(ordered["value"][(reached >= RARE) & (reached.shift(fill_value=0) <= 1 - RARE)])
    values = np.concatenate(ends).astype(float)
    low, high = np.floor(values.min() + 0.5), np.floor(values.max() + 0.5)
    width = max(1.0, np.ceil((high - low + 1) / BINS))
    return np.arange(low - 0.5, high + 0.5 + width, width)


def _draw_row(
    panel: Axes, shares: pd.DataFrame, edges: np.ndarray, row: float, look: style.Look
) -> float:
    """Draw the bars of a row, and return its mean."""
    values, weights = shares["value"].to_numpy(float), shares["share"].to_numpy(float)
    # the outermost bar includes rare values beyond the axis
    heights, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges, weights=weights)
    heights = heights / max(weights.sum(), 1e-12)
    baseline = row + 0.5
    system, setting = shares["system"].iloc[0], shares["setting"].iloc[0]
    panel.axhline(baseline, color=style.LINE, lw=0.6)
    middles = (edges[:-1] + edges[1:]) / 2
    panel.bar(
        middles,
        -heights * HEIGHT,
        width=np.diff(edges) * 0.9,
        bottom=baseline,
        color=look.colour(system, setting),
        alpha=0.55,
    )
    highest = int(np.argmax(heights))
    panel.text(
        middles[highest], baseline - heights[highest] * HEIGHT - 0.03, f"{heights[highest]:.0%}",
        ha="center", va="bottom", fontsize=6, color=style.GREY,
    )  # fmt: skip
    mean = float(np.average(values, weights=weights))
    panel.text(
        0.99, baseline - 0.3, f"mean {mean:.2f}", ha="right", va="center", fontsize=7,
        transform=panel.get_yaxis_transform(),
    )  # fmt: skip
    return mean
