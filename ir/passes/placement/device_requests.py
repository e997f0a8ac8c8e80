"""Devices that a program requests for its calls: read for a build for several devices, dropped for one device.

Tests: `tests/ir/passes/placement/test_transfers.py`.
"""

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
    """Remove every device from a module: devices of annotations, and device operators, which are replaced by their arguments."""

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

    new = rewrite_function(f, visit, mapping=mapping)
    return replace(new, params=params, ret_info=on_device(f.ret_info, None))


def signature_on(function: g.FunctionRef, device: str | None) -> CallableInfo:
    """Return the signature of a function whose parameters and results are on a device."""
    info = on_device(function.info, device)
    assert isinstance(info, CallableInfo)
    return info


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRequests:
    """The devices that a function requests for its calls, by the variable of a call's result.

    Attributes:
        required: The device of the result's annotation, on which the call must run.
        preferred: The device of a hint, for calls without a required device.
    """

    required: Mapping[g.GVar, str]
    preferred: Mapping[g.GVar, str]


def device_requests(f: g.Function) -> DeviceRequests:
    """Read the devices that a lowered function requests. A hint for a value applies to the call that computes it."""
    values = {b.var: b.value for b in all_bindings(f)}
    required: dict[g.GVar, str] = {}
    preferred: dict[g.GVar, str] = {}
    for var, value in values.items():
        if isinstance(value, (g.CallTIR, g.CallDPSLibrary)):
            required |= dict.fromkeys([var] if (devices := devices_of(value.info)) else [], next(iter(devices), ""))
        hint = operator_of(value, HintOnDevice)
        if hint is not None and (source := _source_call(value.operands[0], values)) is not None:
            preferred[source] = hint.device
    return DeviceRequests(required, {v: d for v, d in preferred.items() if v not in required})


def _source_call(value: g.Value, values: Mapping[g.GVar, g.Value]) -> g.GVar | None:
    """Return the variable of the call that computes a value, through views and items of tuples; None for a parameter."""
    while isinstance(value, g.GVar) and value in values:
        source = values[value]
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
