"""The placements of a function: the best at each of some shapes, and the ranges of shapes that each serves.

Tests: `tests/runtime/vm/test_machine.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from relax_tune.ir.core import graph as g
from relax_tune.ir.core.expr import Expr, Var, and_, ceildiv, const, eq, floormod, le, mul, not_
from relax_tune.ir.core.struct_info import info_symbols
from relax_tune.ir.passes.pipeline import LoweredModule
from relax_tune.runtime.program.placement import PlacedFunction, PlacementOption
from relax_tune.tuner.emit.emit_placed import DeviceSide, PlacementPlan
from relax_tune.tuner.placement.costs import FunctionCosts, function_costs
from relax_tune.tuner.placement.links import Link
from relax_tune.tuner.placement.solve import Method, PlacementProblem, solve
from relax_tune.tuner.plan.select import DispatchPlan, GuardTest, select
from relax_tune.tuner.task.domain import Domain, anchors
from relax_tune.tuner.task.extract import function_sizes, ranges_of

ANCHORS = 6
LEAST_SECS = 1e-9
"""Seconds of a function without recorded costs, since times are compared as ratios."""


@dataclass(frozen=True, eq=False)
class FunctionPlacement:
    """The placements of a function, in order: first the ones for ranges of shapes, then spare ones.

    Attributes:
        options: For each placement the position of the device of each call.
        plan: Placement of each range of shapes, by its number as text.
        problems: Costs at each point of `domain`.
        methods: Method that solved each point.
    """

    costs: FunctionCosts
    domain: Domain
    options: tuple[tuple[int, ...], ...]
    plan: DispatchPlan
    problems: tuple[PlacementProblem, ...]
    methods: tuple[Method, ...]

    @property
    def placements(self) -> PlacementPlan:
        """The placements in the form of the emission."""
        calls = [v for v, _ in self.costs.graph.calls]
        names = self.costs.devices
        options = tuple({v: names[d] for v, d in zip(calls, option, strict=True)} for option in self.options)
        return PlacementPlan(
            options, tuple((_cond(e.tests, self.costs.symbols), int(e.variant)) for e in self.plan.entries)
        )

    def secs(self, option: Sequence[int]) -> list[float]:
        """Return the seconds of a placement at each point."""
        return [p.total(option) for p in self.problems]

    def record(self, names: Sequence[str]) -> PlacedFunction:
        """Return the placements with their predicted times, for the artifact.

        Args:
            names: Their host programs.
        """
        problems = [self.costs.problem(p, spare=True) for p in self.domain.points]
        where = {int(e.variant): _shown(e.tests, self.costs.symbols) for e in reversed(self.plan.entries)}
        alternatives = []
        for number, (name, option) in enumerate(zip(names, self.options, strict=True)):
            used = sorted(set(option))
            secs = tuple(
                tuple(sum(row[d] for row, at in zip(p.secs, option, strict=True) if at == d) for p in problems)
                for d in used
            )
            moved = tuple(p.moved(option) for p in problems)
            devices, runs = (tuple(self.costs.devices[d] for d in ds) for ds in (used, option))
            alternatives.append(PlacementOption(name, devices, runs, where.get(number, ""), secs, moved))
        symbols = tuple(v.name for v in self.costs.symbols)
        calls = tuple(x.callee if isinstance(x, g.CallTIR) else x.routine for _, x in self.costs.graph.calls)
        return PlacedFunction(self.costs.f.name, symbols, self.domain.points, calls, tuple(alternatives))


def place_functions(
    lowered: LoweredModule, sides: Mapping[str, DeviceSide], links: Mapping[str, Link]
) -> dict[str, FunctionPlacement]:
    """Choose the placements of every straight-line function.

    The placements on a single device are always included, for the case that the other devices are lost.
    """
    return {n: place_function(lowered, f, sides, links) for n, f in lowered.functions.items()}


def place_function(
    lowered: LoweredModule,
    f: g.Function,
    sides: Mapping[str, DeviceSide],
    links: Mapping[str, Link],
) -> FunctionPlacement:
    """Choose the placements of one function; see `place_functions`."""
    domain, symbols = symbols_domain(lowered, f)
    costs = function_costs(f, sides, links, symbols)
    problems = tuple(costs.problem(p) for p in domain.points)
    solved = [solve(p) for p in problems]
    options = list(dict.fromkeys(s.chosen for s in solved))
    times = {str(i): [max(p.total(o), LEAST_SECS) for p in problems] for i, o in enumerate(options)}
    plan = select(times, domain)
    order = list(dict.fromkeys(int(v) for v in plan.variants))
    distinct = [options[i] for i in order]
    plan = replace(plan, entries=tuple(replace(e, variant=str(order.index(int(e.variant)))) for e in plan.entries))
    distinct += [o for o in _single([costs.problem(p, spare=True) for p in domain.points]) if o not in distinct]
    return FunctionPlacement(costs, domain, tuple(distinct), plan, problems, tuple(s.method for s in solved))


def _single(problems: Sequence[PlacementProblem]) -> list[tuple[int, ...]]:
    """Return the placements on one device each, of the devices that can run every call."""
    devices = range(len(problems[0].devices))
    return [
        (d,) * len(problems[0].secs) for d in devices if all(row[d] < float("inf") for p in problems for row in p.secs)
    ]


def symbols_domain(lowered: LoweredModule, f: g.Function) -> tuple[Domain, tuple[Var, ...]]:
    """Return the shapes a function is placed for, and its symbols."""
    symbols = tuple(dict.fromkeys(v for p in f.params for v in info_symbols(p.info)))
    ranges = {v: r for v, r in ranges_of(lowered.module).items() if v in symbols}
    own = tuple(v for v in symbols if v in ranges)
    allowed = function_sizes(lowered, [f.name], ranges_of(lowered.module))
    return anchors([own], ranges, ANCHORS, allowed=allowed), own


def _cond(tests: Sequence[tuple[GuardTest, bool]], symbols: Sequence[Var]) -> Expr | None:
    """Return the conditions of an entry of a plan as one over the function's symbols; None for the last entry."""
    outcomes = [_test(t, symbols) if outcome else not_(_test(t, symbols)) for t, outcome in tests]
    return and_(*outcomes) if outcomes else None


def _shown(tests: Sequence[tuple[GuardTest, bool]], symbols: Sequence[Var]) -> str:
    cond = _cond(tests, symbols)
    return "otherwise" if cond is None else f"if {cond!r}"


def _test(test: GuardTest, symbols: Sequence[Var]) -> Expr:
    value: Expr = const(1)
    for axis in test.axes:
        value = mul(value, symbols[axis])
    if test.divisor > 1:
        value = ceildiv(value, test.divisor)
    if test.modulus:
        return eq(floormod(value, test.modulus), test.threshold)
    return le(value, test.threshold)
