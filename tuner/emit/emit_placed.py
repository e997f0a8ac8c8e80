"""Emit a module placed on several devices: a program for each part, and host programs that call parts and move values.

Tests: `tests/runtime/vm/test_machine.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from relax_tune.home import HOME
from relax_tune.ir.codegen.generate import CodeTarget
from relax_tune.ir.core import graph as g
from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.function import AnyFunction
from relax_tune.ir.core.graph_walk import into_blocks
from relax_tune.ir.core.struct_info import TupleInfo, on_device
from relax_tune.ir.deduce.deduce import signature
from relax_tune.ir.deduce.index_ranges import IndexRange
from relax_tune.ir.passes.memory.memory_plan import PlanMemory
from relax_tune.ir.passes.pipeline import LoweredModule
from relax_tune.ir.passes.placement.parts import Part, cut
from relax_tune.ir.passes.placement.transfers import InsertTransfers
from relax_tune.runtime.program.host_program import HostProgram
from relax_tune.runtime.program.placement import PartDevice
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.emit.build import emit_host_programs, emit_programs
from relax_tune.tuner.emit.emit_graph import choose_inplace, lowered_functions
from relax_tune.tuner.plan.plans import TaskPlan
from relax_tune.tuner.task.variants import TaskVariants


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSide:
    """One device of a build: the variants and the plan of each task, and the code target."""

    task_variants: Mapping[str, TaskVariants]
    plans: Mapping[str, TaskPlan]
    target: CodeTarget


@dataclass(frozen=True, slots=True, eq=False)
class PlacementPlan:
    """The placements of a function, and the shapes that each is for.

    Attributes:
        options: For each placement the device of each call, by the variable of its result.
        entries: Conditions over the symbols of the parameters, each with the number of a placement. The first condition that holds
            decides; the last entry has none. A placement without an entry replaces others when a device is lost.
    """

    options: tuple[Mapping[g.GVar, str], ...]
    entries: tuple[tuple[Expr | None, int], ...] = ((None, 0),)


@dataclass(frozen=True, slots=True)
class PlacedPrograms:
    """The programs of a placed module.

    Attributes:
        parts: Device of each program.
        names: Host programs of the placements of each function, in order.
        notes: Outputs that could not be written in place, one sentence each.
        lowered: Module of parts and host functions, for people.
    """

    programs: Mapping[str, Program]
    host_programs: tuple[HostProgram, ...]
    parts: tuple[PartDevice, ...]
    names: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]
    lowered: LoweredModule = field(repr=False)


def emit_placed(
    lowered: LoweredModule,
    placements: Mapping[str, PlacementPlan],
    sides: Mapping[str, DeviceSide],
    memory: tuple[PlanMemory, bool],
) -> PlacedPrograms:
    """Emit every straight-line function in each of its placements, and the host functions around them.

    Args:
        placements: By function.
        sides: By kind of device.
        memory: A value of `emit.build.MEMORY`.
    """
    placed, names, devices = place_module(lowered, placements)
    programs: dict[str, Program] = {}
    notes: list[str] = []
    for kind, side in sides.items():
        # A part is emitted with the plans of its device, and may write in place only within it: memory is not
        # shared between devices.
        parts_here = {n for n, d in devices.items() if d == kind}
        functions_here = {n: f for n, f in placed.module.functions.items() if n in parts_here or n in placed.prims}
        device_module = replace(placed, module=replace(placed.module, functions=functions_here), host_functions=())
        module, refused = choose_inplace(device_module.module, {}, side.task_variants, side.plans, memory[1])
        notes += refused
        functions = lowered_functions(device_module, module)
        programs |= emit_programs(functions, side.task_variants, side.plans, side.target, memory[0])[0]
    parts = tuple(PartDevice(n, devices[n]) for n in sorted(programs))
    host_programs = emit_host_programs(placed, programs)
    return PlacedPrograms(programs, host_programs, parts, names, tuple(dict.fromkeys(notes)), placed)


def place_module(
    lowered: LoweredModule, placements: Mapping[str, PlacementPlan]
) -> tuple[LoweredModule, dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the module of parts and host functions, the names of each function's placements, and the device of each part."""
    functions: dict[str, AnyFunction] = {
        n: f for n, f in lowered.module.functions.items() if not isinstance(f, g.Function)
    }
    names: dict[str, tuple[str, ...]] = {}
    parts: list[Part] = []
    # Checks stay with the host function of each placement, which sees all symbols; a part knows only its own
    # arguments.
    checks = {n: own for n, own in lowered.checks.items()}
    ranges: dict[str, tuple[IndexRange, ...]] = {}
    hosts = list(lowered.host_functions)
    for name, f in lowered.functions.items():
        options = placements[name].options
        single = len(options) == 1
        names[name] = (name,) if single else tuple(f"{name}_placed{i}" for i in range(len(options)))
        for own, option in zip(names[name], options, strict=True):
            functions[own] = replace(f, name=own)
            placed = InsertTransfers(option)(replace(lowered.module, functions={own: replace(f, name=own)}))
            new_parts = cut(placed.graphs[own], functions)
            parts += new_parts
            ranges |= _ranges(new_parts, lowered.ranges.get(name, ()))
            checks[own] = lowered.checks.get(name, ())
        hosts += names[name]
        if not single:
            entries = [(cond, names[name][number]) for cond, number in placements[name].entries]
            functions[name] = _chooser(f, entries, functions)
            hosts.append(name)
            checks[name] = ()
    around = {n: f for n, f in lowered.module.graphs.items() if n in lowered.host_functions}
    functions |= InsertTransfers()(replace(lowered.module, functions=around)).functions
    checks |= {p.name: () for p in parts}
    module = replace(lowered.module, functions=functions)
    new = replace(
        lowered, module=module, checks=checks, host_functions=tuple(hosts), ranges=ranges, index_checks={}, appended={}
    )
    return new, names, {p.name: p.device for p in parts}


def _ranges(parts: Sequence[Part], ranges: Sequence[IndexRange]) -> dict[str, tuple[IndexRange, ...]]:
    """Return the permitted values of parameters of parts that are used as indices."""
    by_part = {}
    for part in parts:
        part_ranges = [replace(r, position=at) for at, p in enumerate(part.params) for r in ranges if r.position == p]
        if part_ranges:
            by_part[part.name] = tuple(part_ranges)
    return by_part


def _chooser(
    f: g.Function, entries: Sequence[tuple[Expr | None, str]], functions: Mapping[str, AnyFunction]
) -> g.Function:
    """Return the function that calls one of its placements, by conditions over the symbols of its parameters."""
    params = tuple(g.GVar(p.name, on_device(p.info, HOME)) for p in f.params)
    info = on_device(f.ret_info, HOME)
    first = functions[entries[0][1]]
    assert isinstance(first, g.Function)
    ret = first.ret  # keeps the result names of a build for one device

    def side(number: int) -> g.Body:
        cond, name = entries[number]
        called = functions[name]
        assert isinstance(called, g.Function)
        var = g.GVar(g.name_of(ret, "result"), info)
        value: g.Value = g.CallFunction(g.FunctionRef(name, signature(called)), params)
        if cond is not None:
            value = g.If(g.PrimValue(cond), _only(var, value), side(number + 1))
        return _only(var, value)

    body = side(0)
    if not isinstance(info, TupleInfo) or not isinstance(ret, g.TupleValue):
        return replace(f, params=params, blocks=body.blocks, ret=body.ret, ret_info=info)
    items = [
        g.Binding(g.GVar(g.name_of(v, "result"), i), g.TupleItem(body.ret, at))
        for at, (v, i) in enumerate(zip(ret.fields, info.fields, strict=True))
    ]
    blocks = (*body.blocks, *into_blocks(items))
    return replace(f, params=params, blocks=blocks, ret=g.TupleValue(tuple(b.var for b in items)), ret_info=info)


def _only(var: g.GVar, value: g.Value) -> g.Body:
    var = g.GVar(var.name, var.info)
    return g.Body(into_blocks([g.Binding(var, value)]), var)
