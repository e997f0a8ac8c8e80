"""Print graph functions: annotations, values, blocks and branches.

Tests: `tests/ir/text/test_text_graph.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from relax_tune.ir.core import graph as g
from relax_tune.ir.core import graph_walk
from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import Const, Expr
from relax_tune.ir.core.graph_base import Operator
from relax_tune.ir.core.struct_info import (
    CallableInfo,
    ObjectInfo,
    PrimInfo,
    ShapeInfo,
    StructInfo,
    TensorInfo,
    TupleInfo,
)
from relax_tune.ir.text.print_tensor import TensorPrinter, is_identifier, quote


class GraphPrinter(TensorPrinter):
    """Printer of both levels."""

    def function(self, f: g.Function, key: str) -> None:
        with self.scope():
            params: list[str] = []
            for p in f.params:
                info = self.annotation(p.info)
                params.append(f"{self.declare(p, 'g')}: {info}")
                self.line_of[id(p)] = len(self.lines) + 1
            # the result may use symbols that a match_cast in the body binds: printed last, inserted in the header
            at = len(self.lines)
            self.depth += 1
            self.blocks(f.blocks)
            self.emit(f"return {self.value(f.ret)}", f.ret)
            self.depth -= 1
            body, self.lines = self.lines[at:], self.lines[:at]
            options = [*([] if f.pure else ["pure=False"]), *self._names_outside(f)]
            self._def("function", options, key, params, f" -> {self.annotation(f.ret_info)}")
            shift = len(self.lines) - at
            self.line_of = {k: v + shift if at <= v and self._in_body(f, k) else v for k, v in self.line_of.items()}
            self.lines += body

    def _names_outside(self, f: g.Function) -> list[str]:
        """Return the option for names of parameters and results that are no identifiers, such as `input:0`."""
        results = f.ret.fields if isinstance(f.ret, g.TupleValue) else (f.ret,)
        crossing = [v for v in (*f.params, *results) if isinstance(v, g.GVar) and v in self.names]
        if self.normalise or all(is_identifier(v.name) for v in crossing):
            return []
        outside = {self.names[v]: v.name for v in crossing if self.names[v] != v.name}
        return [f"names={{{', '.join(f'{quote(name)}: {quote(real)}' for name, real in outside.items())}}}"]

    @staticmethod
    def _in_body(f: g.Function, key: int) -> bool:
        return key not in {id(p) for p in f.params}

    def blocks(self, blocks: Sequence[g.AnyBlock]) -> None:
        """Print dataflow blocks under their heading, other bindings plain."""
        for dataflow, bindings in graph_walk.regions(blocks):
            if dataflow:
                self.emit("with dataflow():")
                self.depth += 1
            for binding in bindings:
                self.binding(binding)
            if dataflow:
                if not bindings:
                    self.emit("pass")
                self.depth -= 1

    def binding(self, b: g.AnyBinding) -> None:
        info = self.annotation(b.var.info)
        if isinstance(b.value, g.If) and isinstance(b, g.Binding):
            self.branch(b, b.value, info)
            return
        value = self.value(b.value)
        if isinstance(b, g.MatchCast):
            value = f"match_cast({value}, {self.annotation(b.info)})"
        self.emit(f"{self.declare(b.var, 'g')}: {info} = {value}", b)

    def branch(self, b: g.Binding, value: g.If, info: str) -> None:
        """Print an `if`: the annotation of the result first; each side ends in an assignment to it."""
        cond = self.value(value.cond)
        name = self.declare(b.var, "g")
        self.emit(f"{name}: {info}")
        self.emit(f"if {cond}:", b)
        for heading, body in (("", value.then), ("else:", value.orelse)):
            if heading:
                self.emit(heading)
            self.depth += 1
            with self.scope():
                self.blocks(body.blocks)
                self.emit(f"{name} = {self.value(body.ret)}", body)
            self.depth -= 1

    def value(self, v: g.Value) -> str:
        match v:
            case g.GVar():
                return self.name(v)
            case g.Constant(name, info):
                return f"const({quote(name)}, {self.info(info)})"
            case g.ShapeValue(dims):
                return f"shape({', '.join(map(self.expr, dims))})"
            case g.PrimValue(scalar):
                return f"prim({self.attribute(scalar)})"
            case g.FunctionRef(name):
                return f"fn({quote(name)})"
            case g.CallFunction(g.FunctionRef(name), args):
                return f"call({', '.join([quote(name), *map(self.value, args)])})"
            case g.CallFunction(callee, args):
                return f"call({', '.join([self.value(callee), *map(self.value, args)])})"
            case g.CallHost(routine, args, out, pure):
                options = f"out={self.annotation(out)}{', pure=True' if pure else ''}"
                return f"call_host({quote(routine)}, {self.values(args)}, {options})"
            case g.TupleValue(parts):
                return self.values(parts)
            case g.TupleItem(whole, index):
                return f"{self.value(whole)}[{index}]"
            case g.Call(operator, args):
                shown = [
                    f
                    for f in fields(operator)
                    if not (f.metadata.get("quiet") and getattr(operator, f.name) == f.default)
                ]
                attributes = [f"{f.name}={self.attribute(getattr(operator, f.name))}" for f in shown]
                return f"op.{operator_name(operator)}({', '.join([*map(self.value, args), *attributes])})"
            case g.CallDPSLibrary(routine):
                return self.call("call_dps_library", routine, v)
            case g.CallTIR(callee, inplace=()):
                return self.call("call_tir", callee, v)
            case g.CallTIR(callee, inplace=places):
                return self.call("call_tir_inplace", callee, v, f", inplace=[{', '.join(map(str, places))}]")
        raise TypeError(f"the printer has no case for the value {type(v).__name__}")

    def call(self, kind: str, callee: str, v: g.CallTIR | g.CallDPSLibrary, where: str = "") -> str:
        infos = [self.annotation(o) for o in v.out]
        out = infos[0] if len(infos) == 1 else self.tuple(infos)
        scalars = f", scalars=[{', '.join(map(self.expr, v.scalars))}]" if v.scalars else ""
        return f"{kind}({quote(callee)}, {self.values(v.args)}, out={out}{scalars}{where})"

    def values(self, values: Sequence[g.Value]) -> str:
        return self.tuple([self.value(v) for v in values])

    @staticmethod
    def tuple(parts: Sequence[str]) -> str:
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"

    def attribute(self, x: object) -> str:
        """Return the text of an attribute.

        A non-empty tuple of expressions prints as a list and a literal expression in full, so that the parser tells expressions
        from plain numbers."""
        match x:
            case Const(value=value):
                return f"const({value!r}, {x.dtype})"
            case Expr():
                return self.expr(x)
            case DType():
                return x.short
            case tuple() if x and all(isinstance(i, Expr) for i in x):
                return f"[{', '.join(map(self.expr, x))}]"
            case tuple():
                return self.tuple([self.attribute(i) for i in x])
            case str():
                return quote(x)
            case None | bool() | int() | float():  # infinities print as `inf`
                return repr(x)
        raise TypeError(f"expected an operator attribute of plain values, expressions or tuples of them; got {x!r}")

    def annotation(self, info: StructInfo) -> str:
        """Return the text of an annotation that declares its unknown symbols by naming them."""
        before, self.implicit = self.implicit, True
        text = self.info(info)
        self.implicit = before
        return text

    def info(self, info: StructInfo) -> str:
        match info:
            case TensorInfo(shape, dtype, _, device) if shape is not None:
                return f"Tensor({self.dims(shape)}, {dtype}{_where(device)})"
            case TensorInfo(_, dtype, ndim, device):
                return f"Tensor(None, {dtype}{'' if ndim is None else f', ndim={ndim}'}{_where(device)})"
            case ShapeInfo(values) if values is not None:
                return f"Shape([{', '.join(map(self.expr, values))}])"
            case ShapeInfo(_, ndim):
                return f"Shape(None{'' if ndim is None else f', ndim={ndim}'})"
            case PrimInfo(dtype, value):
                return f"Prim({dtype}{'' if value is None else f', {self.expr(value)}'})"
            case TupleInfo(parts):
                return f"Tuple({', '.join(map(self.info, parts))})"
            case CallableInfo(params, ret, pure):
                with self.scope():
                    parts_of_params = "None" if params is None else self.tuple([self.info(p) for p in params])
                    return f"Callable({parts_of_params}, {self.info(ret)}{'' if pure else ', pure=False'})"
            case ObjectInfo():
                return "Object()"


def _where(device: str | None) -> str:
    return "" if device is None else f", device={quote(device)}"


def operator_name(op: Operator) -> str:
    """Return the name that the class of an operator sets."""
    name: str = getattr(op, "name")  # noqa: B009 - the base class declares no attributes
    return name
