"""Style of all figures: the looks of systems and settings, sizes, captions, file formats.

A system has the same name, colour and marker on every figure. Its hardware settings have its colour and
differ in their line; rows of bars and dots are labelled with them. SVG files have a second set of colours,
which browsers use in the dark.
"""

import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.bootstrap import FEW_RUNS, LEVEL
from analysis.output import span
from cleanba.record import replace_file

# Colours on white -> the same on the background of dark pages. Each has a contrast of at least 4.5:1, and
# those of systems are at least 14 apart in CIELAB for people with normal sight, protanopia and deuteranopia.
BLUE, CYAN, ORANGE, OLIVE = "#1250d4", "#0b5992", "#b3560e", "#503610"
GREEN, PURPLE, PINK, INK, SLATE = "#2b6a38", "#5d30a4", "#a2255c", "#1c1e21", "#6a6686"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, CYAN, PINK, INK, OLIVE, SLATE)
GREY, LINE, GRID, SHADE, PAPER = "#5c636b", "#a9afb6", "#e4e4e4", "#eeeeee", "#ffffff"
DARK = {
    BLUE: "#7fb0ff", CYAN: "#579ec1", ORANGE: "#ff7a3d", OLIVE: "#dae55e", GREEN: "#5bf9a4",
    PURPLE: "#aa7eff", PINK: "#fd558f", INK: "#e6e8ea", SLATE: "#809995", GREY: "#a2a9b1",
    LINE: "#5a6169", GRID: "#2c3136", SHADE: "#24282d", PAPER: "#16181b",
}  # fmt: skip

SHADES = 6  # of a colour, for the settings of a single system


def shade(colour: str, step: int, dark: bool = False) -> str:
    """Return a colour mixed with black, or with white in the dark: 0 is the colour itself."""
    share = 0.8 * step / (SHADES - 1)
    towards = 255 if dark else 0
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + share * (towards - part)):02x}" for part in parts)


DARK |= {
    shade(colour, step): shade(DARK[colour], step, dark=True)
    for colour in PALETTE
    for step in range(1, SHADES)
}

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "p", "h")


class SystemLook(NamedTuple):
    """The look of a system."""

    name: str
    colour: str
    marker: str


SYSTEMS: Mapping[str, SystemLook] = {
    "cleanba_ppo": SystemLook("Cleanba PPO", BLUE, "o"),
    "cleanba_ppo-sync": SystemLook("Cleanba PPO (synchronous)", CYAN, "s"),
    "cleanba_impala": SystemLook("Cleanba IMPALA", ORANGE, "^"),
    "cleanba_impala-sync": SystemLook("Cleanba IMPALA (synchronous)", OLIVE, "v"),
    "cleanba_impala-original": SystemLook("Cleanba IMPALA (original arithmetic)", PINK, "D"),
    "cleanrl_ppo": SystemLook("CleanRL PPO", INK, "D"),
    "monobeast": SystemLook("monobeast IMPALA", PURPLE, "P"),
    "moolib": SystemLook("moolib IMPALA", GREEN, "X"),
    "hts_rl_ppo": SystemLook("HTS-RL PPO", PINK, "*"),
    "hts_rl_ppo-sync": SystemLook("HTS-RL PPO (synchronous)", OLIVE, "p"),
    "hts_rl_a2c": SystemLook("HTS-RL A2C", GREEN, "h"),
    "hts_rl_a2c-sync": SystemLook("HTS-RL A2C (synchronous)", CYAN, "D"),
    "ppo_microrts_masking": SystemLook("PPO, invalid actions masked", BLUE, "o"),
    "ppo_microrts_naive": SystemLook("PPO, naive masking", CYAN, "s"),
    "ppo_microrts_removed": SystemLook("PPO, mask removed", PURPLE, "^"),
    "ppo_microrts_penalty-0": SystemLook("PPO, penalty 0", INK, "D"),
    "ppo_microrts_penalty-0.01": SystemLook("PPO, penalty 0.01", ORANGE, "v"),
    "ppo_microrts_penalty-0.1": SystemLook("PPO, penalty 0.1", GREEN, "P"),
    "ppo_microrts_penalty-1": SystemLook("PPO, penalty 1", PINK, "X"),
    "action_guidance_sparse": SystemLook("PPO, sparse reward", INK, "o"),
    "action_guidance_sparse-plo": SystemLook("PPO, sparse reward, positive learning", SLATE, "s"),
    "action_guidance_shaped": SystemLook("PPO, shaped reward", ORANGE, "^"),
    "action_guidance_long": SystemLook("Long guidance", BLUE, "D"),
    "action_guidance_long-plo": SystemLook("Long guidance, positive learning", CYAN, "v"),
    "action_guidance_short": SystemLook("Short guidance", PURPLE, "P"),
    "action_guidance_short-plo": SystemLook("Short guidance, positive learning", PINK, "X"),
    "action_guidance_mixed": SystemLook("Mixed policy", GREEN, "*"),
    "action_guidance_mixed-plo": SystemLook("Mixed policy, positive learning", OLIVE, "h"),
    "schemes_ppo-single-threaded": SystemLook("PPO, one thread", INK, "o"),
    "schemes_ppo-dppo": SystemLook("PPO, DPPO", BLUE, "s"),
    "schemes_ppo-ddppo": SystemLook("PPO, DD-PPO", CYAN, "^"),
    "schemes_ppo-appo": SystemLook("PPO, APPO", GREEN, "D"),
    "schemes_ppo-impala": SystemLook("PPO, IMPALA's scheme", PURPLE, "v"),
    "schemes_ppo-rapid": SystemLook("PPO, Rapid", ORANGE, "P"),
    "schemes_ppo-async-rapid": SystemLook("PPO, asynchronous Rapid", PINK, "X"),
    "schemes_impala-single-threaded": SystemLook("IMPALA, one thread", SLATE, "*"),
    "schemes_impala-impala": SystemLook("IMPALA, IMPALA's scheme", OLIVE, "h"),
    "schemes_sac-single-threaded": SystemLook("SAC, one thread", BLUE, "p"),
    "schemes_sac-dppo": SystemLook("SAC, DPPO", CYAN, "s"),
    "schemes_sac-ddppo": SystemLook("SAC, DD-PPO", PURPLE, "^"),
    "schemes_sac-appo": SystemLook("SAC, APPO", GREEN, "D"),
    "schemes_sac-rapid": SystemLook("SAC, Rapid", ORANGE, "P"),
    "schemes_sac-async-rapid": SystemLook("SAC, asynchronous Rapid", PINK, "X"),
    "schemes_a2c-single-threaded": SystemLook("A2C, one thread", BLUE, "o"),
    "schemes_dqn-single-threaded": SystemLook("DQN, one thread", ORANGE, "s"),
    "schemes_rainbow-single-threaded": SystemLook("Rainbow, one thread", GREEN, "^"),
    "schemes_dqn-ape-x": SystemLook("Ape-X DQN", PURPLE, "D"),
    "schemes_r2d2-single-threaded": SystemLook("R2D2, one thread", PINK, "v"),
    "schemes_ddpg-single-threaded": SystemLook("DDPG, one thread", ORANGE, "o"),
    "schemes_td3-single-threaded": SystemLook("TD3, one thread", GREEN, "s"),
    "schemes_mpo-single-threaded": SystemLook("MPO, one thread", PURPLE, "^"),
    "schemes_mpc-single-threaded": SystemLook("MPC, one thread", PINK, "D"),
}

WIDTH = 8.0  # inches
PANELS_PER_ROW = 3
DPI = 200
CHARACTERS_PER_INCH = 17  # of a caption: DejaVu Sans at 7 points, with room for wide letters
HEADING = 0.9  # rows that the name of a system takes above its settings

RC = {
    "font.size": 8,
    "font.family": "DejaVu Sans",  # part of matplotlib: the same font on every machine
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "legend.fontsize": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "cleanba",  # the same figure gives the same bytes
    "text.parse_math": False,  # show dollar signs in names literally
}


class SettingStyle(NamedTuple):
    """The line of a hardware setting."""

    linestyle: str | tuple
    linewidth: float
    alpha: float
    filled: bool


# Curves of settings that agree coincide. The first is wide and pale, and the others lie on it, so that both
# remain visible.
SETTING_STYLES = (
    SettingStyle("-", 3.4, 0.45, True),
    SettingStyle((0, (4, 2)), 1.3, 1.0, False),
    SettingStyle((0, (1, 1.5)), 1.5, 1.0, False),
    SettingStyle((0, (6, 2, 1, 2)), 1.2, 1.0, False),
    SettingStyle("-", 0.8, 1.0, False),
)


ONLY_SETTING = SettingStyle("-", 1.8, 1.0, True)  # a single setting needs no wide pale line


LABELLED_SETTING = SettingStyle("-", 1.1, 1.0, False)


class Look(NamedTuple):
    """The looks of the systems and settings of a page.

    Attributes:
      systems: in the order of rows and legends.
      settings: likewise.
    """

    systems: tuple[str, ...]
    settings: tuple[str, ...]

    @property
    def labelled(self) -> bool:
        """Whether curves have the names of their settings, because lines cannot distinguish as many."""
        return len(self.settings) > len(SETTING_STYLES)

    def name(self, system: str) -> str:
        """Return the display name of a system."""
        return name_of(system)

    def colour(self, system: str, setting: str = "") -> str:
        """Return the colour of a system; settings of a single system, or many settings, are its shades."""
        colour = self._of(system).colour
        if (len(self.systems) > 1 and not self.labelled) or setting not in self.settings:
            return colour
        last = max(len(self.settings) - 1, 1)
        return shade(colour, round(self.settings.index(setting) * (SHADES - 1) / last))

    def marker(self, system: str) -> str:
        """Return the marker of a system."""
        return self._of(system).marker

    def setting(self, setting: str) -> SettingStyle:
        """Return the line of a hardware setting."""
        if len(self.settings) == 1:
            return ONLY_SETTING
        if self.labelled:
            return LABELLED_SETTING
        return SETTING_STYLES[self.settings.index(setting) % len(SETTING_STYLES)]

    def _of(self, system: str) -> SystemLook:
        """Return the look of a system; other people's systems share what is left, in their order."""
        if system in SYSTEMS:
            return SYSTEMS[system]
        known = [SYSTEMS[one] for one in self.systems if one in SYSTEMS]
        taken = {look.colour for look in known}
        free = [colour for colour in PALETTE if colour not in taken] or PALETTE
        markers = [one for one in MARKERS if one not in {look.marker for look in known}] or MARKERS
        index = [one for one in self.systems if one not in SYSTEMS].index(system)
        again, which = divmod(index, len(free))  # of the same colour, each has another marker
        return SystemLook(system, free[which], markers[(which + again) % len(markers)])


def name_of(system: str) -> str:
    """Return the display name of a system; of other people's systems, the name in their records."""
    return SYSTEMS[system].name if system in SYSTEMS else system


def names_under(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the display names of systems, each with its setting, in one line."""
    return "; ".join(f"{name_of(system)} under {setting}" for system, setting in pairs)


class Saved(NamedTuple):
    """A figure on disk."""

    name: str
    png: Path
    svg: Path


def look_for(frame: pd.DataFrame) -> Look:
    """Return the look of a figure that stands alone: of the systems and settings of its table."""
    return look_of(frame["system"], frame["setting"])


def look_of(systems: Iterable[str], settings: Iterable[str]) -> Look:
    """Return the look of systems and settings: known systems first, in the order of `SYSTEMS`."""
    known = list(SYSTEMS)

    def order(name: str) -> tuple[int, str]:
        return (known.index(name) if name in SYSTEMS else len(known), name)

    return Look(
        tuple(sorted(set(systems), key=order)), tuple(sorted(set(settings), key=setting_order))
    )


def rows_of(frame: pd.DataFrame, look: Look) -> list[tuple[str, str]]:
    """Return the pairs of system and setting in a table, from the top of a figure to its bottom."""
    present = set(zip(frame["system"], frame["setting"], strict=True))
    return [(a, b) for a in look.systems for b in look.settings if (a, b) in present]


def setting_order(name: str) -> tuple:
    """Return the sort key of settings: numbers by value, and first those with fewer of them."""
    parts = re.split(r"(\d+)", name)
    return (len(parts), *((1, int(one), "") if one.isdigit() else (0, 0, one) for one in parts))


class Rows(NamedTuple):
    """The rows of a figure with one row per system and setting.

    Attributes:
      at: position of each row, downwards.
      headings: systems that have a heading, and its position.
    """

    at: Mapping[tuple[str, str], float]
    headings: Mapping[str, float]

    @property
    def height(self) -> float:
        """Return the height of all rows."""
        return max(self.at.values()) + 1


def place_rows(frame: pd.DataFrame, look: Look, per_row: float = 1.0) -> Rows:
    """Return the rows of a table; where there are several settings, systems are headings of theirs.

    Args:
      frame: with columns system and setting.
      look: the order.
      per_row: height of a row.
    """
    at, headings, position = {}, {}, 0.0
    for system, setting in rows_of(frame, look):
        if len(look.settings) > 1 and len(look.systems) > 1 and system not in headings:
            position += (0.35 if at else 0.0) + HEADING
            headings[system] = position - HEADING
        at[system, setting] = position
        position += per_row
    return Rows(at, headings)


def label_rows(panel: Axes, rows: Rows, look: Look, first: bool, middle: float = 0.0) -> None:
    """Label the rows with systems and settings, on the first panel of a row only.

    Args:
      panel: the panel.
      rows: of `place_rows`.
      look: the names.
      first: whether the panel is the first of its row.
      middle: of a row, from its position.
    """
    labels = {
        position + middle: setting if len(look.settings) > 1 else look.name(system)
        for (system, setting), position in rows.at.items()
    }
    labels |= {position: look.name(system) for system, position in rows.headings.items()}
    panel.set_yticks(
        list(labels), list(labels.values()) if first else [""] * len(labels), fontsize=7
    )
    for tick, position in zip(panel.get_yticklabels(), labels, strict=True):
        tick.set_fontweight("bold" if position in rows.headings.values() else "normal")
    panel.set_ylim(max(rows.at.values()) + 2 * middle + 0.6, -0.7)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="y", visible=False)


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


def systems_and_settings_legend(figure: Figure, look: Look, drawn: pd.DataFrame) -> None:
    """Put a legend of the drawn systems (colours) and settings (lines) above the panels."""
    systems = [system for system in look.systems if system in set(drawn["system"])]
    settings = [setting for setting in look.settings if setting in set(drawn["setting"])]
    if len(look.settings) == 1 or look.labelled:
        settings = []
    handles = [
        Line2D([], [], color=look.colour(system), lw=2.2, marker=look.marker(system), ms=4.5)
        for system in systems
    ]
    for setting in settings:
        line = look.setting(setting)
        colour = look.colour(systems[0], setting) if len(look.systems) == 1 else GREY
        handles.append(
            Line2D([], [], color=colour, ls=line.linestyle, lw=line.linewidth, alpha=line.alpha)
        )
    legend(figure, handles, [*map(look.name, systems), *settings])


def legend(figure: Figure, handles: Sequence, labels: Sequence[str]) -> None:
    """Put a legend above the panels, in as many columns as fit."""
    longest = max(map(len, labels), default=1)
    columns = max(1, min(len(labels), int(WIDTH / (0.55 + 0.075 * longest))))
    figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=columns,
        handlelength=2.8,
    )


def shrink(panel: Axes) -> None:
    """Make room in a panel of many: small labels, few ticks, no label of the x axis."""
    panel.set_title(panel.get_title().removesuffix("-v5"), fontsize=6.5, pad=2)
    panel.set_xlabel("")
    panel.tick_params(labelsize=5, length=2, pad=1)
    panel.xaxis.get_major_locator().set_params(nbins=2)


def source_line(figure: Figure, text: str) -> None:
    """Write the number of seeds and the source of the data below the panels, wrapped to its width."""
    width = int(figure.get_figwidth() * CHARACTERS_PER_INCH)
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width)]
    figure.supxlabel("\n".join(lines), fontsize=7, color=GREY, x=0.995, ha="right")


def counts_text(counts: Iterable[float], what: str = "runs") -> str:
    """Format the number of runs or seeds in a figure: `6 runs`, `3 to 6 seeds`; '' if unknown."""
    values = sorted(set(int(count) for count in counts if pd.notna(count)))
    if not values:
        return ""
    what = what.removesuffix("s") if values[-1] == 1 else what
    return f"{span(values, ',')} {what}"


def sentence(*parts: str) -> str:
    """Join the parts of a caption that are not empty."""
    return " · ".join(part for part in parts if part)


def level_text(frame: pd.DataFrame) -> str:
    """Return the level of a table's intervals, such as `95%`."""
    return f"{100 * frame.attrs.get('level', LEVEL):g}%"


def bands_text(drawn: pd.DataFrame, what: str) -> str:
    """Describe the bands of a figure; '' if it has none."""
    if drawn["low"].isna().all():
        return ""
    if "environments" not in drawn or (drawn["runs"] >= FEW_RUNS * drawn["environments"]).all():
        return f"bands: {what}"
    return f"bands: {what}, too narrow with fewer than {FEW_RUNS} runs per environment"


def thousands(axis: Axes) -> None:
    """Write large numbers on the x axis as 10k, 5M."""
    axis.xaxis.set_major_formatter(short_numbers())


def logarithmic(panel: Axes) -> None:
    """Give the y axis a logarithmic scale with plain numbers as tick labels.

    Under three decades, they are 1, 2 and 5 times the powers of ten, otherwise powers of ten only.
    Matplotlib's own labels are mathtext, which `RC` disables.
    """
    panel.set_yscale("log")
    low, high = panel.get_ylim()
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    panel.yaxis.set_major_formatter(short_numbers())
    panel.yaxis.set_minor_formatter(NullFormatter())


def short_numbers() -> FuncFormatter:
    """Return a formatter that writes ticks as `short_number` does."""
    return FuncFormatter(lambda value, _: short_number(value))


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
    """Save a figure as PNG, on white, and as SVG, transparent; the same figure gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    with mpl.rc_context(RC):
        lay_out(figure)
        content = io.BytesIO()
        figure.savefig(content, format="png", metadata={"Software": None}, facecolor=PAPER)
        replace_file(png, content.getvalue())
        content, metadata = io.BytesIO(), {"Date": None, "Creator": None}
        figure.savefig(content, format="svg", metadata=metadata, facecolor="none")
        replace_file(svg, _with_dark_colours(content.getvalue().decode()))
    return Saved(name, png, svg)


def _with_dark_colours(svg: str) -> str:
    """Return an SVG figure with a style sheet that replaces its colours in the dark."""
    rules = [
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
        if f"{what}: {light}" in svg
    ]
    sheet = f"<style>@media screen and (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"
    start = svg.index(">", svg.index("<svg")) + 1
    return svg[:start] + sheet + svg[start:]
