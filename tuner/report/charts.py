"""Pictures as SVG: Vega-Lite specifications drawn by vl-convert, without scripts, in the colours of the page.

Marks differ by colour, shape and dash, so that no colour is needed to read one. Each picture is drawn twice, for wide pages and for
phones, and the page's style shows one of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from json import dumps
from typing import Any
from xml.etree import ElementTree

from relax_tune.errors import UserError
from relax_tune.tuner.printable import printable
from relax_tune.tuner.report.figure import Figure, MakeSpec, Spec

WIDE, NARROW = 760, 320
COLOURS = tuple(f"var(--c{n})" for n in range(1, 8))
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [10, 4], [4, 6], [1, 4])
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
_INK, _LINE = "var(--ink)", "var(--line)"
_ROWS = {"type": "fit-x", "contains": "padding"}
_SVG = "http://www.w3.org/2000/svg"
_TAGS = frozenset(f"{{{_SVG}}}{tag}" for tag in ("svg", "g", "path", "line", "rect", "text"))
_PAINT = (
    "fill",
    "fill-opacity",
    "opacity",
    "stroke",
    "stroke-dasharray",
    "stroke-linecap",
    "stroke-opacity",
    "stroke-width",
)
_PLACE = ("d", "height", "transform", "viewBox", "width", "x", "x2", "y", "y2")
_ATTRIBUTES = frozenset([*_PAINT, *_PLACE, "font-size", "font-weight", "text-anchor"])
_DEFAULTS = {"opacity": "1", "stroke-dasharray": "1,0", "stroke-width": "1", "fill-opacity": "1"}
_LONG_NUMBER = re.compile(r"(\d+\.\d\d)\d+")
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def drawn(figure: Figure) -> tuple[str, str]:
    """Return the SVG of a figure's picture, wide and narrow. The figure has one.

    Raises UserError where vl-convert is not installed."""
    assert figure.chart is not None
    return _svg(figure.chart, False), _svg(figure.chart, True)


def _svg(make: MakeSpec, narrow: bool) -> str:
    return _converted(dumps(_dressed(make(narrow), narrow), allow_nan=False))


@lru_cache(maxsize=256)
def _converted(spec: str) -> str:
    try:
        import vl_convert
    except ImportError:
        raise UserError(
            "wanted vl-convert-python to draw pictures, found it not installed; pip install 'relax-tune[report]'"
        ) from None
    return cleaned(vl_convert.vegalite_to_svg(spec, allowed_base_urls=[]))


def cleaned(text: str) -> str:
    """Return a picture with known elements and attributes alone, shorter by what nobody sees.

    Raises UserError for a picture with other elements, such as a script."""
    root = ElementTree.fromstring(text)
    for element in root.iter():
        if element.tag not in _TAGS:
            raise UserError(f"wanted a picture of lines, areas and text, found {element.tag!r:.80} in it")
        for child in list(element):
            empty = child.tag.endswith(("}text", "}g")) and not len(child) and not (child.text or "").strip()
            if child.get("display") == "none" or empty or child.get("class") == "background":
                element.remove(child)
        kept = {k: _LONG_NUMBER.sub(r"\1", v) for k, v in element.items() if k in _ATTRIBUTES and _DEFAULTS.get(k) != v}
        if kept.get("fill", "none") != "none":
            kept.pop("stroke-dasharray", None)  # the dash of a line, on a symbol of the legend
        element.attrib.clear()
        element.attrib.update(kept)
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    ElementTree.register_namespace("", _SVG)
    return ElementTree.tostring(root, encoding="unicode").replace(f' xmlns="{_SVG}"', "")


def _dressed(spec: Spec, narrow: bool) -> Spec:
    """Add size, fonts and colours to a specification."""
    axis = {"labelColor": _INK, "titleColor": _INK, "gridColor": _LINE, "domainColor": _LINE, "tickColor": _LINE}
    fonts = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    config = {
        "aria": False,
        "background": None,
        "view": {"stroke": None},
        "axis": {**axis, **fonts, "labelLimit": 105 if narrow else 200, "labelOverlap": True, "tickCount": 4 if narrow else 6},
        "legend": {
            **{"labelColor": _INK, "titleColor": _INK, "orient": "top", "columns": 1 if narrow else 3, "title": None},
            **{"labelFontSize": 12, "labelLimit": 260 if narrow else 190, "symbolSize": 90, "columnPadding": 30},
        },
        "line": {"strokeWidth": 2},
        "point": {"filled": True, "size": 45, "opacity": 1},
        "bar": {"color": COLOURS[0]},
        "range": {"category": list(COLOURS)},
    }  # fmt: skip
    size = {"width": NARROW if narrow else WIDE, "autosize": {"type": "fit", "contains": "padding"}}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        **size,
        "height": 300,
        "padding": 2,
        **spec,
        "config": config,
    }


def unit_of(values: Sequence[float]) -> tuple[str, float]:
    """Return a unit of time for these seconds, and its seconds."""
    middle = sorted(values)[len(values) // 2] if values else 1.0
    return next(((u, size) for u, size in _UNITS if middle >= size), _UNITS[-1])


def lines(
    rows: Sequence[Mapping[str, Any]],
    *,
    x: str,
    y: str,
    series: Sequence[str],
    step: bool = False,
    log_x: bool = False,
    log_y: bool = False,
    backdrop: Sequence[Mapping[str, Any]] = (),
    order: Sequence[str] = (),
    thick: str = "",
) -> MakeSpec:
    """Return a picture of lines: rows with `x`, `y` and `series`.

    x, y: titles of the axes, with their units; series: names in order; step: the value holds until the next row
    backdrop: rows with `x` and `y` that are shown as faint dots; order: texts of the x axis, which then is no scale
    thick: the first series, if it is drawn broad, under the others
    """
    shown = [_texts(row) for row in rows]
    behind = [_texts(row) for row in backdrop]
    names = [printable(name) for name in series]
    broad = f"datum.series === {dumps(printable(thick))}"

    def make(narrow: bool) -> Spec:
        across: Spec = {"field": "x", "title": printable(x), "type": "quantitative", "scale": {"zero": not log_x}}
        if order:
            kept = [printable(text) for text in order]
            across = {**across, "type": "ordinal", "sort": kept, "scale": {}, "axis": {"labelAngle": -40}}
        elif log_x:
            powers = _powers([row["x"] for row in shown], 5 if narrow else 12)
            across |= {"scale": {"type": "log", "base": 2}, "axis": {"values": powers, "format": "d"}}
        up: Spec = {
            "field": "y",
            "title": y,
            "type": "quantitative",
            "scale": {"zero": False},
            "axis": {"format": "~g"},
        }
        if log_y:
            span, ticks = _decades([row["y"] for row in (*shown, *behind)])
            up |= {"scale": {"type": "log", "domain": span, "nice": False}, "axis": {"format": "~g", "values": ticks}}
        place: Spec = {"x": across, "y": up}
        layers: list[Spec] = []
        if behind:
            faint = {"type": "point", "color": _INK, "opacity": 0.25, "size": 12, "shape": "circle"}
            layers.append({"data": {"values": behind}, "mark": faint, "encoding": place})
        return {"data": {"values": shown}, "layer": [*layers, *_line_layers(place, names, broad, step)]}

    return make


def _line_layers(place: Spec, names: Sequence[str], broad: str, step: bool) -> list[Spec]:
    """Return a broad line under the others, the lines, and their points unless the lines are steps."""
    marks: Spec = {"field": "series", "type": "nominal", "sort": list(names)}
    marks["legend"] = None if len(names) < 2 else {}
    colour = {**marks, "scale": {"domain": list(names), "range": list(COLOURS)}}
    dash = {**marks, "scale": {"domain": list(names), "range": list(DASHES)}}
    line = {"type": "line", **({"interpolate": "step-after"} if step else {})}
    under = {**line, "strokeWidth": 6 if step else 9, "opacity": 0.4, "strokeCap": "round", "color": COLOURS[0]}
    found: list[Spec] = [
        {"transform": [{"filter": broad}], "mark": under, "encoding": place},
        {"mark": line, "encoding": {**place, "color": colour, "strokeDash": dash}},
    ]
    if not step:
        shape = {**marks, "scale": {"domain": list(names), "range": list(SHAPES)}}
        found.append({"mark": {"type": "point"}, "encoding": {**place, "color": colour, "shape": shape}})
    return found


def bars(rows: Sequence[Mapping[str, Any]], *, x: str, name: str, parts: Sequence[str] = ()) -> MakeSpec:
    """Return a picture of horizontal bars: rows with `name`, `value` and, for bars in parts, `part`, in this order.

    x: title of the axis of values, with their unit; name: title of the axis of names
    """
    shown = [_texts(row) for row in rows]
    names = list(dict.fromkeys(row["name"] for row in shown))

    def make(narrow: bool) -> Spec:
        axis = {"titleAnchor": "start", "titleAngle": 0, "titleAlign": "left", "titleY": -10}
        encoding: Spec = {
            "y": {"field": "name", "type": "nominal", "sort": names, "title": printable(name), "axis": axis},
            "x": {"field": "value", "type": "quantitative", "title": x},
        }
        if parts:
            encoding["color"] = {
                **{"field": "part", "type": "nominal", "sort": list(parts)},
                "scale": {"domain": list(parts), "range": list(COLOURS)},
                "legend": {"orient": "bottom"},
            }
        return {
            "data": {"values": shown},
            "mark": {"type": "bar"},
            "encoding": encoding,
            "height": {"step": 24},
            "autosize": _ROWS,
        }

    return make


def dots(rows: Sequence[Mapping[str, Any]], *, x: str, name: str, series: Sequence[str]) -> MakeSpec:
    """Return a picture of dots on a line for each name: rows with `name`, `value` and `series`."""
    shown = [_texts(row) for row in rows]
    names = list(dict.fromkeys(row["name"] for row in shown))
    marks = {"field": "series", "type": "nominal", "sort": list(series)}

    def make(narrow: bool) -> Spec:
        axis = {"titleAnchor": "start", "titleAngle": 0, "titleAlign": "left", "titleY": -10}
        return {
            "data": {"values": shown},
            "mark": {"type": "point", "size": 70},
            "height": {"step": 24},
            "autosize": _ROWS,
            "encoding": {
                "y": {
                    "field": "name",
                    "type": "nominal",
                    "sort": names,
                    "title": printable(name),
                    "axis": {**axis, "grid": True},
                },
                "x": {"field": "value", "type": "quantitative", "title": x, "scale": {"zero": False}},
                "color": {
                    **marks,
                    "scale": {"domain": list(series), "range": list(COLOURS)},
                    "legend": {"orient": "bottom"},
                },
                "shape": {
                    **marks,
                    "scale": {"domain": list(series), "range": list(SHAPES)},
                    "legend": {"orient": "bottom"},
                },
            },
        }

    return make


def _texts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its texts printable."""
    return {k: printable(v) if isinstance(v, str) else v for k, v in row.items()}


def _powers(values: Sequence[int], most: int) -> list[int]:
    """Return at most `most` powers of two that span the values."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    every = max(1, -(-(high - low + 1) // most))
    return [2**n for n in range(low, high + 1, every)]


def _decades(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the ends of an axis around the values, and round values on it: powers of ten, with 2 and 5 times them where few."""
    low, high = 0.8 * min(values), 1.25 * max(values)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = (1,) if last - first > 4 else (1, 2, 5)
    ticks = [d * 10.0**n for n in range(first, last + 1) for d in digits]
    return [low, high], [t for t in ticks if low <= t <= high]
