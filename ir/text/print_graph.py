"""Print graph functions: annotations, values, blocks and branches."""

from __future__ import annotations

import math
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
from relax_tune.ir.text.print_tensor import TensorPrinter, quote


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
            self._def("function", [] if f.pure else ["pure=False"], key, params, f" -> {self.annotation(f.ret_info)}")
            shift = len(self.lines) - at
            self.line_of = {k: v + shift if at <= v and self._in_body(f, k) else v for k, v in self.line_of.items()}
            self.lines += body

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
        if isinstance(v, g.GVar):
            return self.name(v)
        if isinstance(v, g.Constant):
            return f"const({quote(v.name)}, {self.info(v.info)})"
        if isinstance(v, g.ShapeValue):
            return f"shape({', '.join(map(self.expr, v.values))})"
        if isinstance(v, g.PrimValue):
            return f"prim({self.attribute(v.value)})"
        if isinstance(v, g.FunctionRef):
            return f"fn({quote(v.name)})"
        if isinstance(v, g.CallFunction):
            callee = quote(v.callee.name) if isinstance(v.callee, g.FunctionRef) else self.value(v.callee)
            return f"call({', '.join([callee, *map(self.value, v.args)])})"
        if isinstance(v, g.CallHost):
            pure = ", pure=True" if v.pure else ""
            args = self.tuple([self.value(a) for a in v.args])
            return f"call_host({quote(v.routine)}, {args}, out={self.annotation(v.out)}{pure})"
        if isinstance(v, g.TupleValue):
            return self.tuple([self.value(x) for x in v.fields])
        if isinstance(v, g.TupleItem):
            return f"{self.value(v.value)}[{v.index}]"
        if isinstance(v, g.Call):
            attributes = [f"{f.name}={self.attribute(getattr(v.op, f.name))}" for f in fields(v.op)]
            return f"op.{operator_name(v.op)}({', '.join([*map(self.value, v.args), *attributes])})"
        assert isinstance(v, (g.CallTIR, g.CallDPSLibrary))
        return self.call(v)

    def call(self, v: g.CallTIR | g.CallDPSLibrary) -> str:
        kind, callee = ("call_tir", v.callee) if isinstance(v, g.CallTIR) else ("call_dps_library", v.routine)
        infos = [self.annotation(o) for o in v.out]
        out = infos[0] if len(infos) == 1 else self.tuple(infos)
        scalars = f", scalars=[{', '.join(map(self.expr, v.scalars))}]" if v.scalars else ""
        where = ""
        if isinstance(v, g.CallTIR) and v.inplace:
            kind, where = "call_tir_inplace", f", inplace=[{', '.join(map(str, v.inplace))}]"
        return f"{kind}({quote(callee)}, {self.tuple([self.value(a) for a in v.args])}, out={out}{scalars}{where})"

    @staticmethod
    def tuple(parts: Sequence[str]) -> str:
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"

    def attribute(self, x: object) -> str:
        """Return the text of an attribute.

        A non-empty tuple of expressions prints as a list and a literal expression in full, so that the parser tells expressions
        from plain numbers."""
        if isinstance(x, Const):
            return f"const({x.value!r}, {x.dtype})"
        if isinstance(x, Expr):
            return self.expr(x)
        if isinstance(x, DType):
            return x.short
        if isinstance(x, tuple) and x and all(isinstance(i, Expr) for i in x):
            return f"[{', '.join(map(self.expr, x))}]"
        if isinstance(x, tuple):
            return self.tuple([self.attribute(i) for i in x])
        if isinstance(x, float) and not math.isfinite(x):
            return {math.inf: "inf", -math.inf: "-inf"}.get(x, "nan")
        if isinstance(x, str):
            return quote(x)
        if x is None or isinstance(x, (bool, int, float)):
            return repr(x)
        raise TypeError(f"wanted an operator attribute of plain values, expressions or tuples of them; found {x!r}")

    def annotation(self, info: StructInfo) -> str:
        """Return the text of an annotation that declares its unknown symbols by naming them."""
        before, self.implicit = self.implicit, True
        text = self.info(info)
        self.implicit = before
        return text

    def info(self, info: StructInfo) -> str:
        if isinstance(info, TensorInfo):
            if info.shape is not None:
                return f"Tensor({self.dims(info.shape)}, {info.dtype})"
            return f"Tensor(None, {info.dtype}{'' if info.ndim is None else f', ndim={info.ndim}'})"
        if isinstance(info, ShapeInfo):
            if info.values is not None:
                return f"Shape([{', '.join(map(self.expr, info.values))}])"
            return f"Shape(None{'' if info.ndim is None else f', ndim={info.ndim}'})"
        if isinstance(info, PrimInfo):
            return f"Prim({info.dtype}{'' if info.value is None else f', {self.expr(info.value)}'})"
        if isinstance(info, TupleInfo):
            return f"Tuple({', '.join(map(self.info, info.fields))})"
        if isinstance(info, CallableInfo):
            with self.scope():
                params = "None" if info.params is None else self.tuple([self.info(p) for p in info.params])
                return f"Callable({params}, {self.info(info.ret)}{'' if info.pure else ', pure=False'})"
        assert isinstance(info, ObjectInfo)
        return "Object()"


def operator_name(op: Operator) -> str:
    """Return the name that the class of an operator sets."""
    name: str = getattr(op, "name")  # noqa: B009 - the base class declares no attributes
    return name
