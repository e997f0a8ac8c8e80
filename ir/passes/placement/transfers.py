"""Putting in transfers: every value gets a device, and `to_device` stands wherever one is read on another device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from relax_tune.home import HOME
from relax_tune.ir.check.aliasing import is_view
from relax_tune.ir.core import graph as g
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph_walk import all_bindings, into_blocks, nested_values, operator_of
from relax_tune.ir.core.names import fresh
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo, TupleInfo, devices_of, on_device
from relax_tune.ir.op.devices import DeviceOperator, ToDevice
from relax_tune.ir.op.shapes import ShapeOperator
from relax_tune.ir.passes.placement.wishes import signature_on, tensors_in
from relax_tune.ir.rewrite.dead_code import without_dead_code


@dataclass(frozen=True, slots=True, eq=False)
class InsertTransfers:
    """Place every call, and put in the fewest transfers for this placement (Relax's RealizeVDevice, after planning).

    A value gets at most one version on each device, made where it is first read there. A version on another device than `HOME`
    comes from the one at home, which serves all others. Views are remade on each device, for they move nothing; weights
    are everywhere. Versions made on one side of a branch belong to that side. Parameters and results of functions, what host
    code takes and gives, and conditions are at home.

    devices: by the variable of its result, the device of each call; the annotation's, else home, for others
    """

    devices: Mapping[g.GVar, str] = field(default_factory=dict)

    def __call__(self, module: IRModule) -> IRModule:
        functions = dict(module.functions)
        for name, f in module.graphs.items():
            functions[name] = _Placer(f, self.devices).run()
        return replace(module, functions=functions)


class _Placer:
    """Places the calls of one function.

    versions: the variable of each value on each device, in the present scope
    """

    def __init__(self, f: g.Function, devices: Mapping[g.GVar, str]) -> None:
        self.f, self.devices = f, devices
        self.names = {p.name for p in f.params} | {b.var.name for b in all_bindings(f)}
        self.mapping: dict[g.Value, g.Value] = {}
        self.versions: dict[tuple[g.GVar, str], g.Value] = {}
        self.made: dict[g.GVar, g.Value] = {}
        self.out: list[g.AnyBinding] = []
        self.home: dict[g.GVar, g.GVar] = {}

    def run(self) -> g.Function:
        f = self.f
        params = tuple(g.GVar(p.name, on_device(p.info, HOME)) for p in f.params)
        self.mapping = dict(zip(f.params, params, strict=True))
        for v in nested_values(f):
            if isinstance(v, g.FunctionRef):
                self.mapping[v] = replace(v, info=signature_on(v, HOME))
        body = self.body(without_dead_code(f.blocks, f.ret), f.ret)
        return replace(f, params=params, blocks=body.blocks, ret=body.ret, ret_info=on_device(f.ret_info, HOME))

    def body(self, blocks: Sequence[g.AnyBlock], ret: g.Value) -> g.Body:
        """Place the bindings of a scope, and bring the result home."""
        outer = self.out, dict(self.mapping), dict(self.versions)
        self.out = []
        for block in blocks:
            for b in block.bindings:
                self.binding(b)
        found = self.result(g.replace_operands(ret, self.mapping))
        body = g.Body(into_blocks(self.out), found)
        self.out, self.mapping, self.versions = outer
        return body

    def result(self, ret: g.Value) -> g.Value:
        if isinstance(ret, g.TupleValue):
            return g.TupleValue(tuple(self.version(v, HOME) for v in ret.fields))
        return self.version(ret, HOME)

    def binding(self, b: g.AnyBinding) -> None:
        value = b.value
        if isinstance(value, g.If):
            cond = self.version(g.replace_operands(value.cond, self.mapping), HOME)
            sides = [self.body(side.blocks, side.ret) for side in value.bodies]
            self.bind(b, g.If(cond, sides[0], sides[1]), on_device(b.var.info, HOME))
            return
        value = g.replace_operands(value, self.mapping)
        if operator_of(value, DeviceOperator) is not None:
            self.mapping[b.var] = value.operands[0]
        elif isinstance(b, g.MatchCast):
            where = next(iter(devices_of(value.info)), None)
            var = self.new(b.var, on_device(b.var.info, where))
            self.out.append(g.MatchCast(var, value, on_device(b.info, where)))
        elif value.is_atom or isinstance(value, (g.TupleValue, g.TupleItem)) or is_view(value):
            self.bind(b, value, _alias_info(value, b.var.info))
        else:
            self.compute(b, value)

    def compute(self, b: g.Binding, value: g.Value) -> None:
        """Place a call with its arguments on its device."""
        outside = isinstance(value, (g.CallFunction, g.CallHost)) or operator_of(value, ShapeOperator) is not None
        stated = next(iter(devices_of(b.var.info)), HOME)
        device = HOME if outside else self.devices.get(b.var, stated)
        value = value.with_operands([self.version(v, device) for v in value.operands])
        info = on_device(b.var.info, device)
        self.bind(b, value.with_symbols({}, lambda i: on_device(i, device)), info)

    def bind(self, b: g.AnyBinding, value: g.Value, info: StructInfo) -> None:
        var = self.new(b.var, info)
        self.made[var] = value
        self.out.append(g.Binding(var, value))

    def new(self, var: g.GVar, info: StructInfo) -> g.GVar:
        made = g.GVar(var.name, info)
        self.mapping[var] = made
        return made

    def version(self, v: g.Value, device: str) -> g.Value:
        """Return a value as it is on a device; put in the transfer the first time."""
        if not isinstance(v, g.GVar) or all(t.device in (None, device) for t in tensors_in(v.info)):
            return v
        if (v, device) in self.versions:
            return self.versions[v, device]
        made = self.made.get(v)
        found: g.Value
        if isinstance(made, g.GVar):
            found = self.version(made, device)
        elif isinstance(v.info, TupleInfo):
            fields = (
                made.fields if isinstance(made, g.TupleValue) else [self.item(v, i) for i in range(len(v.info.fields))]
            )
            found = self.add(g.TupleValue(tuple(self.version(x, device) for x in fields)), on_device(v.info, device), v)
        elif isinstance(made, g.TupleItem) and isinstance(owner := self.made.get(_var(made)), g.TupleValue):
            found = self.version(owner.fields[made.index], device)
        elif made is not None and is_view(made):
            (source,) = made.operands
            found = self.add(made.with_operands([self.version(source, device)]), on_device(v.info, device), v)
        else:
            source = v if HOME in (device, *devices_of(v.info)) else self.version(v, HOME)
            found = self.add(g.Call(ToDevice(device), (source,)), on_device(v.info, device), v)
        self.versions[v, device] = found
        return found

    def item(self, owner: g.GVar, index: int) -> g.GVar:
        value = g.TupleItem(owner, index)
        return self.add(value, value.info, owner)

    def add(self, value: g.Value, info: StructInfo, hint: g.GVar) -> g.GVar:
        name = fresh(hint.name, self.names)
        self.names.add(name)
        var = g.GVar(name, info)
        self.made[var] = value
        self.out.append(g.Binding(var, value))
        return var


def _var(item: g.TupleItem) -> g.GVar:
    assert isinstance(item.value, g.GVar)
    return item.value


def _alias_info(value: g.Value, info: StructInfo) -> StructInfo:
    """Return an annotation with the devices of the value that it names under other dims."""
    if isinstance(value, g.TupleValue) and isinstance(info, TupleInfo):
        return TupleInfo(tuple(_alias_info(v, i) for v, i in zip(value.fields, info.fields, strict=True)))
    if isinstance(info, TensorInfo):
        source = value.operands[0].info if is_view(value) else value.info
        return on_device(info, next(iter(devices_of(source)), None))
    return value.info if isinstance(info, TupleInfo) else info


def transfers(f: g.Function) -> tuple[g.Binding, ...]:
    """Return the transfers of a function, those inside branches included."""
    return tuple(b for b in all_bindings(f) if isinstance(b, g.Binding) and operator_of(b.value, ToDevice) is not None)
