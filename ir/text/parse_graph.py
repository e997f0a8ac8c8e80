"""Parse graph functions: annotations, values and dataflow blocks.

Tests: `tests/ir/text/test_text_graph.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import get_type_hints

from relax_tune.ir.core import graph as g
from relax_tune.ir.core.expr import Expr, expr
from relax_tune.ir.core.graph_base import Operator
from relax_tune.ir.core.names import LONGEST_NAME, can_be_shown
from relax_tune.ir.core.struct_info import (
    CallableInfo,
    ObjectInfo,
    PrimInfo,
    ShapeInfo,
    StructInfo,
    TensorInfo,
    TupleInfo,
)
from relax_tune.ir.deduce.deduce import signature
from relax_tune.ir.text.parse_tensor import TensorReader, name_of, plain_number

_INFOS = ("Tensor", "Shape", "Prim", "Tuple", "Callable", "Object")


class GraphReader(TensorReader):
    """Parser of both levels; `operators` maps names to operator classes."""

    def __init__(self, text: str, operators: Mapping[str, type[Operator]]) -> None:
        super().__init__(text)
        self.operators = operators
        self.signatures: dict[str, CallableInfo] = {}
        self.outside: dict[str, str] = {}  # names of parameters and results that are no identifiers
        self.hints: dict[str, Mapping[str, object]] = {}  # the types of an operator's attributes

    # annotations

    def annotation(self, node: ast.expr) -> StructInfo:
        """Parse an annotation; unknown names in its dims declare symbols."""
        with self.declaring():
            return self.info(node)

    def info(self, node: ast.expr) -> StructInfo:
        kind, args, options = self.call(node, _INFOS)
        allowed = {"Tensor": ("ndim", "device"), "Shape": ("ndim",), "Callable": ("pure",)}
        self.only(options, allowed.get(kind, ()))
        ndim = self.integer(options["ndim"], "a number of dims") if "ndim" in options else None
        if ndim is not None and ndim < 0:
            raise self.error(options["ndim"], f"expected a number of dims >= 0, got {ndim}")
        if kind == "Object" and not args:
            return ObjectInfo()
        if kind == "Tuple":
            return TupleInfo(tuple(self.info(a) for a in args))
        if kind == "Tensor" and len(args) == 2:
            dtype = None if _is_none(args[1]) else self.dtype(args[1])
            where = options.get("device")
            device = None if where is None else str(self.constant(where, str, "the kind of a device"))
            dims = None if _is_none(args[0]) else self.dims(args[0])
            return TensorInfo(dims, dtype, ndim if dims is None else None, device)
        if kind == "Shape" and len(args) == 1:
            return ShapeInfo(None, ndim) if _is_none(args[0]) else ShapeInfo(self.dims(args[0]))
        if kind == "Prim" and len(args) in (1, 2):
            return PrimInfo(self.dtype(args[0]), self.expr(args[1]) if len(args) == 2 else None)
        if kind == "Callable" and len(args) == 2:
            items = None if _is_none(args[0]) else self.items(args[0], "a tuple of annotations or None")
            with self.scope():
                params = None if items is None else tuple(self.info(i) for i in items)
                return CallableInfo(params, self.info(args[1]), self.flag(options, "pure", True))
        raise self.error(node, f"{kind}(...) does not take {len(args)} arguments")

    def flag(self, options: Mapping[str, ast.expr], name: str, default: bool) -> bool:
        return bool(self.constant(options[name], bool, "True or False")) if name in options else default

    def tensor(self, node: ast.expr) -> TensorInfo:
        info = self.annotation(node)
        if not isinstance(info, TensorInfo):
            raise self.error(node, "expected Tensor(...)")
        return info

    # values

    def value(self, node: ast.expr) -> g.Value:
        match node:
            case ast.Name(id=name):
                value = self.names.get(name)
                if not isinstance(value, g.GVar):
                    raise self.error(node, f"nothing is called {name!r} here, expected a value defined before")
                return value
            case ast.Tuple(elts=parts):
                return g.TupleValue(tuple(self.value(e) for e in parts))
            case ast.Subscript(value=whole, slice=field):
                return g.TupleItem(self.value(whole), self.integer(field, "the number of a tuple's field"))
            case ast.Call(func=ast.Attribute() as operator):
                return self._operator(node, operator)
        kinds = (
            "const",
            "shape",
            "prim",
            "fn",
            "call",
            "call_host",
            "call_tir",
            "call_tir_inplace",
            "call_dps_library",
        )
        kind, args, options = self.call(node, kinds)
        if kind in ("shape", "prim", "fn", "call"):
            self.only(options, ())
        if kind == "prim" and len(args) == 1:
            return g.PrimValue(self.expr(args[0]))
        if kind == "fn" and len(args) == 1:
            return self.reference(args[0])
        if kind == "call" and args:
            named = isinstance(args[0], ast.Constant)
            target = self.reference(args[0]) if named else self.value(args[0])
            return g.CallFunction(target, tuple(self.value(a) for a in args[1:]))
        if kind in ("prim", "fn", "call"):
            raise self.error(node, f"{kind}(...) does not take {len(args)} arguments")
        if kind == "call_host":
            return self.host(node, args, options)
        if kind == "const":
            if len(args) != 2 or options:
                raise self.error(node, 'expected const("name", Tensor(dims, dtype))')
            return g.Constant(self.constant(args[0], str, "the weight's name in quotes"), self.tensor(args[1]))
        if kind == "shape":
            return g.ShapeValue(tuple(self.expr(a) for a in args))
        return self._destination_passing(node, kind, args, options)

    def _destination_passing(
        self, node: ast.expr, kind: str, args: list[ast.expr], options: dict[str, ast.expr]
    ) -> g.CallTIR | g.CallDPSLibrary:
        """Parse `call_tir(...)`, `call_tir_inplace(...)` or `call_dps_library(...)`."""
        inplace = kind == "call_tir_inplace"
        self.only(options, ("out", "scalars", "inplace") if inplace else ("out", "scalars"))
        if len(args) != 2 or "out" not in options:
            raise self.error(node, f'expected {kind}("callee", (arguments,), out=Tensor(dims, dtype))')
        callee = name_of(args[0]) or self.constant(args[0], str, "the callee's name")
        values = tuple(self.value(a) for a in self.items(args[1], "a tuple of arguments"))
        outs = options["out"].elts if isinstance(options["out"], ast.Tuple) else [options["out"]]
        infos = tuple(self.tensor(o) for o in outs)
        scalars = [self.expr(s) for s in self.items(options["scalars"], "a list")] if "scalars" in options else []
        if not inplace:
            make = g.CallTIR if kind == "call_tir" else g.CallDPSLibrary
            return make(callee, values, infos, tuple(scalars))
        expected = "inplace=[...]: for each output the position of an argument, or None"
        if "inplace" not in options:
            raise self.error(node, f"expected {expected}")
        places = self.items(options["inplace"], f"{expected}, in a list")
        numbers = tuple(
            None if _is_none(p) else self.integer(p, "the position of an argument, or None") for p in places
        )
        return g.CallTIR(callee, values, infos, tuple(scalars), numbers)

    def reference(self, node: ast.expr) -> g.FunctionRef:
        """Parse a reference to a graph function of the module, which may come later in the text."""
        name = self.constant(node, str, "a graph function's name in quotes")
        signature = self.signatures.get(name)
        if signature is None:
            known = ", ".join(self.signatures) or "none"
            raise self.error(node, f"expected a graph function of the module, got {name!r}; the text has {known}")
        return g.FunctionRef(name, signature)

    def host(self, node: ast.expr, args: list[ast.expr], options: dict[str, ast.expr]) -> g.CallHost:
        self.only(options, ("out", "pure"))
        if len(args) != 2 or "out" not in options:
            raise self.error(node, 'expected call_host("routine", (arguments,), out=annotation)')
        values = tuple(self.value(a) for a in self.items(args[1], "a tuple of arguments"))
        routine = self.constant(args[0], str, "the routine's name in quotes")
        return g.CallHost(routine, values, self.annotation(options["out"]), self.flag(options, "pure", False))

    def _operator(self, node: ast.Call, func: ast.Attribute) -> g.Value:
        name = ast.unparse(func)
        if not name.startswith("op."):
            raise self.error(node, f"expected an operator such as op.add(x, y), got {name}")
        operator = self.operators.get(name[3:])
        if operator is None:
            known = ", ".join(sorted(self.operators)) or "none, since no operators were passed to the parser"
            raise self.error(node, f"unknown operator {name[3:]!r}; known: {known}")
        args = tuple(self.value(a) for a in node.args)
        attributes = {k: self.attribute(v) for k, v in self.keywords(node).items()}
        if name not in self.hints:
            self.hints[name] = get_type_hints(operator)
        hints = self.hints[name]
        try:
            return g.Call(operator(**{k: _dims(hints.get(k), v) for k, v in attributes.items()}), args)
        except TypeError as e:
            raise self.error(node, f"operator {name[3:]} refuses its attributes: {e}") from None

    def attribute(self, node: ast.expr) -> object:
        """Parse an attribute of an operator: a plain value, dtype, tuple of attributes, or expression.

        A list is a tuple of expressions."""
        number = plain_number(node)
        if number is not None:
            return number
        match node:
            case ast.Name(id="inf" | "nan" as name):
                return float(name)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf" | "nan" as name)):
                return -float(name)
            case ast.Constant(value=None | bool() | str() as value):
                return value
            case ast.Tuple(elts=parts):
                return tuple(self.attribute(e) for e in parts)
            case ast.List(elts=parts):
                return tuple(self.expr(e) for e in parts)
            case ast.Name(id=name) if name not in self.names:
                return self.dtype(node)
        return self.expr(node)

    # functions

    def params(self, node: ast.FunctionDef) -> tuple[g.GVar, ...]:
        """Parse the parameters and bring their names into scope."""
        params: list[g.GVar] = []
        for arg in node.args.args:
            if arg.annotation is None:
                raise self.error(arg, f"parameter {arg.arg}: expected an annotation such as Tensor((n, 4), f32)")
            params.append(g.GVar(self.outside.get(arg.arg, arg.arg), self.annotation(arg.annotation)))
            self.names[arg.arg] = params[-1]
        return tuple(params)

    def result(self, node: ast.FunctionDef) -> StructInfo:
        if node.returns is None:
            raise self.error(node, "expected the result's annotation, `-> Tensor(...)`")
        return self.annotation(node.returns)

    def learn_signature(self, node: ast.FunctionDef, name: str, pure: bool) -> None:
        """Record the signature of a graph function for its callers, before its body is parsed."""
        with self.scope():
            params = self.params(node)
            whole = g.Function(name, params, (), g.TupleValue(()), self.result(node), pure)
        self.signatures[name] = signature(whole)

    def function(
        self, node: ast.FunctionDef, name: str, pure: bool = True, names: ast.expr | None = None
    ) -> g.Function:
        """Parse a graph function.

        Args:
            names: original names of parameters and results that are no identifiers, by their names in the text.
        """
        with self.scope():
            self.outside = {} if names is None else self._names_outside(names)
            params = self.params(node)
            *body, last = node.body
            blocks = self.blocks(body)
            if not isinstance(last, ast.Return) or last.value is None:
                raise self.error(last, "expected a graph function to end in `return value`")
            ret = self.value(last.value)
            unused = sorted(set(self.outside) - set(self.names))
            if unused and names is not None:
                raise self.error(names, f"expected names of parameters and results, got {unused[0]!r}")
            self.outside = {}
            return g.Function(name, params, blocks, ret, self.result(node), pure)

    def _names_outside(self, node: ast.expr) -> dict[str, str]:
        if not isinstance(node, ast.Dict) or None in node.keys:
            raise self.error(node, 'expected names in quotes, {"input_0": "input:0"}')
        names: dict[str, str] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            assert key is not None
            real = self.constant(value, str, "a name in quotes")
            if not can_be_shown(real) or real in names.values():
                raise self.error(value, f"expected distinct names of 1 to {LONGEST_NAME} printable characters")
            names[self.constant(key, str, "a name in quotes")] = real
        return names

    def blocks(self, body: Sequence[ast.stmt]) -> tuple[g.AnyBlock, ...]:
        """Parse dataflow blocks, and the plain bindings and branches between them."""
        blocks: list[g.AnyBlock] = []
        plain: list[g.AnyBinding] = []
        rest = list(reversed(body))
        while rest:
            part = rest.pop()
            match part, rest[-1:]:
                case ast.AnnAssign(value=None), [ast.If() as choice]:
                    rest.pop()
                    plain.append(self.branch(part, choice))
                case ast.AnnAssign(), _:
                    plain.append(self.binding(part))
                case ast.With(items=[ast.withitem(context_expr=header)], body=inner), _:
                    if plain:
                        blocks.append(g.BindingBlock(tuple(plain)))
                        plain = []
                    self.call(header, ("dataflow",))
                    bindings = [self.binding(b) for b in inner if not isinstance(b, ast.Pass)]
                    blocks.append(g.DataflowBlock(tuple(bindings)))
                case _:
                    raise self.error(part, "expected `with dataflow():`, a binding, or the final return")
        if plain:
            blocks.append(g.BindingBlock(tuple(plain)))
        return tuple(blocks)

    def branch(self, declared: ast.AnnAssign, node: ast.If) -> g.Binding:
        """Parse `y: annotation` and an `if` whose sides both end in `y = value`."""
        name = self.one_name(declared.target, "the result of an `if`")
        var = g.GVar(self.outside.get(name, name), self.annotation(declared.annotation))
        cond = self.value(node.test)
        sides: list[g.Body] = []
        for side in (node.body, node.orelse):
            match side:
                case [*body, ast.Assign(targets=[ast.Name(id=ending), *_], value=value)] if ending == name:
                    with self.scope():
                        blocks = self.blocks(body)
                        sides.append(g.Body(blocks, self.value(value)))
                case _:
                    raise self.error(
                        side[-1] if side else node, f"expected both sides of the `if` to end in `{name} = value`"
                    )
        self.names[name] = var
        return g.Binding(var, g.If(cond, sides[0], sides[1]))

    def binding(self, node: ast.stmt) -> g.AnyBinding:
        if not isinstance(node, ast.AnnAssign) or node.value is None:
            raise self.error(node, "expected a binding such as y: Tensor((n,), f32) = op.exp(x)")
        name = self.one_name(node.target, "a binding")
        var = g.GVar(self.outside.get(name, name), self.annotation(node.annotation))
        result: g.AnyBinding
        match node.value:
            case ast.Call(func=ast.Name(id="match_cast"), args=[value, info], keywords=[]):
                result = g.MatchCast(var, self.value(value), self.annotation(info))
            case ast.Call(func=ast.Name(id="match_cast")):
                raise self.error(node.value, "expected match_cast(value, annotation)")
            case value:
                result = g.Binding(var, self.value(value))
        self.names[name] = var
        return result


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _dims(hint: object, value: object) -> object:
    """Convert the numbers of an attribute to expressions if the operator holds expressions there: `(n, 6)`, `(3, 2)`."""
    if hint != tuple[Expr, ...] or not isinstance(value, tuple):
        return value
    return tuple(expr(v) if isinstance(v, int) and not isinstance(v, bool) else v for v in value)
