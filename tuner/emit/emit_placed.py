"""Emit a module placed on several devices: a program for each part, and host programs that call parts and move values."""

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
from relax_tune.tuner.emit.emit_graph import GraphEmitter, choose_inplace
from relax_tune.tuner.emit.emit_host_program import emit_host_program
from relax_tune.tuner.plan.plans import TaskPlan
from relax_tune.tuner.program.program_builder import ProgramBuilder
from relax_tune.tuner.task.task import Choices


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSide:
    """The parts of a build on one device: the choices and the plan of each task, and the code target."""

    choices: Mapping[str, Choices]
    plans: Mapping[str, TaskPlan]
    target: CodeTarget


@dataclass(frozen=True, slots=True, eq=False)
class PlacementPlan:
    """The placements of a function, and the shapes that each is for.

    options: by placement the device of each call, by the variable of its result
    entries: conditions over the symbols of the parameters, with the number of a placement; the first that holds counts, and the
        last has none. Placements that no entry names are spare
    """

    options: tuple[Mapping[g.GVar, str], ...]
    entries: tuple[tuple[Expr | None, int], ...] = ((None, 0),)


@dataclass(frozen=True, slots=True)
class PlacedPrograms:
    """The programs of a placed module.

    parts: the device of each program
    names: of each function the host programs of its placements, in order
    notes: what could not be written in place, one sentence each
    module: the module of parts and host functions, for people
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

    placements: by function
    sides: by the kind of a device
    memory: as of `emit.build.MEMORY`
    """
    placed, names, devices = place_module(lowered, placements)
    programs: dict[str, Program] = {}
    notes: list[str] = []
    for kind, side in sides.items():
        own = {n for n, d in devices.items() if d == kind}
        kept = {n: f for n, f in placed.module.functions.items() if n in own or n in placed.prims}
        alone = replace(placed, module=replace(placed.module, functions=kept), host_functions=())
        alone, found = choose_inplace(alone, side.choices, side.plans, find=memory[1])
        notes += found
        for n, f in alone.functions.items():
            builder = ProgramBuilder(n, side.target)
            programs[n] = GraphEmitter(alone, f, side.choices, side.plans, builder, memory[0]).run()
    host_programs = []
    for n in placed.host_functions:
        checks = placed.checks.get(n, ())
        entry = n in placed.entries
        host_programs.append(emit_host_program(n, placed.outlined, programs, entry, checks))
    parts = tuple(PartDevice(n, devices[n]) for n in sorted(programs))
    return PlacedPrograms(programs, tuple(host_programs), parts, names, tuple(dict.fromkeys(notes)), placed)


def place_module(
    lowered: LoweredModule, placements: Mapping[str, PlacementPlan]
) -> tuple[LoweredModule, dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the module of parts and host functions, the names of each function's placements, and the device of each part."""
    functions: dict[str, AnyFunction] = {
        n: f for n, f in lowered.module.functions.items() if not isinstance(f, g.Function)
    }
    names: dict[str, tuple[str, ...]] = {}
    parts: list[Part] = []
    checks = {n: own for n, own in lowered.checks.items()}
    ranges: dict[str, tuple[IndexRange, ...]] = {}
    hosts = list(lowered.host_functions)
    for name, f in lowered.functions.items():
        options = placements[name].options
        alone = len(options) == 1
        names[name] = (name,) if alone else tuple(f"{name}_placed{i}" for i in range(len(options)))
        for own, option in zip(names[name], options, strict=True):
            functions[own] = replace(f, name=own)
            placed = InsertTransfers(option)(replace(lowered.module, functions={own: replace(f, name=own)}))
            made = cut(placed.graphs[own], functions)
            parts += made
            ranges |= _ranges(made, lowered.ranges.get(name, ()))
            checks[own] = lowered.checks.get(name, ())
        hosts += names[name]
        if not alone:
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
    """Return what the parameters of parts that are used as indices may hold."""
    found = {}
    for part in parts:
        own = [replace(r, position=at) for at, p in enumerate(part.params) for r in ranges if r.position == p]
        if own:
            found[part.name] = tuple(own)
    return found


def _chooser(
    f: g.Function, entries: Sequence[tuple[Expr | None, str]], functions: Mapping[str, AnyFunction]
) -> g.Function:
    """Return the function that calls one of its placements, by conditions over the symbols of its parameters."""
    params = tuple(g.GVar(p.name, on_device(p.info, HOME)) for p in f.params)
    info = on_device(f.ret_info, HOME)
    first = functions[entries[0][1]]
    assert isinstance(first, g.Function)
    ret = first.ret  # its names are those of a build for one device

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
