"""Style of all figures: colours, line styles, sizes, captions, file formats.

Each system has a colour (and a marker, for print without colour), each hardware setting a line style. If
there is only one system, its settings also have colours. Curves of settings that agree coincide, so the
first setting is drawn wide and pale and the others thin and dark on top of it: both remain visible.
"""

import io
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from analysis.tables import UNKNOWN
from cleanba.record import replace_file

# Okabe and Ito's colour-blind-safe palette, without yellow.
PALETTE = ("#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#000000")
# One more than colours: the eighth system has the first colour, but its own marker.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GREY = "#777777"

WIDTH = 8.0  # inches
PANELS_PER_ROW = 3
DPI = 200
CHARACTERS_PER_INCH = 17  # of a caption: DejaVu Sans at 7 points, with room for wide letters

RC = {
    "font.size": 8,
    "font.family": "DejaVu Sans",  # part of matplotlib: the same font on every machine
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "path",
    "svg.hashsalt": "cleanba",  # the same figure gives the same bytes
    "text.parse_math": False,  # show dollar signs in names literally
}


class SettingStyle(NamedTuple):
    """The line style of a hardware setting."""

    linestyle: str | tuple
    linewidth: float
    alpha: float
    filled: bool
    hatch: str


SETTING_STYLES = (
    SettingStyle("-", 3.4, 0.45, True, ""),
    SettingStyle((0, (4, 2)), 1.3, 1.0, False, "////"),
    SettingStyle((0, (1, 1.5)), 1.5, 1.0, False, "...."),
    SettingStyle((0, (6, 2, 1, 2)), 1.2, 1.0, False, "xxxx"),
    SettingStyle("-", 0.8, 1.0, False, "----"),
)


ONLY_SETTING = SettingStyle("-", 1.8, 1.0, True, "")  # a single setting needs no wide pale line


class Look(NamedTuple):
    """Assignment of colours to systems and of line styles to settings, for all figures of a page."""

    systems: tuple[str, ...]
    settings: tuple[str, ...]

    def colour(self, system: str, setting: str) -> str:
        """Return the colour of a system, or of a setting if there is only one system."""
        index = self.systems.index(system)
        if len(self.systems) == 1:
            index = self.settings.index(setting)
        return PALETTE[index % len(PALETTE)]

    def marker(self, system: str) -> str:
        """Return the marker of a system."""
        return MARKERS[self.systems.index(system) % len(MARKERS)]

    def setting(self, setting: str) -> SettingStyle:
        """Return the style of a hardware setting."""
        if len(self.settings) == 1:
            return ONLY_SETTING
        return SETTING_STYLES[self.settings.index(setting) % len(SETTING_STYLES)]


class Saved(NamedTuple):
    """A figure on disk."""

    name: str
    png: Path
    svg: Path


def look_for(frame: pd.DataFrame) -> Look:
    """Return the look of a figure that stands alone: of the systems and settings of its table."""
    return look_of(frame["system"], frame["setting"])


def look_of(systems: Iterable[str], settings: Iterable[str]) -> Look:
    """Give every system a colour and every setting a line style."""
    return Look(tuple(sorted(set(systems))), tuple(sorted(set(settings), key=setting_order)))


def rows_of(frame: pd.DataFrame, look: Look) -> list[tuple[str, str]]:
    """Return the pairs of system and setting in a table, from the top of a figure to its bottom."""
    present = set(zip(frame["system"], frame["setting"], strict=True))
    return [(a, b) for a in look.systems for b in look.settings if (a, b) in present]


def setting_order(name: str) -> tuple:
    """Return the sort key of settings: shorter names, which have fewer devices, come first."""
    return (len(name), name)


def panels(
    count: int, height: float, header: float = 0.45, per_row: int = PANELS_PER_ROW
) -> tuple[Figure, list[Axes]]:
    """Make a figure with a number of panels.

    Args:
      count: number of panels.
      height: of a row, inches.
      header: height for the legend, inches.
      per_row: panels in a row.
    """
    columns = min(max(count, 1), per_row)
    rows = -(-max(count, 1) // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.09)  # room for the last tick label of a panel
    figure = Figure(figsize=(WIDTH, rows * height + header), dpi=DPI, layout=layout)
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def systems_and_settings_legend(
    figure: Figure, look: Look, drawn: pd.DataFrame, lines: bool = True
) -> None:
    """Put a legend of the drawn systems (colours) and settings (line styles) above the panels."""
    one_system = len(look.systems) == 1
    systems = [system for system in look.systems if system in set(drawn["system"])]
    settings = [setting for setting in look.settings if setting in set(drawn["setting"])]
    if systems and look.settings == (UNKNOWN,):
        settings = []
    if one_system and len(look.settings) > 1:
        systems = []
    handles = [
        Line2D(
            [], [], color=look.colour(system, look.settings[0]), lw=2.2, marker=look.marker(system), ms=4.5
        )
        for system in systems
    ]  # fmt: skip
    for setting in settings:
        style = look.setting(setting)
        colour = look.colour(look.systems[0], setting) if one_system else "#444444"
        handles.append(
            Line2D([], [], color=colour, ls=style.linestyle, lw=style.linewidth, alpha=style.alpha)
            if lines
            else Line2D(
                [],
                [],
                color=colour,
                ls="",
                marker="o",
                mfc=colour if style.filled else "white",
            )
        )
    legend(figure, handles, [*systems, *settings], "" if systems else look.systems[0])


def legend(figure: Figure, handles: Sequence, labels: Sequence[str], title: str = "") -> None:
    """Put a legend above the panels, in as many columns as fit."""
    longest = max(map(len, labels), default=1)
    columns = max(1, min(len(labels), int(WIDTH / (0.55 + 0.075 * longest))))
    figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=columns,
        handlelength=2.8,
        title=title or None,
    )


def source_line(figure: Figure, text: str) -> None:
    """Write the number of seeds and the source of the data below the panels, wrapped to its width."""
    width = int(figure.get_figwidth() * CHARACTERS_PER_INCH)
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width)]
    figure.supxlabel("\n".join(lines), fontsize=7, color=GREY, x=0.995, ha="right")


def seeds_text(counts: Iterable[int]) -> str:
    """Format the number of seeds in a figure: `3 seeds`, or `1 to 3 seeds`; '' if unknown."""
    values = sorted(set(int(count) for count in counts if pd.notna(count)))
    if not values:
        return ""
    low, high = values[0], values[-1]
    word = "seed" if high == 1 else "seeds"
    return f"{high} {word}" if low == high else f"{low} to {high} {word}"


def counts_text(counts: Iterable[float], what: str = "runs") -> str:
    """Format the number of runs of an aggregate: `6 runs`, `3 to 6 runs`; '' if unknown."""
    values = sorted(set(int(count) for count in counts if pd.notna(count)))
    if not values:
        return ""
    low, high = values[0], values[-1]
    what = what.removesuffix("s") if high == 1 else what
    return f"{high:,} {what}" if low == high else f"{low:,} to {high:,} {what}"


def sentence(*parts: str) -> str:
    """Join the parts of a caption that are not empty."""
    return " · ".join(part for part in parts if part)


def bands_text(drawn: pd.DataFrame, what: str) -> str:
    """Describe the bands of a figure; '' if it has none."""
    return f"bands: {what}" if drawn["low"].notna().any() else ""


def row_label(system: str, setting: str, look: Look) -> str:
    """Return the label of a row: the system alone if there is only one setting."""
    return system if len(look.settings) == 1 else f"{system}, {setting}"


def thousands(axis: Axes) -> None:
    """Write large numbers on the x axis as 10k, 5M."""
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def short_number(value: float) -> str:
    """Format a number of steps or steps per second briefly: 950, 1.2k, 50k, 1.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def lay_out(figure: Figure) -> None:
    """Compute the layout of a figure once, because it takes as long as drawing it."""
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        figure.set_layout_engine("none")


def save(figure: Figure, folder: Path, name: str) -> Saved:
    """Save a figure as PNG and SVG; the same figure gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    with mpl.rc_context(RC):
        lay_out(figure)
        for path, metadata in ((png, {"Software": None}), (svg, {"Date": None, "Creator": None})):
            content = io.BytesIO()
            figure.savefig(content, format=path.suffix[1:], metadata=metadata)
            replace_file(path, content.getvalue())
    return Saved(name, png, svg)
