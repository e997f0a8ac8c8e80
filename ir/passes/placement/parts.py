"""Cut a placed function into parts: straight-line functions on one device each, called by a host function.

Calls of one stage on one device that read each other's results form a part. A transfer leads from one stage to the next, so the parts of
one stage do not depend on each other and can run in parallel on different devices.

Tests: `tests/ir/passes/placement/test_transfers.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from relax_tune.errors import BuildError
from relax_tune.home import HOME
from relax_tune.ir.core import graph as g
from relax_tune.ir.core.function import AnyFunction
from relax_tune.ir.core.graph_walk import into_blocks, operator_of, used_vars
from relax_tune.ir.core.struct_info import TensorInfo, TupleInfo, devices_of
from relax_tune.ir.op.devices import ToDevice
from relax_tune.ir.passes.control.outline import Outliner

Stage = tuple[int, str]
"""The largest number of transfers on a path to a part, and the part's device."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A straight-line function on one device.

    Attributes:
        params: For each parameter, the position of the parameter of the whole function whose value, perhaps transferred, it receives;
            None for computed values.
    """

    name: str
    device: str
    params: tuple[int | None, ...]


def cut(f: g.Function, functions: dict[str, AnyFunction]) -> tuple[Part, ...]:
    """Replace a placed function by one that calls parts and transfers values between them. The parts are added to `functions`."""
    cutter = _Cutter(f, functions)
    functions[f.name] = cutter.run()
    return tuple(cutter.parts)


class _Cutter:
    """Cuts one function.

    Attributes:
        defined: The bindings of its variables.
        stages: The stage of each call and transfer.
        steps: The calls of each stage.
        ready: Variables that the host function has bound.
        done: Calls whose parts the host function has called.
    """

    def __init__(self, f: g.Function, functions: dict[str, AnyFunction]) -> None:
        self.f = f
        self.outliner = Outliner(f, functions)
        self.outliner.names |= {b.var.name for b in f.bindings}
        self.functions = functions
        self.defined: dict[g.GVar, g.AnyBinding] = {b.var: b for b in f.bindings}
        self.stages: dict[g.GVar, Stage] = {}
        self.steps: dict[Stage, list[g.AnyBinding]] = {}
        self.parts: list[Part] = []
        self.out: list[g.AnyBinding] = []
        self.ready: set[g.GVar] = set(f.params)
        self.done: set[g.GVar] = set()

    def run(self) -> g.Function:
        moves: dict[int, list[g.AnyBinding]] = {}
        for b in self.f.bindings:
            before = [(self.stages[r], r) for r in self.roots(b.value)]
            if isinstance(b.value, (g.CallTIR, g.CallDPSLibrary)):
                # one stage later than the transfers it reads, and as early as possible
                number = max((s + _moves(self.defined[r].value) for (s, _), r in before), default=0)
                stage = self.stages[b.var] = number, _device(b.var)
                self.steps.setdefault(stage, []).append(b)
            elif _moves(b.value):
                number = max((s for (s, _), _ in before), default=0)
                self.stages[b.var] = number, _device(b.var)
                moves.setdefault(number, []).append(b)
        transfers = [b for stage_moves in moves.values() for b in stage_moves]
        moved = {r for b in transfers for r in self.roots(b.value)}
        steps = {stage: self.components(calls, stage, moved) for stage, calls in self.steps.items()}
        needed = self.needed([part for parts in steps.values() for part in parts], transfers)
        for number in sorted({n for n, _ in steps} | set(moves)):
            left = moves.get(number, [])
            for stage in [s for s in steps if s[0] == number]:
                for part in steps[stage]:
                    self.part(part, stage, needed)
                    left = self.move(left, stage[1])
            self.move(left)
        self.prepare(self.f.ret)
        return _with_result_names(replace(self.f, blocks=into_blocks(self.out)), self.defined)

    def move(self, moves: Sequence[g.AnyBinding], home_from: str | None = None) -> list[g.AnyBinding]:
        """Emit transfers, and return the remaining ones.

        Args:
            home_from: Emit only transfers to `HOME` of values that this device has computed. The device's queue executes such a transfer
                right after the part. A transfer to another device would block that device's queue, so it is emitted after all parts of
                the stage.
        """
        left = []
        for b in moves:
            roots = [(v, _device(v)) for v in self.roots(b.value)]
            if home_from is not None and not (
                _device(b.var) == HOME and roots and all(v in self.done and d == home_from for v, d in roots)
            ):
                left.append(b)
                continue
            self.prepare(b.value)
            self.out.append(b)
            self.ready.add(b.var)
        return left

    def roots(self, value: g.Value) -> tuple[g.GVar, ...]:
        """Return the calls and transfers that a value depends on through views, tuples and casts only."""
        roots: dict[g.GVar, None] = {}
        todo = list(used_vars(value))
        while todo:
            v = todo.pop()
            if v in self.stages:
                roots[v] = None
            elif v in self.defined:
                todo += used_vars(self.defined[v].value)
        return tuple(roots)

    def components(
        self, calls: Sequence[g.AnyBinding], stage: Stage, moved: Collection[g.GVar]
    ) -> list[list[g.AnyBinding]]:
        """Group the calls of a stage into connected components, each with the bindings that compute its arguments.

        Components whose results are transferred come first, so that other devices do not wait longer than necessary.

        Args:
            moved: Variables that are transferred.
        """
        variables = {b.var for b in calls}
        groups: list[list[g.AnyBinding]] = []
        for b in calls:
            read = variables.intersection(self.roots(b.value))
            joined = [group for group in groups if not read.isdisjoint({x.var for x in group})]
            groups = [group for group in groups if group not in joined]
            groups.append([x for group in joined for x in group] + [b])
        order = {b.var: at for at, b in enumerate(calls)}
        groups = [sorted(group, key=lambda b: order[b.var]) for group in groups]
        groups.sort(key=lambda group: (not any(b.var in moved for b in group), order[group[0].var]))
        components = []
        for group in groups:
            steps: dict[g.GVar, g.AnyBinding] = {}
            for b in group:
                self.lead(b.value, stage, steps)
                steps[b.var] = b
            components.append(list(steps.values()))
        return components

    def lead(self, value: g.Value, stage: Stage, steps: dict[g.GVar, g.AnyBinding]) -> None:
        """Add the bindings between calls and a value to `steps`, operands first."""
        for v in used_vars(value):
            b = self.defined.get(v)
            if b is None or v in steps or v in self.stages or self.is_item_of(b.value, outside=stage):
                continue
            self.lead(b.value, stage, steps)
            steps[v] = b

    def is_item_of(self, value: g.Value, outside: Stage) -> bool:
        """Return whether a value is a field of the result of a call in another part."""
        return isinstance(value, g.TupleItem) and self.stages.get(_source(value), outside) != outside

    def needed(self, steps: Sequence[Sequence[g.AnyBinding]], moves: Sequence[g.AnyBinding]) -> Mapping[g.GVar, None]:
        """Return the variables that the host function reads."""
        needed: dict[g.GVar, None] = {}
        todo = [v for b in moves for v in used_vars(b.value)] + list(used_vars(self.f.ret))
        for part in steps:
            inside = {b.var for b in part}
            todo += [v for b in part for v in used_vars(b.value) if v not in inside]
        while todo:
            v = todo.pop()
            if v in needed:
                continue
            needed[v] = None
            b = self.defined.get(v)
            if b is not None and v not in self.stages and not self.is_field(b.value):
                todo += used_vars(b.value)
        return needed

    def is_field(self, value: g.Value) -> bool:
        """Return whether a value is a field of the result of a call."""
        return isinstance(value, g.TupleItem) and _source(value) in self.stages

    def part(self, steps: list[g.AnyBinding], stage: Stage, needed: Mapping[g.GVar, None]) -> None:
        """Outline a part, and call it."""
        variables = {b.var for b in steps}
        results: list[g.GVar] = []
        tuples: list[tuple[g.GVar, tuple[g.GVar, ...]]] = []
        for var in [b.var for b in steps if b.var in needed and self.stages.get(b.var) == stage]:
            if isinstance(var.info, TensorInfo):
                results.append(var)
                continue
            assert isinstance(var.info, TupleInfo)
            items = tuple(g.GVar(self.outliner.fresh(var.name), i) for i in var.info.fields)
            steps = [*steps, *(g.Binding(v, g.TupleItem(var, i)) for i, v in enumerate(items))]
            tuples.append((var, items))
            results += items
        for v in needed:  # fields that other parts read
            b = self.defined.get(v)
            if b is None or v in self.ready or v in results or not isinstance(b.value, g.TupleItem):
                continue
            if _source(b.value) in variables:
                steps = [*steps, b] if v not in variables else steps
                results.append(v)
        if not results:
            raise BuildError(
                f"{self.f.name}: a part on {stage[1]} has no results that are read; eliminate dead code first"
            )
        results.sort(key=lambda v: [b.var for b in steps].index(v))
        outer = tuple(dict.fromkeys(v for b in steps for v in used_vars(b.value) if v not in {x.var for x in steps}))
        for v in outer:
            self.prepare(v)
        self.out += self.outliner.call(steps, tuple(results))
        name = self.outliner.subgraphs[-1]
        self.parts.append(Part(name, stage[1], tuple(self.position(v) for v in outer)))
        self.out += [g.Binding(var, g.TupleValue(items)) for var, items in tuples]
        self.ready |= {*results, *(var for var, _ in tuples)}
        self.done |= variables

    def position(self, v: g.GVar) -> int | None:
        """Return the position of the parameter that a variable is a transferred copy of; None for other variables."""
        while v in self.defined and _moves(self.defined[v].value):
            (v,) = used_vars(self.defined[v].value)
        return self.f.params.index(v) if v in self.f.params else None

    def prepare(self, value: g.Value) -> None:
        """Emit the bindings that a value depends on in the host function."""
        for v in used_vars(value):
            if v not in self.ready:
                b = self.defined[v]
                self.prepare(b.value)
                self.out.append(b)
                self.ready.add(v)


def _moves(value: g.Value) -> bool:
    return operator_of(value, ToDevice) is not None


def _source(item: g.TupleItem) -> g.GVar:
    assert isinstance(item.value, g.GVar)
    return item.value


def _device(var: g.GVar) -> str:
    (device,) = devices_of(var.info)
    return device


def _with_result_names(f: g.Function, defined: Mapping[g.GVar, g.AnyBinding]) -> g.Function:
    """Return the function with results that are transfers renamed to the values that they transfer."""
    mapping: dict[g.Value, g.Value] = {}
    for v in used_vars(f.ret):
        b = defined.get(v)
        if b is None or not _moves(b.value):
            continue
        (source,) = b.value.operands
        if isinstance(source, g.GVar) and source not in mapping and source not in f.params:
            mapping |= {v: g.GVar(source.name, v.info), source: g.GVar(v.name, source.info)}
    if not mapping:
        return f
    bindings = []
    for b in f.bindings:
        var = mapping.get(b.var, b.var)
        assert isinstance(var, g.GVar)
        bindings.append(replace(b, var=var, value=g.replace_operands(b.value, mapping)))
    return replace(f, blocks=into_blocks(bindings), ret=g.replace_operands(f.ret, mapping))
