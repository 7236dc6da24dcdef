"""Policy lag: the age, in versions, of the policy that collected the learner's data."""

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from plots import style

HEIGHT = 0.78  # height of a bar with all rollouts, relative to a row
BINS = 20
RARE = 0.02  # share of a row's rollouts at each end that does not extend the axis


def draw(
    shares: pd.DataFrame, look: style.Look, source: str, what: str = "policy lag (versions)"
) -> Figure:
    """Draw one panel per environment, one row per system and setting.

    Args:
      shares: system, setting, env_id, value (policy lag, or another count of versions), share (of the
        rollouts), runs.
      look: colours and line styles.
      source: short description of the data's origin.
      what: name of the value.
    """
    with mpl.rc_context(style.RC):
        environments = sorted(shares["env_id"].unique())
        rows = style.rows_of(shares, look)
        figure, axes = style.panels(len(environments), height=0.8 + 0.3 * len(rows))
        for index, (panel, env_id) in enumerate(zip(axes, environments, strict=True)):
            here = shares[shares["env_id"] == env_id]
            edges = _edges(here)
            for (system, setting), one in here.groupby(["system", "setting"], observed=True):
                _draw_row(panel, one, edges, rows.index((system, setting)), look)
            panel.set_title(env_id)
            panel.set_xlabel(what)
            panel.set_xlim(edges[0] - 0.2, edges[-1] + 0.35 * (edges[-1] - edges[0]))
            panel.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            labels = [f"{system}\n{setting}" for system, setting in rows]
            first = index % style.PANELS_PER_ROW == 0
            positions = np.arange(len(rows)) + 0.6
            panel.set_yticks(positions, labels if first else [""] * len(rows), fontsize=7)
            panel.set_ylim(len(rows) + 0.1, 0)
            panel.tick_params(axis="y", length=0)
            panel.grid(axis="y", visible=False)
        style.source_line(
            figure,
            style.sentence(
                "height: share of rollouts; right: mean", style.seeds_text(shares["runs"]), source
            ),
        )
    return figure


def _edges(shares: pd.DataFrame) -> np.ndarray:
    """Return bins of one version each, or wider ones where the values spread far."""
    ends = []
    for _, row in shares.groupby(["system", "setting"], observed=True):
        ordered = row.sort_values("value")
        reached = ordered["share"].cumsum() / ordered["share"].sum()
        ends.append(ordered["value"][(reached >= RARE) & (reached.shift(fill_value=0) <= 1 - RARE)])
    values = np.concatenate(ends).astype(float)
    low, high = np.floor(values.min() + 0.5), np.floor(values.max() + 0.5)
    width = max(1.0, np.ceil((high - low + 1) / BINS))
    return np.arange(low - 0.5, high + 0.5 + width, width)


def _draw_row(panel, shares: pd.DataFrame, edges: np.ndarray, row: int, look: style.Look) -> None:  # noqa: ANN001
    values, weights = shares["value"].to_numpy(float), shares["share"].to_numpy(float)
    # the outermost bar includes rare values beyond the axis
    heights, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges, weights=weights)
    baseline = row + 1.0
    system, setting = shares["system"].iloc[0], shares["setting"].iloc[0]
    panel.axhline(baseline, color="#bbbbbb", lw=0.6)
    panel.bar(
        (edges[:-1] + edges[1:]) / 2,
        -heights * HEIGHT / max(weights.sum(), 1e-12),
        width=np.diff(edges) * 0.9,
        bottom=baseline,
        color=look.colour(system, setting),
        edgecolor="white",
        hatch=look.setting(setting).hatch,
    )
    mean = float(np.average(values, weights=weights))
    panel.text(
        0.99, baseline - 0.35, f"{mean:.2f}", ha="right", va="center", fontsize=7,
        transform=panel.get_yaxis_transform(),
    )  # fmt: skip
