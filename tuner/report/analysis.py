"""Figures that explain times: the importance of parameters, a roofline, two sets of records side by side.

Tests: `tests/tuner/report/test_analysis.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from relax_tune.errors import RelaxTuneError
from relax_tune.ir.core.expr import Expr, Var, as_int, const, mul, postorder, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.plan.plans import Shape
from relax_tune.tuner.report.charts import bars, dots, graph, lines, unit_of
from relax_tune.tuner.report.recorded import RecordedTask, group_of, operators_of, point_of
from relax_tune.tuner.report.subject import Facets, Figure, table
from relax_tune.tuner.report.texts import ratio_text, seconds_text

FEWEST = 8
"""Fewest candidates of a sketch whose parameters are compared."""
SHOWN = 15
"""Largest number of bars."""
CALLS = 60
"""Largest number of calls in the picture of a program."""


@dataclass(frozen=True, slots=True)
class Importance:
    """How much a parameter decides.

    Attributes:
        share: Share of the variance of the logarithms of times that the parameter's value explains.
        best: The value with the smallest mean.
    """

    task: str
    sketch: str
    parameter: str
    share: float
    candidates: int
    best: int


def importance(tasks: Sequence[RecordedTask], anchor: str) -> Figure:
    """Make the figure of the parameters that decide the times of candidates."""
    title = "Importance of parameters"
    known = sorted((i for t in tasks for i in importances(t)), key=lambda i: (-i.share, i.task, i.sketch, i.parameter))
    about = {t.name: replace(t.facets, groups=("tuned",)) for t in tasks}
    if not known:
        why = f"No sketch has {FEWEST} candidates with times at every shape and two values of a parameter."
        return Figure(anchor, title, why)
    shown = known[:SHOWN]
    drawn = [
        {"name": f"{i.task}: {i.sketch} {i.parameter}", "value": 100 * i.share, "facets": about[i.task]} for i in shown
    ]
    top = known[0]
    summary = (
        f"{top.parameter} of {top.sketch} explains {100 * top.share:.0f} % of the variance of the times of {top.task}. "
        "The share is of the logarithms of times, by the value of one parameter (omega squared). A search tries "
        "promising values more often, which lowers it."
    )
    rows = [[i.task, i.sketch, i.parameter, f"{100 * i.share:.0f} %", str(i.best), str(i.candidates)] for i in known]
    numbers = ("share", "best value", "candidates")
    chart = bars(drawn, x="explained variance of log times (%)", name="task: sketch parameter")
    facets = [about[i.task] for i in known]
    values = table(("task", "sketch", "parameter", *numbers), rows, numbers, facets=facets)
    return Figure(anchor, title, summary, chart, values)


def importances(task: RecordedTask) -> list[Importance]:
    """Return the importance of each parameter of each sketch with enough candidates."""
    times: dict[str, list[tuple[Mapping[str, int], float]]] = {}
    for key, rows in task.medians.items():
        variant = task.variants[key]
        if group_of(variant) == "tuned" and task.anchors and all(shape in rows for shape in task.anchors):
            secs = sum(weight * rows[shape] for shape, weight in task.anchors.items())
            if secs > 0:
                times.setdefault(variant.sketch, []).append((variant.values, math.log(secs)))
    results = []
    for sketch, candidates in times.items():
        logs = np.array([log for _, log in candidates])
        for parameter in candidates[0][0]:
            values = np.array([chosen.get(parameter, -1) for chosen, _ in candidates])
            levels = np.unique(values)
            if len(candidates) < FEWEST or not 1 < len(levels) < len(candidates):
                continue
            means = {int(v): float(logs[values == v].mean()) for v in levels}
            best = min(means, key=lambda v: (means[v], v))
            share = omega_squared(values, logs)
            results.append(Importance(task.name, sketch, parameter, share, len(candidates), best))
    return results


def omega_squared(groups: np.ndarray, values: np.ndarray) -> float:
    """Return the share of the variance of values that groups explain, corrected for their number (Hays, Statistics, 1963)."""
    levels, total = np.unique(groups), float(((values - values.mean()) ** 2).sum())
    between = sum(float((groups == g).sum() * (values[groups == g].mean() - values.mean()) ** 2) for g in levels)
    error = (total - between) / (len(values) - len(levels))
    return 0.0 if total + error == 0 else max(0.0, (between - (len(levels) - 1) * error) / (total + error))


@dataclass(frozen=True, slots=True)
class CallWork:
    """Arithmetic and memory of a call at a shape: operations, and bytes of its arguments and results, each once."""

    operations: int
    nbytes: int


def work_of(func: PrimFunc, point: Sequence[int]) -> CallWork | None:
    """Return the work of a tensor function at the values of its symbols; None where a size depends on more."""
    mapping = dict(zip(func.symbols, map(const, point)))
    operations = [
        _size(const(_operations(b.body.value)), [i.extent for i in b.iters], mapping) for b in blocks(func.body)
    ]
    moved = [_size(const(b.dtype.bytes), b.shape, mapping) for b in func.buffers]
    if None in operations or None in moved:
        return None
    return CallWork(sum(n or 0 for n in operations), sum(n or 0 for n in moved))


def _operations(value: Expr) -> int:
    return sum(1 for n in postorder((value,)) if n.op and n.dtype.is_float)


def _size(unit: Expr, extents: Sequence[Expr], mapping: Mapping[Var, Expr]) -> int | None:
    total = unit
    for extent in extents:
        total = mul(total, substitute(extent, mapping))
    return as_int(total)


def roofline(tasks: Sequence[RecordedTask], anchor: str) -> Figure:
    """Make the figure of operations a second over operations a byte, at each task's largest timed shape."""
    title = "Roofline"
    rows, points, facets = list[list[str]](), list[tuple[str, float, float]](), list[Facets]()
    for t in tasks:
        if not t.shapes or (work := _work(t, t.shapes[-1])) is None or not work.operations or not work.nbytes:
            continue
        secs = t.best(t.shapes[-1]) if t.plan is None else t.dispatched_secs(t.shapes[-1])
        if secs is None or secs <= 0:
            continue
        intensity, rate = work.operations / work.nbytes, work.operations / secs / 1e9
        points.append((t.name, intensity, rate))
        key = t.dispatched(t.shapes[-1])
        facets.append(t.facets_at(t.shapes[-1], *(t.facets.groups if key is None else (t.group(key),))))
        bandwidth = work.nbytes / secs / 1e9
        rows.append(
            [
                t.name,
                t.shape_text(t.shapes[-1]),
                f"{intensity:.3g}",
                f"{rate:.3g}",
                f"{bandwidth:.3g}",
                seconds_text(secs),
            ]
        )
    if not points:
        return Figure(anchor, title, "No task with a time has a program whose operations can be counted.")
    peak, band = max(r for _, _, r in points), max(r / i for _, i, r in points)
    ends = [min(i for _, i, _ in points) / 2, peak / band, max(max(i for _, i, _ in points), peak / band) * 2]
    roof = [{"x": i, "y": min(peak, band * i), "series": "best on record"} for i in sorted(ends)]
    drawn = [{"x": i, "y": r, "series": name, "facets": f} for (name, i, r), f in zip(points, facets, strict=True)]
    summary = (
        f"The most on record are {peak:.3g} billion operations and {band:.3g} billion bytes a second; they are the lines. A dot is a "
        "function; those near the slope wait for memory, others for arithmetic. Each argument and result is counted once, and an "
        "exponential as one operation."
    )
    chart = lines(
        roof,
        x="operations a byte (log scale)",
        y="billion operations a second (log scale)",
        series=["best on record"],
        log_x=True,
        log_y=True,
        points=drawn,
    )
    numbers = ("operations a byte", "billion operations a second", "billion bytes a second", "time")
    return Figure(anchor, title, summary, chart, table(("task", "shape", *numbers), rows, numbers, facets=facets))


def _work(task: RecordedTask, shape: Shape) -> CallWork | None:
    try:
        return work_of(parse_prim_func(task.text), point_of(shape))
    except (RelaxTuneError, ValueError):  # a text of a later version, or none
        return None


def call_graph(program: Program, tasks: Sequence[RecordedTask], anchor: str) -> Figure:
    """Make the figure of a program's calls, with the time of each and what it reads."""
    title = f"Calls of {program.name}"
    secs = {t.key: t.secs for t in tasks if t.secs is not None}
    known = {t.key: t.facets for t in tasks}
    facets = [known.get(c.task) or Facets(c.name, operators_of(c.name)) for c in program.calls]
    written: dict[int, int] = {}
    edges, rows, nodes = list[tuple[int, int]](), list[list[str]](), list[dict[str, object]]()
    unit, size = unit_of(list(secs.values()))
    for number, c in enumerate(program.calls):
        used = [_base(program, i) for variant in c.variants[:1] for step in variant.steps for i in step.buffers]
        readers = sorted({written[i] for i in used if i in written})
        edges += [(n, number) for n in readers]
        if used:
            written[used[-1]] = number
        time, name = secs.get(c.task), facets[number].task
        nodes.append({"name": f"{number}: {name}", "value": (time or 0.0) / size, "facets": facets[number]})
        rows.append(
            [str(number), name, ", ".join(map(str, readers)) or "inputs", seconds_text(time), str(len(c.variants))]
        )
    if not nodes:
        return Figure(anchor, title, "The program has no calls.")
    total = sum(secs.get(c.task) or 0.0 for c in program.calls)
    shown = f" The picture shows the first {CALLS}." if len(nodes) > CALLS else ""
    summary = (
        f"{len(nodes)} calls take {seconds_text(total)} in one run. A larger dot takes longer; lines lead from a result to the calls that "
        f"read it.{shown} Times are means over the timed shapes."
    )
    chart = graph(nodes[:CALLS], [e for e in edges if e[1] < CALLS], size=f"time of a call ({unit})")
    columns = ("call", "task", "reads", "time", "variants")
    return Figure(anchor, title, summary, chart, table(columns, rows, ("call", "time", "variants"), facets=facets))


def _base(program: Program, buffer: int) -> int:
    """Return the buffer that a view is of."""
    while (base := program.buffers[buffer].base) is not None:
        buffer = base
    return buffer


def comparison(tasks: Sequence[RecordedTask], others: Sequence[RecordedTask], name: str, anchor: str) -> Figure:
    """Make the figure of the times of a call in two sets of records.

    Args:
        others: Tasks of the other set.
        name: What the other set is called.
    """
    title = f"Compared with {name}"
    matching = {(t.key, t.regime): t.of_runs() for t in others}
    pairs = [(t.of_runs(), matching[t.key, t.regime]) for t in tasks if (t.key, t.regime) in matching]
    rows, drawn, facets = list[list[str]](), list[tuple[str, float, float]](), list[Facets]()
    for own, other in pairs:
        shapes = [s for s in own.shapes if _secs(own, s) is not None and _secs(other, s) is not None]
        if shapes:
            here, other_secs = (sum(_secs(t, s) or 0.0 for s in shapes) / len(shapes) for t in (own, other))
            drawn.append((own.name, here, other_secs))
            facets.append(own.facets)
            rows.append(
                [own.name, seconds_text(here), seconds_text(other_secs), ratio_text(other_secs, here), str(len(shapes))]
            )
    if not drawn:
        return Figure(anchor, title, f"No task has times at a shape that {name} has, too.")
    unit, size = unit_of([secs for _, here, other_secs in drawn for secs in (here, other_secs)])
    whole = sum(other_secs for _, _, other_secs in drawn) / sum(here for _, here, _ in drawn)
    summary = (
        f"These records are {whole:.2f}x as fast as {name} over {len(drawn)} tasks that both have, by the mean time of a call at the "
        "shapes that both have, with what each dispatches; of a run, by the best that it measured."
    )
    points = [
        {"name": task, "value": secs / size, "series": series, "facets": about}
        for (task, here, other_secs), about in zip(drawn, facets, strict=True)
        for series, secs in (("these records", here), (name, other_secs))
    ]
    chart = dots(points, x=f"time of a call ({unit})", name="task", series=["these records", name])
    numbers = ("these records", name, "as fast", "shapes")
    return Figure(anchor, title, summary, chart, table(("task", *numbers), rows, numbers, facets=facets))


def _secs(task: RecordedTask, shape: Shape) -> float | None:
    return task.best(shape) if task.plan is None else task.dispatched_secs(shape)
