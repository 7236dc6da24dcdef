"""The interactive learning curves of a page: a Vega-Lite chart of one environment at a time.

The chart reads the data of the figure `curves_steps`, which the page stores once. Vega evaluates its
expressions with an interpreter, because the page's content security policy forbids `eval`.
"""

import functools
import json
from collections.abc import Sequence

import vl_convert

from analysis.bootstrap import FEW_RUNS
from plots import style

DASHES = ([], [6, 3], [2, 2], [8, 3, 2, 3], [1, 3])
# The markers of `style.MARKERS` as shapes of Vega: their names, or SVG paths in a square from -1 to 1.
SHAPES = {
    "o": "circle", "s": "square", "^": "triangle-up", "v": "triangle-down", "D": "diamond", "P": "cross",
    "X": "M-1,-.5L-.5,-1L0,-.5L.5,-1L1,-.5L.5,0L1,.5L.5,1L0,.5L-.5,1L-1,.5L-.5,0Z",
    "*": "M0,-1L.25,-.3L1,-.3L.4,.15L.6,.85L0,.45L-.6,.85L-.4,.15L-1,-.3L-.25,-.3Z",
    "p": "M0,-1L.95,-.3L.6,.8L-.6,.8L-.95,-.3Z", "h": "M0,-1L.87,-.5L.87,.5L0,1L-.87,.5L-.87,-.5Z",
}  # fmt: skip
MARKS = 5  # number of markers on a curve
STEPS, TIME = "agent steps", "wall time (s)"


def specification(environments: Sequence[str], look: style.Look) -> str:
    """Return the chart as JSON in the language of Vega-Lite 6, without its data.

    Args:
      environments: to choose from.
      look: names and colours; `usermeta.dark` has the colours for dark pages.
    """
    systems = [look.name(system) for system in look.systems]
    colours = [look.colour(system) for system in look.systems]
    colour, shape = (
        {"field": "name", "scale": {"domain": systems, "range": looks}, "title": None}
        for looks in (colours, [SHAPES[look.marker(system)] for system in look.systems])
    )
    several = len(look.settings) > 1
    # Of the lines only: the legend of points has no lines.
    strokes = {
        "field": "setting",
        "scale": {
            "domain": look.settings,
            "range": [DASHES[i % len(DASHES)] for i in range(len(look.settings))],
        },
        "title": None,
        "legend": {"symbolType": "stroke", "symbolSize": 500},
    }
    dash = {"strokeDash": strokes} if several else {}
    shown = {"condition": {"param": "shown", "value": 1}, "value": 0.05}
    names = ", ".join(
        f"datum.system === {json.dumps(system)} ? {json.dumps(look.name(system))}"
        for system in look.systems
    ).replace(", datum", " : datum")
    # Curves that coincide have their markers at different points.
    sides = {"groupby": ["name", "setting"]}
    number = [{"op": "row_number", "as": "row"}]
    marked = [
        {"filter": "!datum.run"},
        {"window": number, "sort": [{"field": "at"}], **sides},
        {"joinaggregate": [{"op": "count", "as": "rows"}], **sides},
        {
            "filter": f"(datum.row + 2 * indexof({json.dumps(systems)}, datum.name))"
            f" % max(1, ceil(datum.rows / {MARKS})) === 0"
        },
    ]
    values = {
        "y": {
            "field": "value",
            "type": "quantitative",
            "title": "episodic return",
            "scale": {"zero": False},
        }
    }
    value = {"field": "value", "type": "quantitative", "format": ",.4~g"}
    tooltip = [
        {"field": "name", "title": "system"},
        *([{"field": "setting"}] if several else []),
        {"field": "seed"},
        {"field": "step", "type": "quantitative", "format": ",.0f"},
        {"field": "seconds", "type": "quantitative", "format": ",.1f"},
        {**value, "title": "return"},
        {"field": "low", "type": "quantitative", "format": ",.4~g"},
        {"field": "high", "type": "quantitative", "format": ",.4~g"},
    ]
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "height": 380,
        "data": {"name": "curves"},
        "params": [
            {
                "name": "environment",
                "value": environments[0],
                "bind": {"input": "select", "options": environments, "name": "environment "},
            },
            {
                "name": "axis",
                "value": STEPS,
                "bind": {"input": "select", "options": [STEPS, TIME], "name": "against "},
            },
        ],
        "transform": [
            {"filter": "datum.env_id === environment && isValid(datum.value)"},
            {"calculate": f"{names} : datum.system", "as": "name"},
            {"calculate": f"axis === {json.dumps(STEPS)} ? datum.step : datum.seconds", "as": "at"},
        ],
        "encoding": {
            "x": {"field": "at", "type": "quantitative", "title": "agent steps, or seconds"},
            "color": colour,
            "opacity": shown,
        },
        "layer": [
            {
                "transform": [{"filter": f"!datum.run && isValid(datum.low) && datum.runs >= {FEW_RUNS}"}],
                "mark": {"type": "area", "fillOpacity": 0.15},
                "encoding": {
                    "y": {"field": "low", "type": "quantitative"},
                    "y2": {"field": "high"},
                    "detail": {"field": "setting"},
                },
            },
            # Below the curves: its invisible cells, one around each point, would receive their clicks.
            {
                "transform": [{"filter": "!datum.run"}],
                "params": [
                    {
                        "name": "near",
                        "select": {
                            "type": "point",
                            "on": "pointerover",
                            "nearest": True,
                            "clear": "pointerout",
                        },
                    }
                ],
                "mark": {"type": "point", "filled": True, "size": 60},
                "encoding": {
                    **values,
                    "tooltip": tooltip,
                    "opacity": {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0},
                },
            },
            {
                "transform": [{"filter": "datum.run"}],
                "mark": {"type": "line", "strokeWidth": 1.2, "strokeOpacity": 0.4, "cursor": "pointer"},
                "encoding": {**values, **dash, "detail": {"field": "run"}, "tooltip": tooltip},
            },
            {
                "transform": [{"filter": "!datum.run"}],
                "params": [
                    {
                        "name": "shown",
                        "select": {"type": "point", "fields": ["name"], "toggle": "event.shiftKey"},
                        "bind": "legend",
                    }
                ],
                "mark": {"type": "line", "strokeWidth": 2.2},
                "encoding": {**values, **dash},
            },
            {
                "transform": marked,
                "mark": {"type": "point", "filled": True, "size": 55},
                "encoding": {**values, "shape": shape},
            },
        ],
        "usermeta": {"dark": [style.DARK[one] for one in colours]},
    }  # fmt: skip
    return json.dumps(spec, ensure_ascii=True).replace("<", "\\u003c")


@functools.cache
def bundle() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script, which defines `embedChart`."""
    return vl_convert.javascript_bundle("window.embedChart = vegaEmbed;")
