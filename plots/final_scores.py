"""Final scores: the mean over seeds with its interval, and every seed as a dot."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from plots import style


def draw(scores: pd.DataFrame, look: style.Look, source: str) -> Figure:
    """Draw one panel per environment, one line per system and setting.

    Args:
      scores: system, setting, env_id, value, low, high (NaN without an interval), runs, and each
        (the scores of the single runs).
      look: colours and line styles.
      source: short description of the data's origin.
    """
    with mpl.rc_context(style.RC):
        environments = sorted(scores["env_id"].unique())
        rows = row_positions(scores, look)
        figure, axes = style.panels(len(environments), height=0.8 + 0.2 * len(rows))
        for index, (panel, env_id) in enumerate(zip(axes, environments, strict=True)):
            here = scores[scores["env_id"] == env_id]
            for row in here.itertuples():
                _draw_row(panel, row, rows[row.system, row.setting], look)
            _draw_seeds(panel, here, rows)
            panel.set_title(env_id)
            panel.set_xlabel("final return")
            label_rows(panel, rows, first=index % style.PANELS_PER_ROW == 0)
            panel.margins(x=0.12)
            panel.xaxis.get_major_locator().set_params(nbins=4)
        style.systems_and_settings_legend(figure, look, scores, lines=False)
        style.source_line(figure, style.sentence(style.seeds_text(scores["runs"]), source))
    return figure


def row_positions(frame: pd.DataFrame, look: style.Look) -> dict[tuple[str, str], float]:
    """Return the position of each system's and setting's row; settings of a system are adjacent."""
    gap = 0.6
    positions: dict[tuple[str, str], float] = {}
    for row, (system, setting) in enumerate(style.rows_of(frame, look)):
        systems = {name for name, _ in positions} - {system}
        positions[system, setting] = row + gap * len(systems)
    return positions


def label_rows(panel, rows: dict[tuple[str, str], float], first: bool) -> None:  # noqa: ANN001
    """Label the rows with the systems, from top to bottom, on the first panel of a row only."""
    systems = list(dict.fromkeys(system for system, _ in rows))
    middles = [
        float(np.mean([position for (name, _), position in rows.items() if name == system]))
        for system in systems
    ]
    panel.set_yticks(middles, systems if first else [""] * len(middles))
    panel.set_ylim(max(rows.values()) + 0.7, -0.7)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="y", visible=False)


def _draw_seeds(panel, here: pd.DataFrame, rows: dict[tuple[str, str], float]) -> None:  # noqa: ANN001
    """Draw every seed as a dot; equal scores lie beside each other, not on top of each other."""
    seeds = here[["system", "setting", "each"]].explode("each").astype({"each": float})
    seeds["row"] = [rows[pair] for pair in zip(seeds["system"], seeds["setting"], strict=True)]
    sns.swarmplot(
        seeds, x="each", y="row", orient="y", native_scale=True, size=2, color=style.GREY, ax=panel
    )
    panel.set_ylabel("")


def _draw_row(panel, row, position: float, look: style.Look) -> None:  # noqa: ANN001
    colour = look.colour(row.system, row.setting)
    filled = look.setting(row.setting).filled
    if np.isfinite(row.low):
        panel.plot([row.low, row.high], [position, position], color=colour, lw=2.2, alpha=0.7)
    panel.plot(
        row.value,
        position,
        look.marker(row.system),
        ms=6,
        color=colour,
        mfc=colour if filled else "white",
        mew=1.3,
    )
