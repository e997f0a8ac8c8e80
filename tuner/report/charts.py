"""Pictures as SVG: Vega-Lite specifications drawn by vl-convert, without scripts, in the colours of the page.

Marks differ in colour, shape and dash, so that a picture can be read without colours. A name with a meaning, such as `best library`, has
one mark in every chart (`MEANINGS`). Each picture is drawn twice, for wide pages and for phones, and the style sheet shows one of them.

Tests: `tests/tuner/report/test_charts.py`, `tests/tuner/report/test_report.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from json import dumps, loads
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

from relax_tune.errors import UserError
from relax_tune.printable import printable
from relax_tune.tuner.report.subject import ALL, Figure, MakeSpec, Spec

WIDE, NARROW = 760, 320
COLOURS = tuple(f"var(--c{n})" for n in range(1, 8))
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [10, 4], [4, 6], [1, 4])
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
DISPATCHED, ALL_TASKS, TIMED, FAILED = "dispatched", "all tasks, mean", "with a time", "failed"
MEANINGS = {
    **{DISPATCHED: 0, ALL_TASKS: 0, TIMED: 0},
    **{"best tuned": 1, "best library": 2, "best generic": 3, "best unfused": 4, FAILED: 6},
}
"""Number of the colour, dash and shape of a name that stands for the same in every chart."""
_INK, _LINE = "var(--ink)", "var(--line)"
_BELOW = {"orient": "bottom"}
_ROWS = {"type": "fit-x", "contains": "padding"}
_SVG = "http://www.w3.org/2000/svg"
_TAGS = frozenset(f"{{{_SVG}}}{tag}" for tag in ("svg", "g", "path", "line", "rect", "text"))
_PAINT = "fill fill-opacity opacity stroke stroke-dasharray stroke-linecap stroke-opacity stroke-width"
_PLACE = "d height transform viewBox width x x2 y y2 font-size font-weight text-anchor"
_ATTRIBUTES = frozenset([*_PAINT.split(), *_PLACE.split()])
_DEFAULTS = {"opacity": "1", "stroke-dasharray": "1,0", "stroke-width": "1", "fill-opacity": "1"}
_LONG_NUMBER = re.compile(r"(\d+\.\d\d)\d+")
_HOVER: Spec = {"description": {"field": "hover", "type": "nominal"}}
"""Encoding of what a mark says when the pointer is over it. Descriptions that Vega makes would parse titles as expressions."""
_FACETS = "\u2066"
"""Separates a mark's text from its attributes as JSON. `printable` writes it otherwise, so it is in no text."""
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def drawn(figure: Figure) -> tuple[str, str]:
    """Return the SVG of a figure's chart, wide and narrow. Raises `UserError` if vl-convert is not installed."""
    assert figure.chart is not None
    return _svg(figure.chart, False), _svg(figure.chart, True)


def _svg(make: MakeSpec, narrow: bool) -> str:
    return _converted(dumps(_dressed(make(narrow), narrow), allow_nan=False), not narrow)


@lru_cache(maxsize=256)
def _converted(spec: str, titled: bool) -> str:
    try:
        import vl_convert
    except ImportError:
        raise UserError(
            "drawing pictures needs vl-convert-python, which is not installed; pip install 'relax-tune[report]'"
        ) from None
    labels = loads(spec).get("usermeta", {})
    return cleaned(vl_convert.vegalite_to_svg(spec, allowed_base_urls=[]), titled, labels)


def cleaned(text: str, titled: bool = True, labels: Mapping[str, Mapping[str, str]] = MappingProxyType({})) -> str:
    """Return a picture without invisible elements and with known attributes only, which also makes it shorter.

    Args:
        text: The SVG.
        titled: Points and bars say what they show when the pointer is over them. Phones have no pointer.
        labels: Attributes of texts, by the text.

    Raises:
        UserError: The picture has unknown elements, such as a script.
    """
    root = ElementTree.fromstring(text)
    for element in list(root.iter()):
        if element.tag not in _TAGS:
            raise UserError(f"expected a picture of lines, areas and text, got the element {element.tag!r:.80}")
        for child in list(element):
            empty = child.tag.endswith(("}text", "}g")) and not len(child) and not (child.text or "").strip()
            if child.get("display") == "none" or empty or child.get("class") == "background":
                element.remove(child)
        label, _, facets = element.get("aria-label", "").partition(_FACETS)
        attributes = {
            k: _LONG_NUMBER.sub(r"\1", v) for k, v in element.items() if k in _ATTRIBUTES and _DEFAULTS.get(k) != v
        }
        if attributes.get("fill", "none") != "none":
            attributes.pop("stroke-dasharray", None)  # symbols of the legend inherit the dash of their line
        element.attrib.clear()
        element.attrib.update(attributes)
        element.attrib.update(loads(facets) if facets else _label_attributes(element.text or "", labels))
        if label and titled:
            ElementTree.SubElement(element, f"{{{_SVG}}}title").text = label
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    ElementTree.register_namespace("", _SVG)
    return ElementTree.tostring(root, encoding="unicode").replace(f' xmlns="{_SVG}"', "")


def _label_attributes(text: str, labels: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    """Return the attributes of a label, which Vega may have cut."""
    if text in labels or not text.endswith("…"):
        return labels.get(text, {})
    whole = [attributes for name, attributes in labels.items() if name.startswith(text[:-1])]
    return whole[0] if len(whole) == 1 else {}


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


def marks_of(names: Sequence[str]) -> dict[str, int]:
    """Return the number of each name's colour, dash and shape: by its meaning, or the next that is free."""
    known = {name: MEANINGS[name] for name in names if name in MEANINGS}
    free = [n for n in range(len(COLOURS)) if n not in known.values()] or [len(COLOURS) - 1]
    others = [name for name in names if name not in known]
    number = {**known, **{name: free[n % len(free)] for n, name in enumerate(others)}}
    return {name: number[name] for name in names}


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
    points: Sequence[Mapping[str, Any]] = (),
    order: Sequence[str] = (),
    thick: str = "",
) -> MakeSpec:
    """Return a picture of lines: rows with `x`, `y` and `series`. Above 60 lines, since it is one specification.

    Args:
        rows: Each may have `facets`, of its point, and `line`, of the line that it begins.
        x, y: Titles of the axes, with their units.
        series: Names of the lines, in order.
        step: Draw steps: a value holds until the next row.
        backdrop: Rows with `x` and `y` that are drawn as faint dots.
        points: Rows with `x`, `y` and `series`, the name of each, that are drawn as dots of one colour.
        order: Texts of an ordinal x axis, in order.
        thick: Name of a line that is drawn broad, under the others.
    """
    shown, behind, single = (
        [
            _marked(row, _hover_text(row.get("series", "another candidate"), {x: row["x"], y: row["y"]}), step)
            for row in part
        ]
        for part in (rows, backdrop, points)
    )
    names = [printable(name) for name in series]
    broad = f"datum.series === {dumps(printable(thick))}"

    def make(narrow: bool) -> Spec:
        across: Spec = {"field": "x", "title": printable(x), "type": "quantitative", "scale": {"zero": not log_x}}
        if order:
            ordered = [printable(text) for text in order]
            across = {**across, "type": "ordinal", "sort": ordered, "scale": {}, "axis": {"labelAngle": -40}}
        elif log_x:
            powers = _powers([row["x"] for row in shown], 5 if narrow else 12)
            axis = {"values": powers, "format": "d" if min(powers) >= 1 else "~g"}
            across |= {"scale": {"type": "log", "base": 2}, "axis": axis}
        up: Spec = {
            "field": "y",
            "title": y,
            "type": "quantitative",
            "scale": {"zero": False},
            "axis": {"format": "~g"},
        }
        if log_y:
            span, ticks = _decades([row["y"] for row in (*shown, *behind, *single)])
            up |= {"scale": {"type": "log", "domain": span, "nice": False}, "axis": {"format": "~g", "values": ticks}}
        place: Spec = {"x": across, "y": up}
        layers: list[Spec] = []
        if behind:
            faint = {"type": "point", "color": _INK, "opacity": 0.25, "size": 12, "shape": "circle"}
            layers.append(
                {"data": {"values": behind}, "mark": {**faint, "aria": True}, "encoding": {**place, **_HOVER}}
            )
        layers += _line_layers(place, names, broad, step)
        if single:
            mark = {"type": "point", "color": COLOURS[1], "size": 70, "aria": True}
            layers.append({"data": {"values": single}, "mark": mark, "encoding": {**place, **_HOVER}})
        return {"data": {"values": shown}, "layer": layers}

    return make


def _line_layers(place: Spec, names: Sequence[str], broad: str, step: bool) -> list[Spec]:
    """Return a broad line under the others, the lines, and their points unless the lines are steps."""
    legend: Spec | None = None if len(names) < 2 else {}
    colour, dash, shape = (_marks("series", names, values, legend) for values in (COLOURS, DASHES, SHAPES))
    line = {"type": "line", "aria": True, **({"interpolate": "step-after"} if step else {})}
    about: Spec = {"description": {"field": "line", "type": "nominal"}}
    under = {**line, "strokeWidth": 6 if step else 9, "opacity": 0.4, "strokeCap": "round", "color": COLOURS[0]}
    layers: list[Spec] = [
        {"transform": [{"filter": broad}], "mark": under, "encoding": {**place, **about}},
        {"mark": line, "encoding": {**place, "color": colour, "strokeDash": dash, **about}},
    ]
    if not step:
        point = {"type": "point", "aria": True}
        layers.append({"mark": point, "encoding": {**place, "color": colour, "shape": shape, **_HOVER}})
    return layers


def bars(
    rows: Sequence[Mapping[str, Any]], *, x: str, name: str, parts: Sequence[str] = (), meaning: str = ""
) -> MakeSpec:
    """Return a picture of horizontal bars: rows with `name`, `value` and, for bars in parts, `part`, in this order.

    Args:
        x: Title of the axis of values, with the unit.
        name: Title of the axis of names.
        parts: Names of the parts of stacked bars.
        meaning: The name in `MEANINGS` whose colour the bars have.
    """
    encoding: Spec = {"x": {"field": "value", "type": "quantitative", "title": x}}
    if parts:
        encoding["color"] = _marks("part", parts, COLOURS)
    bar = {"type": "bar", "color": COLOURS[MEANINGS.get(meaning, 0)]}
    return _named_rows(rows, name, bar, encoding, x, grid=False)


def graph(nodes: Sequence[Mapping[str, Any]], edges: Sequence[tuple[int, int]], *, size: str) -> MakeSpec:
    """Return a picture of a graph: one node in each line, to the right of the nodes that it reads.

    Args:
        nodes: Rows with `name`, `value`, the size of the dot, and `facets`, in an order in which edges lead downwards.
        edges: Numbers of the nodes that are read and of their readers.
        size: Title of the values.
    """
    depth = [0] * len(nodes)
    for source, reader in sorted(edges, key=lambda edge: edge[1]):
        depth[reader] = max(depth[reader], depth[source] + 1)
    shown = [
        _marked(
            {**row, "x": depth[n], "y": n},
            _hover_text(str(row["name"]), {size: row["value"]}),
            attributes={"data-node": str(n)},
        )
        for n, row in enumerate(nodes)
    ]
    arcs = [
        _marked({"x": depth[a], "y": a, "x2": depth[b], "y2": b}, "", attributes={"data-ends": f"{a} {b}"})
        for a, b in edges
    ]
    x: Spec = {"field": "x", "type": "quantitative", "axis": None, "scale": {"domain": [0, 1.6 * max(1, *depth)]}}
    y: Spec = {"field": "y", "type": "quantitative", "axis": None, "scale": {"reverse": True}}
    value: Spec = {"field": "value", "type": "quantitative", "legend": None, "scale": {"range": [20, 400]}}
    rule = {"type": "rule", "color": _LINE, "aria": True}
    text = {"type": "text", "align": "left", "dx": 12, "color": _INK, "fontSize": 12}
    layers: list[Spec] = [
        {
            "data": {"values": arcs},
            "mark": rule,
            "encoding": {"x": x, "y": y, "x2": {"field": "x2"}, "y2": {"field": "y2"}, **_HOVER},
        },
        {
            "mark": {"type": "point", "color": COLOURS[0], "aria": True},
            "encoding": {"x": x, "y": y, "size": value, **_HOVER},
        },
        {"mark": text, "encoding": {"x": x, "y": y, "text": {"field": "name", "type": "nominal"}}},
    ]
    labels = _labels(nodes)
    return lambda narrow: {
        "data": {"values": shown},
        "layer": layers,
        "height": 22 * len(nodes) + 20,
        "usermeta": labels,
    }


def dots(rows: Sequence[Mapping[str, Any]], *, x: str, name: str, series: Sequence[str]) -> MakeSpec:
    """Return a picture of dots on a line for each name: rows with `name`, `value` and `series`."""
    encoding: Spec = {
        "x": {"field": "value", "type": "quantitative", "title": x, "scale": {"zero": False}},
        "color": _marks("series", series, COLOURS),
        "shape": _marks("series", series, SHAPES),
    }
    return _named_rows(rows, name, {"type": "point", "size": 70}, encoding, x, grid=True)


def _named_rows(
    rows: Sequence[Mapping[str, Any]], name: str, mark: Spec, encoding: Spec, x: str, *, grid: bool
) -> MakeSpec:
    """Return a picture with a row of marks for each name, in the order of the rows. x: title of the values"""
    parts = [", ".join(str(row[k]) for k in ("name", "part", "series") if k in row) for row in rows]
    shown = [_marked(row, _hover_text(part, {x: row["value"]})) for part, row in zip(parts, rows, strict=True)]
    names = list(dict.fromkeys(row["name"] for row in shown))
    axis = {
        "titleAnchor": "start",
        "titleAngle": 0,
        "titleAlign": "left",
        "titleY": -10,
        **({"grid": True} if grid else {}),
    }
    along = {"field": "name", "type": "nominal", "sort": names, "title": printable(name), "axis": axis}
    spec: Spec = {"data": {"values": shown}, "mark": {**mark, "aria": True}, "height": {"step": 24}, "autosize": _ROWS}
    spec["usermeta"] = _labels(rows)
    return lambda narrow: {**spec, "encoding": {"y": along, **encoding, **_HOVER}}


def _marks(field: str, names: Sequence[str], values: Sequence[Any], legend: Spec | None = _BELOW) -> Spec:
    """Return the encoding of a field by colours, dashes or shapes."""
    scale = {"domain": list(names), "range": [values[n] for n in marks_of(names).values()]}
    return {"field": field, "type": "nominal", "sort": list(names), "scale": scale, "legend": legend}


def _hover_text(name: str, values: Mapping[str, Any]) -> str:
    """Return what a mark says: its name, and its values by the titles of the axes."""
    texts = [f"{title}: {v:.4g}" if isinstance(v, float) else f"{title}: {v}" for title, v in values.items()]
    return "; ".join([name, *texts])


def _marked(
    row: Mapping[str, Any], hover: str, line: bool = False, attributes: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return a row with what its mark and the line that it begins say, and with their attributes.

    Args:
        row: The row, with `facets` of the mark, and `line` of its line.
        hover: What the mark says.
        line: Whether lines have no points, so that filters take or leave them as a whole.
        attributes: Further attributes of the mark.
    """
    facets, of_line = row.get("facets", ALL), row.get("line", ALL)
    series = {"data-series": str(row["series"])} if facets != ALL and "series" in row and not line else {}
    texts = _texts({k: v for k, v in row.items() if k not in ("facets", "line")})
    texts["hover"] = _described(hover, {**attributes, **series, **facets.attributes()})
    texts["line"] = _described("", {**series, **of_line.attributes()})
    return texts


def _described(text: str, attributes: Mapping[str, str]) -> str:
    """Return the description of a mark, from which `cleaned` makes its text and attributes."""
    return printable(text) + _FACETS + dumps(_texts(attributes)) if attributes else printable(text)


def _labels(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the attributes of the labels of rows, by text."""
    return {printable(str(row["name"])): _texts(row["facets"].attributes()) for row in rows if "facets" in row}


def _texts(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its texts printable."""
    return {k: printable(v) if isinstance(v, str) else v for k, v in row.items()}


def _powers(values: Sequence[float], most: int) -> list[float]:
    """Return at most `most` powers of two that span the values."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    every = max(1, -(-(high - low + 1) // most))
    return [2.0**n for n in range(low, high + 1, every)]


def _decades(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the ends of an axis around the values, and round values on it: powers of ten, with 2 and 5 times them where few."""
    low, high = 0.8 * min(values), 1.25 * max(values)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = (1,) if last - first > 4 else (1, 2, 5)
    ticks = [d * 10.0**n for n in range(first, last + 1) for d in digits]
    return [low, high], [t for t in ticks if low <= t <= high]
