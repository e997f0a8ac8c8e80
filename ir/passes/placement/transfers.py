"""Insert transfers: every value gets a device, and a `to_device` wherever it is read on another device."""

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
from relax_tune.ir.passes.placement.device_requests import signature_on, tensors_in
from relax_tune.ir.rewrite.dead_code import without_dead_code


@dataclass(frozen=True, slots=True, eq=False)
class InsertTransfers:
    """Assign calls to devices, and insert the fewest transfers for this assignment (Relax's RealizeVDevice, after planning).

    A value is copied to each device at most once, before it is first read there. Copies on devices other than `HOME` are transferred from
    the copy on `HOME`. Views are computed on each device, since they move no data, and weights exist on all devices. Copies on one side of
    a branch are used only on that side. Parameters and results of functions, arguments and results of host code, and conditions are on
    `HOME`.

    Attributes:
        devices: Device of each call, by the variable of its result. Other calls run on the device of their annotation, else on `HOME`.
    """

    devices: Mapping[g.GVar, str] = field(default_factory=dict)

    def __call__(self, module: IRModule) -> IRModule:
        functions = dict(module.functions)
        for name, f in module.graphs.items():
            functions[name] = _Placer(f, self.devices).run()
        return replace(module, functions=functions)


class _Placer:
    """Places the calls of one function.

    Attributes:
        copies: The copy of each value on each device, in the present scope.
        definitions: The value that each new variable is bound to.
    """

    def __init__(self, f: g.Function, devices: Mapping[g.GVar, str]) -> None:
        self.f, self.devices = f, devices
        self.names = {p.name for p in f.params} | {b.var.name for b in all_bindings(f)}
        self.mapping: dict[g.Value, g.Value] = {}
        self.copies: dict[tuple[g.GVar, str], g.Value] = {}
        self.definitions: dict[g.GVar, g.Value] = {}
        self.out: list[g.AnyBinding] = []

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
        """Place the bindings of a scope, and transfer the result to `HOME`."""
        # copies from this scope are not visible after it, since its branch may not have been executed
        outer = self.out, dict(self.mapping), dict(self.copies)
        self.out = []
        for block in blocks:
            for b in block.bindings:
                self.binding(b)
        result = self.result(g.replace_operands(ret, self.mapping))
        body = g.Body(into_blocks(self.out), result)
        self.out, self.mapping, self.copies = outer
        return body

    def result(self, ret: g.Value) -> g.Value:
        if isinstance(ret, g.TupleValue):
            return g.TupleValue(tuple(self.copy_on(v, HOME) for v in ret.fields))
        return self.copy_on(ret, HOME)

    def binding(self, b: g.AnyBinding) -> None:
        value = b.value
        if isinstance(value, g.If):
            cond = self.copy_on(g.replace_operands(value.cond, self.mapping), HOME)
            sides = [self.body(side.blocks, side.ret) for side in value.bodies]
            self.bind(b, g.If(cond, sides[0], sides[1]), on_device(b.var.info, HOME))
            return
        value = g.replace_operands(value, self.mapping)
        if operator_of(value, DeviceOperator) is not None:
            self.mapping[b.var] = value.operands[0]
        elif isinstance(b, g.MatchCast):
            device = next(iter(devices_of(value.info)), None)
            var = self.new(b.var, on_device(b.var.info, device))
            self.out.append(g.MatchCast(var, value, on_device(b.info, device)))
        elif value.is_atom or isinstance(value, (g.TupleValue, g.TupleItem)) or is_view(value):
            self.bind(b, value, _alias_info(value, b.var.info))
        else:
            self.compute(b, value)

    def compute(self, b: g.Binding, value: g.Value) -> None:
        """Place a call and its arguments on its device."""
        outside = isinstance(value, (g.CallFunction, g.CallHost)) or operator_of(value, ShapeOperator) is not None
        annotated = next(iter(devices_of(b.var.info)), HOME)
        device = HOME if outside else self.devices.get(b.var, annotated)
        value = value.with_operands([self.copy_on(v, device) for v in value.operands])
        info = on_device(b.var.info, device)
        self.bind(b, value.with_symbols({}, lambda i: on_device(i, device)), info)

    def bind(self, b: g.AnyBinding, value: g.Value, info: StructInfo) -> None:
        var = self.new(b.var, info)
        self.definitions[var] = value
        self.out.append(g.Binding(var, value))

    def new(self, var: g.GVar, info: StructInfo) -> g.GVar:
        new = g.GVar(var.name, info)
        self.mapping[var] = new
        return new

    def copy_on(self, v: g.Value, device: str) -> g.Value:
        """Return the copy of a value on a device; insert the transfer the first time."""
        if not isinstance(v, g.GVar) or all(t.device in (None, device) for t in tensors_in(v.info)):
            return v
        if (v, device) in self.copies:
            return self.copies[v, device]
        definition = self.definitions.get(v)
        copy: g.Value
        if isinstance(definition, g.GVar):
            copy = self.copy_on(definition, device)
        elif isinstance(v.info, TupleInfo):
            fields = (
                definition.fields
                if isinstance(definition, g.TupleValue)
                else [self.item(v, i) for i in range(len(v.info.fields))]
            )
            copy = self.add(g.TupleValue(tuple(self.copy_on(x, device) for x in fields)), on_device(v.info, device), v)
        elif isinstance(definition, g.TupleItem) and isinstance(
            owner := self.definitions.get(_var(definition)), g.TupleValue
        ):
            copy = self.copy_on(owner.fields[definition.index], device)
        elif definition is not None and is_view(definition):
            (source,) = definition.operands
            copy = self.add(definition.with_operands([self.copy_on(source, device)]), on_device(v.info, device), v)
        else:
            source = v if HOME in (device, *devices_of(v.info)) else self.copy_on(v, HOME)
            copy = self.add(g.Call(ToDevice(device), (source,)), on_device(v.info, device), v)
        self.copies[v, device] = copy
        return copy

    def item(self, owner: g.GVar, index: int) -> g.GVar:
        value = g.TupleItem(owner, index)
        return self.add(value, value.info, owner)

    def add(self, value: g.Value, info: StructInfo, hint: g.GVar) -> g.GVar:
        name = fresh(hint.name, self.names)
        self.names.add(name)
        var = g.GVar(name, info)
        self.definitions[var] = value
        self.out.append(g.Binding(var, value))
        return var


def _var(item: g.TupleItem) -> g.GVar:
    assert isinstance(item.value, g.GVar)
    return item.value


def _alias_info(value: g.Value, info: StructInfo) -> StructInfo:
    """Return the annotation of a view or alias with the devices of the value that it refers to."""
    if isinstance(value, g.TupleValue) and isinstance(info, TupleInfo):
        return TupleInfo(tuple(_alias_info(v, i) for v, i in zip(value.fields, info.fields, strict=True)))
    if isinstance(info, TensorInfo):
        source = value.operands[0].info if is_view(value) else value.info
        return on_device(info, next(iter(devices_of(source)), None))
    return value.info if isinstance(info, TupleInfo) else info


def transfers(f: g.Function) -> tuple[g.Binding, ...]:
    """Return the transfers of a function, including those inside branches."""
    return tuple(b for b in all_bindings(f) if isinstance(b, g.Binding) and operator_of(b.value, ToDevice) is not None)
