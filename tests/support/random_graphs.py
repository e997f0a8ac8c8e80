"""Random graph programs: operators, calls of functions, branches, tuples, shapes, casts and tensor functions mixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import bool_, f32, i64
from relax_tune.ir.core.expr import Expr, Var, as_int, const, le, substitute
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Binding, Call, CallTIR, FunctionRef, GVar, PrimValue, ShapeValue, TupleValue, Value
from relax_tune.ir.core.struct_info import (
    CallableInfo,
    ObjectInfo,
    PrimInfo,
    ShapeInfo,
    StructInfo,
    TensorInfo,
    TupleInfo,
)
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.deduce.relations import without_symbols
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Concat, ExpandDims, Flatten, Permute, Reshape, Slice, Split
from relax_tune.ir.op.math.elementwise import Add, Cast, Maximum, MulScalar, Relu, Sub, Tanh
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Sum
from relax_tune.ir.op.shapes import ReshapeTo, ShapeOf, Unique
from relax_tune.ir.text.printer import print_text

Draw = Callable[..., Any]
SLOW = settings(
    phases=[Phase.generate],
    max_examples=examples(25),
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
"""Of whole programs: shrinking one takes longer than reading it."""
ALWAYS_THESE = settings(SLOW, max_examples=examples(20), database=None, derandomize=True)
"""Where a test counts on how many of them."""
SIZES = st.fixed_dictionaries({"n": st.integers(0, 6), "m": st.integers(0, 6)})
"""Values of the symbols of a program."""


@dataclass(repr=False)
class Made:
    """A module and what to call it with: `arguments(sizes)` for the values of its symbols."""

    module: IRModule
    params: Sequence[StructInfo]
    symbols: Sequence[Var]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(f"\n{print_text(self.module)}\n")

    def arguments(self, sizes: Mapping[str, int], rng: np.random.Generator) -> list[Any]:
        known: dict[Var, Expr] = {v: const(sizes[v.name]) for v in self.symbols}
        return [_argument(p, known, rng) for p in self.params]


def _argument(info: StructInfo, known: Mapping[Var, Expr], rng: np.random.Generator) -> Any:
    def number(e: Expr) -> int:
        found = as_int(substitute(e, known))
        assert found is not None
        return found

    if isinstance(info, TensorInfo):
        shape = tuple(number(d) for d in info.shape or (const(2),) * (info.ndim or 1))
        if info.dtype is bool_:
            return np.array(bool(rng.integers(2)))
        return rng.integers(-3, 4, shape).astype(np.float32)
    if isinstance(info, ShapeInfo):
        return tuple(number(d) for d in info.values or ())
    if isinstance(info, PrimInfo):
        assert info.value is not None
        return number(info.value)
    assert isinstance(info, TupleInfo)
    return tuple(_argument(f, known, rng) for f in info.fields)


@st.composite
def graphs(draw: Draw, steps: int = 7, rich: bool = True, first: Sequence[str] = ()) -> Made:
    """A module whose `main` takes tensors over n and m, when `rich` a condition, a shape and a scalar as well, and calls
    functions made alike. first: steps of `_Grower` that `main` begins with."""
    functions: list[IRModule] = []
    for i in range(draw(st.integers(0, 2))):
        functions.append(_function(draw, f"f{i}", functions, 3, rich and draw(st.booleans())).module)
    return _function(draw, "main", functions, steps, rich, first)


def _function(
    draw: Draw, name: str, callees: Sequence[IRModule], steps: int, rich: bool, first: Sequence[str] = ()
) -> Made:
    g = GraphBuilder(name)
    n, m = g.symbol("n", 0, 6), g.symbol("m", 0, 6) if draw(st.booleans()) else Var("m")
    params: list[StructInfo] = [TensorInfo((n, const(3)), f32), TensorInfo((m, const(3)), f32)]
    shapes = [(n, n), (n * 2,), (const(1), const(3)), (n + 1, const(3)), (n, m), ()]
    params += [TensorInfo(s, f32) for s in draw(st.lists(st.sampled_from(shapes), max_size=2))]
    if rich:
        more: list[StructInfo] = [
            TensorInfo((), bool_), ShapeInfo((n, const(3))), PrimInfo(i64, m), TensorInfo(None, f32),
            TupleInfo((TensorInfo((m,), f32), ShapeInfo((m,)))),
        ]  # fmt: skip
        params += draw(st.lists(st.sampled_from(more), max_size=3))
    params += [TensorInfo((const(3), const(3)), f32)] * ("prepared" in first)
    inputs = [g.parameter(f"p{i}", p) for i, p in enumerate(params)]
    for module in callees:
        missing = {k: f for k, f in module.functions.items() if k not in g._functions}
        held = {k: a for k, a in module.constants.items() if k not in g._constants}
        g.include(IRModule(missing, held, module.bounds))
    grower = _Grower(draw, g, list(inputs), (n, m), rich)
    for step in first:
        grower.take(getattr(grower, step))
    for _ in range(draw(st.integers(1, steps))):
        grower.step(2)
    values = [v for v in grower.values if not isinstance(v.info, CallableInfo)]
    if name == "main" and not rich:  # a program that computes what it returns
        known = [v for v in values if isinstance(v.info, TensorInfo) and v.info.shape is not None]
        values = [g.call(Tanh(), v) for v in known[-2:]]
        return Made(g.finish(values), params, (n, m))
    chosen = draw(st.lists(st.sampled_from(values[-4:]), min_size=1, max_size=2))
    result: Value | Sequence[Value] = chosen if len(chosen) > 1 else chosen[0]
    declared: StructInfo | None = None
    if len(chosen) == 1 and draw(st.integers(0, 3)) == 0:
        declared = without_symbols(chosen[0].info, ())
    return Made(g.finish(result, declared), params, (n, m))


class _Grower:
    """Adds bindings to a builder; what deduction refuses is not added."""

    def __init__(self, draw: Draw, g: GraphBuilder, values: list[GVar], symbols: tuple[Var, Var], rich: bool) -> None:
        self.draw, self.g, self.values, self.symbols, self.rich = draw, g, values, symbols, rich

    def pick(self, kind: type = TensorInfo) -> GVar:
        found = [v for v in self.values if isinstance(v.info, kind)]
        return self.draw(st.sampled_from(found))  # type: ignore[no-any-return]

    def has(self, kind: type) -> bool:
        return any(isinstance(v.info, kind) for v in self.values)

    def step(self, depth: int) -> None:
        kinds = [
            self.unary,
            self.binary,
            self.matmul,
            self.move,
            self.slice,
            self.shape,
            self.pair,
            self.cast,
            self.function,
            self.again,
            self.nothing,
            self.weight,
            self.products,
            self.rows,
            self.turned,
        ]
        if depth:
            kinds += [self.call, self.call, lambda: self.branch(depth)]
        kinds += [self.item] * self.has(TupleInfo) + [self.reshape_to] * self.has(ShapeInfo) + [self.tensor_function]
        self.take(self.draw(st.sampled_from(kinds)))

    def take(self, kind: Callable[[], GVar | None]) -> None:
        try:
            made = kind()
        except DeduceError:
            return
        if made is not None:
            self.values.append(made)

    def unary(self) -> GVar:
        return self.g.call(self.draw(st.sampled_from([Relu(), Tanh(), MulScalar(0.5)])), self.pick())

    def binary(self) -> GVar:
        return self.g.call(self.draw(st.sampled_from([Add(), Sub(), Maximum()])), self.pick(), self.pick())

    def matmul(self) -> GVar:
        return self.g.call(Matmul(self.draw(st.booleans())), self.pick(), self.pick())

    def move(self) -> GVar:
        n, m = self.symbols
        ops = [
            Flatten(), Permute((1, 0)), ExpandDims((0,)), Split(2), Reshape((n, const(3))), Reshape((n * 3,)), Unique(),
            Sum((0,), False), Reshape((const(3), m)),
        ]  # fmt: skip
        if not self.rich:  # several results in one kernel, and sizes from data, are not built
            ops = [op for op in ops if not isinstance(op, (Split, Unique))]
        if self.draw(st.integers(0, 3)) == 0:
            return self.g.call(Concat(0), self.pick(), self.pick())
        return self.g.call(self.draw(st.sampled_from(ops)), self.pick())

    def again(self) -> GVar | None:
        """A value that was computed before."""
        found = [b for b in self.g._bindings if isinstance(b, Binding) and isinstance(b.value, (Call, CallTIR))]
        return self.g.emit(self.draw(st.sampled_from(found)).value, "again") if found else None

    def nothing(self) -> GVar:
        """What changes nothing, or is undone at once."""
        x = self.pick()
        assert isinstance(x.info, TensorInfo)
        dims, rank = x.info.shape or (), x.info.ndim or 0
        turned = tuple(range(1, rank)) + (0,) * (rank > 0)
        ops = [Cast(x.info.dtype or f32), Permute(tuple(range(rank))), Reshape(dims), Slice(0, const(0), (*dims, 0)[0])]
        if self.draw(st.booleans()):
            return self.g.call(Permute(turned), self.g.call(Permute(turned), x))
        if self.rich and self.draw(st.booleans()):
            return self.g.emit(x, "same")
        return self.g.call(self.draw(st.sampled_from(ops)), x)

    def weight(self) -> GVar:
        """Computed from weights alone; of two weights drawn with the same numbers one repeats the other."""
        seed = self.draw(st.integers(0, 3))
        array = np.random.default_rng(seed).integers(-3, 4, (3, 3)).astype(np.float32)
        w = self.g.constant(f"{self.g.name}_w{len(self.g._constants)}", array)
        op = self.draw(st.sampled_from([Permute((1, 0)), Relu(), Sum((0,), False), Slice(0, const(0), const(2))]))
        return self.g.call(op, w)

    def products(self) -> GVar:
        """Several products of one value with weights of one height, some with a bias, and something of each of them."""
        x = self.pick()
        turned, parts = self.draw(st.booleans()), []
        for i in range(self.draw(st.integers(2, 3))):
            width = self.draw(st.integers(1, 4))
            name = f"{self.g.name}_p{len(self.g._constants)}"
            w = (
                np.random.default_rng(i + width)
                .integers(-3, 4, (width, 3) if turned else (3, width))
                .astype(np.float32)
            )
            y = self.g.call(Matmul(turned), x, self.g.constant(name, w))
            if self.draw(st.booleans()):
                y = self.g.call(Add(), y, self.g.constant(f"{name}_b", w.reshape(-1)[:width].copy()))
            parts.append(self.g.call(self.draw(st.sampled_from([Relu(), Tanh(), Sum((1,), True)])), y))
        self.values += parts[:-1]
        return parts[-1]

    def heads(self) -> GVar:
        """Products of one value that are read as columns only."""
        x, n = self.values[0], self.symbols[0]
        names = [f"{self.g.name}_h{len(self.g._constants)}_{i}" for i in range(2)]
        made = [
            self.g.call(Matmul(), x, self.g.constant(name, np.eye(3, 4, i, dtype=np.float32)))
            for i, name in enumerate(names)
        ]
        left, right = (self.g.call(Reshape((n, const(2), const(2))), y) for y in made)
        return self.g.call(Matmul(), left, right)

    def turned(self) -> GVar:
        """Permutes that what is around them can do without."""
        x = self.g.call(Permute((1, 0)), self.values[0])
        if self.draw(st.booleans()):
            return self.g.call(Matmul(self.draw(st.booleans())), self.values[0], x)
        for _ in range(self.draw(st.integers(1, 2))):
            x = self.g.call(self.draw(st.sampled_from([Relu(), Tanh(), MulScalar(0.5)])), x)
        return self.g.call(Permute((1, 0)), x)

    def prepared(self) -> GVar:
        """A product with what comes from the last parameter alone, a weight of (3, 3)."""
        w = [v for v in self.values if v.name.startswith("p") and v.name[1:].isdigit()][-1]
        for op in self.draw(
            st.lists(st.sampled_from([Permute((1, 0)), Relu(), MulScalar(0.5)]), min_size=1, max_size=2)
        ):
            w = self.g.call(op, w)
        return self.g.call(Matmul(), self.values[0], w)

    def rows(self) -> GVar:
        """Work on three dims of which two are walked alike."""
        three = self.g.call(Reshape((self.symbols[0], const(3), const(1))), self.values[0])
        return self.g.call(self.draw(st.sampled_from([Relu(), Tanh()])), three)

    def slice(self) -> GVar:
        ends = st.sampled_from([const(0), const(1), const(2), *self.symbols, self.symbols[0] + 1])
        return self.g.call(Slice(0, self.draw(ends), self.draw(ends)), self.pick())

    def shape(self) -> GVar:
        if self.draw(st.booleans()):
            return self.g.call(ShapeOf(), self.pick())
        n, m = self.symbols
        return self.g.emit(ShapeValue(self.draw(st.sampled_from([(n, const(3)), (n * m,), (m, const(3)), ()]))), "s")

    def reshape_to(self) -> GVar:
        return self.g.call(ReshapeTo(), self.pick(), self.pick(ShapeInfo))

    def pair(self) -> GVar:
        return self.g.emit(
            TupleValue((self.pick(), self.pick(self.draw(st.sampled_from([TensorInfo, TensorInfo]))))), "t"
        )

    def item(self) -> GVar:
        owner = self.pick(TupleInfo)
        assert isinstance(owner.info, TupleInfo)
        return self.g.item(owner, self.draw(st.integers(0, len(owner.info.fields) - 1)))

    def cast(self) -> GVar:
        value = self.pick()
        n, m = self.symbols
        fresh = Var("k")
        infos: list[StructInfo] = [
            without_symbols(value.info, ()), TensorInfo((n, const(3)), f32), TensorInfo((m, const(3)), f32),
            TensorInfo((fresh,), f32), TensorInfo((fresh, const(3)), f32), TensorInfo((fresh * 2,), None), ObjectInfo(),
        ]  # fmt: skip
        return self.g.match_cast(value, self.draw(st.sampled_from(infos)))

    def function(self) -> GVar | None:
        found = sorted(k for k, f in self.g._functions.items() if hasattr(f, "ret_info"))
        return self.g.emit(self.g.function(self.draw(st.sampled_from(found))), "fn_value") if found else None

    def call(self) -> GVar | None:
        found = [self.g.function(k) for k, f in sorted(self.g._functions.items()) if hasattr(f, "ret_info")]
        targets: list[FunctionRef | GVar] = [*found, *(v for v in self.values if isinstance(v.info, CallableInfo))]
        if not targets:
            return None
        target = self.draw(st.sampled_from(targets))
        assert isinstance(target.info, CallableInfo) and target.info.params is not None
        args: list[Value] = []
        for p in target.info.params:
            fitting: list[Value] = [v for v in self.values if type(v.info) is type(p)]
            if isinstance(p, TensorInfo) and p.ndim is not None:
                fitting = [v for v in fitting if getattr(v, "info").ndim in (p.ndim, None)]  # noqa: B009
            if isinstance(p, PrimInfo):
                fitting.append(PrimValue(self.draw(st.sampled_from([*self.symbols, const(2)]))))
            if isinstance(p, ShapeInfo):
                fitting.append(ShapeValue((self.symbols[0], const(3))))
            if not fitting:
                return None
            args.append(self.draw(st.sampled_from(fitting)))
        return self.g.call_function(target, *args)

    def tensor_function(self) -> GVar:
        k = Var("k")
        name = "twice"
        if name not in self.g._functions:
            b = TensorBuilder(name)
            x, y = b.input("x", (k,)), b.output("y", (k * 2,))
            b.compute(y, lambda i: x[i % k])
            self.g.add(b.finish())
        value = self.pick()
        assert isinstance(value.info, TensorInfo)
        if value.info.shape is None or len(value.info.shape) != 1 or value.info.dtype is not f32:
            raise DeduceError("not a row")
        return self.g.call_tir(name, [value], TensorInfo((value.info.shape[0] * 2,), f32))

    def branch(self, depth: int) -> GVar:
        flags = [v for v in self.values if isinstance(v.info, TensorInfo) and v.info.dtype is bool_]
        conds: list[Value | Expr] = [le(self.symbols[0], 2), le(self.symbols[0], 6), *flags]

        def side() -> GVar:
            inner = _Grower(self.draw, self.g, list(self.values), self.symbols, self.rich)
            for _ in range(self.draw(st.integers(0, 2))):
                inner.step(depth - 1)
            return inner.pick(self.draw(st.sampled_from([TensorInfo, type(inner.values[-1].info)])))

        return self.g.branch(self.draw(st.sampled_from(conds)), side, side)
