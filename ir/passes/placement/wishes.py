"""Wishes and orders about devices in a program: dropped for one device, read for several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from relax_tune.ir.core import graph as g
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph_walk import all_bindings, nested_values, operator_of
from relax_tune.ir.core.struct_info import CallableInfo, TensorInfo, TupleInfo, devices_of, info_parts, on_device
from relax_tune.ir.op.devices import DeviceOperator, HintOnDevice
from relax_tune.ir.rewrite.emitter import Emitter, map_graphs, rewrite_function


@dataclass(frozen=True, slots=True)
class DropDevices:
    """Take every device out of a module: annotations lose theirs, and device operators give way to their arguments."""

    def __call__(self, module: IRModule) -> IRModule:
        return map_graphs(module, lambda f, _: _without_devices(f))


def _without_devices(f: g.Function) -> g.Function:
    infos = (*(p.info for p in f.params), f.ret_info, *(b.var.info for b in all_bindings(f)))
    operators = any(operator_of(b.value, DeviceOperator) is not None for b in all_bindings(f))
    if not operators and not any(map(devices_of, infos)):
        return f
    params = tuple(p if p.info is (i := on_device(p.info, None)) else g.GVar(p.name, i) for p in f.params)
    mapping: dict[g.Value, g.Value] = dict(zip(f.params, params, strict=True))
    mapping |= {v: replace(v, info=signature_on(v, None)) for v in nested_values(f) if isinstance(v, g.FunctionRef)}

    def visit(out: Emitter, binding: g.AnyBinding) -> None:
        value = out.value(binding.value)
        if operator_of(value, DeviceOperator) is not None:
            out.mapping[binding.var] = value.operands[0]
            return
        value = value.with_symbols({}, lambda info: on_device(info, None))
        var, info = binding.var, on_device(binding.var.info, None)
        if info is not var.info:
            out.mapping[var] = var = g.GVar(var.name, info)
        if isinstance(binding, g.MatchCast):
            out.bindings.append(g.MatchCast(var, value, on_device(binding.info, None)))
        elif var is binding.var and value is binding.value:
            out.bindings.append(binding)
        else:
            out.bindings.append(g.Binding(var, value))

    found = rewrite_function(f, visit, mapping=mapping)
    return replace(found, params=params, ret_info=on_device(f.ret_info, None))


def signature_on(function: g.FunctionRef, device: str | None) -> CallableInfo:
    """Return the signature of a function whose parameters and results live on a device."""
    info = on_device(function.info, device)
    assert isinstance(info, CallableInfo)
    return info


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWishes:
    """The devices that a function states for its calls.

    orders: by the variable of a call's result, the device on which it must run, by its annotation
    hints: the device on which it is wished to run
    """

    orders: Mapping[g.GVar, str]
    hints: Mapping[g.GVar, str]


def wishes_of(f: g.Function) -> DeviceWishes:
    """Read the orders and hints of a lowered function. The hint of a value is one for the call that makes it."""
    made = {b.var: b.value for b in all_bindings(f)}
    orders: dict[g.GVar, str] = {}
    hints: dict[g.GVar, str] = {}
    for var, value in made.items():
        if isinstance(value, (g.CallTIR, g.CallDPSLibrary)):
            orders |= dict.fromkeys([var] if (found := devices_of(value.info)) else [], next(iter(found), ""))
        hint = operator_of(value, HintOnDevice)
        if hint is not None and (source := _maker(value.operands[0], made)) is not None:
            hints[source] = hint.device
    return DeviceWishes(orders, {v: d for v, d in hints.items() if v not in orders})


def _maker(value: g.Value, made: Mapping[g.GVar, g.Value]) -> g.GVar | None:
    """Return the variable of the call that makes a value, through views and items of tuples. None for a parameter."""
    while isinstance(value, g.GVar) and value in made:
        source = made[value]
        if isinstance(source, (g.CallTIR, g.CallDPSLibrary)):
            return value
        if not source.operands:
            return None
        value = source.operands[0]
    return None


def tensors_in(info: object) -> tuple[TensorInfo, ...]:
    """Return the annotations of the tensors in a value."""
    if isinstance(info, TupleInfo):
        return tuple(t for f in info.fields for t in tensors_in(f))
    return tuple(i for i in info_parts(info) if isinstance(i, TensorInfo)) if isinstance(info, TensorInfo) else ()
