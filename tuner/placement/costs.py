"""The costs of placing a function: seconds of calls by the plans of each device, seconds of transfers by measured links.

Tests: `tests/runtime/vm/test_machine.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_tune.errors import BuildError
from relax_tune.home import HOME
from relax_tune.ir.core import graph as g
from relax_tune.ir.core.expr import Expr, Var, as_int, const, substitute
from relax_tune.ir.core.graph_walk import all_bindings, used_vars
from relax_tune.ir.core.struct_info import TensorInfo, devices_of, info_parts
from relax_tune.ir.op.base import product
from relax_tune.ir.passes.placement.device_requests import device_requests, tensors_in
from relax_tune.tuner.emit.emit_placed import DeviceSide
from relax_tune.tuner.placement.links import Link
from relax_tune.tuner.placement.solve import MovedValue, PlacementProblem
from relax_tune.tuner.plan.plans import TaskPlan
from relax_tune.tuner.task.domain import Domain, Point
from relax_tune.tuner.task.extract import site_symbols

Tensor = tuple[g.GVar, int]
"""A tensor that a call or the caller computes: the variable, and the number of its field."""


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """A tensor of a function.

    Attributes:
        maker: Position of the call that computes it; None for a parameter.
        readers: Positions of the calls that read it.
        returned: It is a result of the function.
    """

    maker: int | None
    readers: tuple[int, ...]
    returned: bool
    nbytes: Expr


@dataclass(frozen=True, slots=True, eq=False)
class CallGraph:
    """The calls of a straight-line function, in order, and the tensors between them."""

    calls: tuple[tuple[g.GVar, g.CallTIR | g.CallDPSLibrary], ...]
    tensors: tuple[GraphTensor, ...]


def call_graph(f: g.Function) -> CallGraph:
    """Return the calls of a lowered function and the tensors between them, through views, tuples, casts and hints."""
    definitions = {b.var: b.value for b in f.bindings}
    calls = tuple((v, x) for v, x in definitions.items() if isinstance(x, (g.CallTIR, g.CallDPSLibrary)))
    position = {v: i for i, (v, _) in enumerate(calls)}
    infos: dict[Tensor, TensorInfo] = {}
    for v in (*f.params, *position):
        infos |= {(v, i): t for i, t in enumerate(info_parts(v.info)) if isinstance(t, TensorInfo)}
    readers: dict[Tensor, dict[int, None]] = {t: {} for t in infos}
    for v, call in calls:
        for t in (t for a in call.args for t in _sources(a, definitions, position)):
            readers[t][position[v]] = None
    returned = set(_sources(f.ret, definitions, position))
    tensors = tuple(
        GraphTensor(position.get(t[0]), tuple(readers[t]), t in returned, _nbytes(info))
        for t, info in infos.items()
        if readers[t] or (t in returned and t[0] in position)
    )
    return CallGraph(calls, tensors)


def _sources(value: g.Value, definitions: Mapping[g.GVar, g.Value], calls: Mapping[g.GVar, int]) -> list[Tensor]:
    """Return the tensors of calls and parameters that a value is or contains."""
    if isinstance(value, g.GVar):
        if value in calls or value not in definitions:
            return [(value, i) for i, _ in enumerate(tensors_in(value.info))]
        return _sources(definitions[value], definitions, calls)
    if isinstance(value, g.TupleItem):
        owner = value.value
        while isinstance(owner, g.GVar) and owner in definitions and owner not in calls:
            owner = definitions[owner]
        if isinstance(owner, g.TupleValue):
            return _sources(owner.fields[value.index], definitions, calls)
        return [(owner, value.index)] if isinstance(owner, g.GVar) else _sources(owner, definitions, calls)
    return [t for v in (*value.operands,) for t in _sources(v, definitions, calls)] if used_vars(value) else []


def _nbytes(info: TensorInfo) -> Expr:
    if info.shape is None or info.dtype is None:
        raise BuildError(f"expected known dims and dtype to place calls, got {info!r}; add a match_cast")
    return product((*info.shape, const(info.dtype.bytes)))


@dataclass(frozen=True, slots=True, eq=False)
class FunctionCosts:
    """The costs of placing a function at any values of its symbols.

    Attributes:
        sides: By device, the host first.
        links: By device, without the host.
        orders: Device that the program prescribes for a call.
        hints: Device that the program prefers for a call.
    """

    f: g.Function
    graph: CallGraph
    symbols: tuple[Var, ...]
    sides: Mapping[str, DeviceSide]
    links: Mapping[str, Link]
    orders: Mapping[int, str]
    hints: Mapping[int, str]

    @property
    def devices(self) -> tuple[str, ...]:
        return (HOME, *(d for d in self.sides if d != HOME))

    def problem(self, point: Point, spare: bool = False) -> PlacementProblem:
        """Return the problem of placing the calls at values of the symbols.

        Args:
            spare: Ignore hints, and assume for a call without a time on a device its longest time on another one.
        """
        values = dict(zip(self.symbols, map(const, point), strict=True))
        secs = tuple(self._secs(i, values, spare) for i in range(len(self.graph.calls)))
        moved = []
        for t in self.graph.tensors:
            n = _number(t.nbytes, values)
            down = tuple(0.0 if d == HOME else self.links[d].down(n) for d in self.devices)
            up = tuple(0.0 if d == HOME else self.links[d].up(n) for d in self.devices)
            moved.append(MovedValue(t.maker, t.readers, t.returned, down, up))
        return PlacementProblem(self.devices, secs, tuple(moved))

    def _secs(self, call: int, values: Mapping[Var, Expr], spare: bool) -> tuple[float, ...]:
        """Return the seconds of a call on each device: 0 where it may run but has no time on any device, inf where it may not."""
        times = {d: self._on(d, call, values) for d in self.devices}
        required = self.orders.get(call) or (None if spare else self.hints.get(call))
        allowed = [d for d in self.devices if d in self.sides and required in (None, d)]
        most = max((t for t in times.values() if t is not None), default=0.0)
        chosen = allowed if spare else [d for d in allowed if times[d] is not None] or allowed[:1]
        return tuple((most if (t := times[d]) is None else t) if d in chosen else math.inf for d in self.devices)

    def _on(self, device: str, call: int, values: Mapping[Var, Expr]) -> float | None:
        side, (_, value) = self.sides.get(device), self.graph.calls[call]
        if side is None or not isinstance(value, g.CallTIR):
            return None
        own = side.task_variants[value.callee]
        meaning = site_symbols(own.task.func, value)
        point = tuple(_number(meaning[v], values) for v in own.task.func.symbols)
        return planned_secs(side.plans[value.callee], own.task.domain, point)


def function_costs(
    f: g.Function, sides: Mapping[str, DeviceSide], links: Mapping[str, Link], domain: Sequence[Var]
) -> FunctionCosts:
    """Return the costs of placing a lowered function whose symbols are `domain`.

    Raises:
        BuildError: The program prescribes a device that the build lacks.
    """
    graph, requests = call_graph(f), device_requests(f)
    _check_ordered(f, requests.required, sides)
    orders, hints = (
        {i: own[v] for i, (v, _) in enumerate(graph.calls) if own.get(v) in sides}
        for own in (requests.required, requests.preferred)
    )
    return FunctionCosts(f, graph, tuple(domain), sides, links, orders, hints)


def _check_ordered(f: g.Function, orders: Mapping[g.GVar, str], sides: Mapping[str, DeviceSide]) -> None:
    """Raise BuildError for a value on a device that is not built for. Values may be at home without a build for it."""
    values = (*f.params, *(b.var for b in all_bindings(f)))
    missing = [(v, d) for v in values for d in devices_of(v.info) if d not in sides and (d != HOME or v in orders)]
    if missing:
        v, device = missing[0]
        raise BuildError(
            f"{f.name}: expected {v.name} on one of the devices of the build, {', '.join(sides)}, got the order "
            f"to_device({device}); name {device} among --target, or use hint_on_device, which may be ignored"
        )


def _number(e: Expr, values: Mapping[Var, Expr]) -> int:
    number = as_int(substitute(e, values))
    assert number is not None, e
    return number


def planned_secs(plan: TaskPlan, domain: Domain, point: Point) -> float | None:
    """Return the seconds of the variant that a plan dispatches at a point, by the measured points around it.

    Between two points it is a straight line on log-log paper over the product of the symbols; beyond them in proportion to the nearest.
    """
    row = plan.times.get(plan.plan.choose(point))
    if row is None:
        return None
    known = sorted((max(1, math.prod(p)), t, p) for p, t in zip(domain.points, row, strict=False) if t is not None)
    if not known:
        return None
    exact = [t for _, t, p in known if p == point]
    if exact:
        return exact[0]
    size = max(1, math.prod(point))
    below = [k for k in known if k[0] <= size]
    above = [k for k in known if k[0] >= size]
    if not below or not above:
        nearest = known[0] if not below else known[-1]
        return nearest[1] * (size / nearest[0] if size > nearest[0] else 1.0)
    (a, s, _), (b, t, _) = below[-1], above[0]
    share = 0.0 if a == b else math.log(size / a) / math.log(b / a)
    return math.exp((1 - share) * math.log(s) + share * math.log(t))
