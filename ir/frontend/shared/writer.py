"""Values of a model that is being imported, and the writer of its graph, for importers of every format.

Tests: `tests/ir/frontend/onnx/test_onnx_broadcasts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import DeduceError, ParseError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import DType, bool_, dtype, i64, is_floating
from relax_tune.ir.core.expr import Expr, Var, as_int, const, eq, expr, free_vars, ge, select
from relax_tune.ir.core.graph import Call, GVar, PrimValue, ShapeValue, Value, name_of
from relax_tune.ir.core.scalar_ops import converted
from relax_tune.ir.core.struct_info import PrimInfo, ShapeInfo, TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.shared import decomposed_ops, repeated_heads, simplify_broadcasts
from relax_tune.ir.frontend.shared.element_rules import Ratio
from relax_tune.ir.frontend.shared.known_elements import LARGEST, ElementTable
from relax_tune.ir.frontend.shared.operators import OperatorMethods, tensor_dims
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.create import Scalars
from relax_tune.ir.op.indexing.movement import Reshape
from relax_tune.ir.op.math.elementwise import Binary
from relax_tune.ir.op.math.logic import Where
from relax_tune.ir.op.reduction.einsum import Einsum
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.rewrite.fixpoint import RuleTable

Array = NDArray[Any]
IMPORT_RULES = (*repeated_heads.RULES, *decomposed_ops.RULES, *simplify_broadcasts.RULES)
"""The rules that importers apply to every value they write, in the order in which they are tried."""
# Integer constants of up to this many elements are followed as scalar expressions.
SCALAR_LIMIT = LARGEST
# Floats below it hold every integer.
WHOLE_FLOATS = 2.0**53


@dataclass(frozen=True, slots=True, eq=False)
class ImportedValue:
    """A value of the model, in one of three forms.

    Attributes:
        value: A tensor of the graph.
        array: A constant.
        scalars: Integers and truth values known as expressions over the shape symbols (an array of `Expr`).
        natural: Whether all elements are integers of 0 or more.
        uniform: The value of every element, if known.
        progression: The first element of a vector and the difference of neighbours, if known.
    """

    name: str
    info: TensorInfo
    value: Value | None = None
    array: Array | None = None
    scalars: NDArray[np.object_] | None = None
    natural: bool = False
    uniform: float | int | bool | None = None
    progression: tuple[Expr, Expr] | None = None

    @property
    def shape(self) -> tuple[Expr, ...]:
        assert self.info.shape is not None
        return self.info.shape

    @property
    def dtype(self) -> DType:
        assert self.info.dtype is not None
        return self.info.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


def identifier(name: str) -> str:
    """Return `name` as the text form can print it."""
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    return plain if plain and not plain[0].isdigit() else f"v_{plain}"


@dataclass(slots=True, eq=False)
class Writer(OperatorMethods):
    """A writer of operators, which handlers of a format's operators call.

    Attributes:
        definitions: The call that computes each variable written so far.
        reserved: Names of the program's inputs and results, which no constant takes.
        functions: Number of functions of each name and of serial numbers of each kind, so far.
        broadcasts: Whether either of two dims that only a run can compare may be 1; if not, they are required to be equal.
    """

    g: GraphBuilder
    definitions: dict[GVar, Value] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)
    _rules: RuleTable = field(default_factory=lambda: RuleTable(IMPORT_RULES))
    functions: dict[str, int] = field(default_factory=dict)
    broadcasts: bool = False
    _tensors: dict[ImportedValue, Value] = field(default_factory=dict)
    _weights: dict[ImportedValue, Value] = field(default_factory=dict)
    _transposed: dict[ImportedValue, Value] = field(default_factory=dict)
    _constants: dict[str, int] = field(default_factory=dict)
    _tables: dict[tuple[str, DType], ImportedValue] = field(default_factory=dict)
    _required: set[Expr] = field(default_factory=set)
    _joined: dict[Expr, tuple[Expr, ...]] = field(default_factory=dict)
    _elements: ElementTable = field(init=False)

    def __post_init__(self) -> None:
        self._elements = ElementTable(self.definitions, self.g.so_far.constants, self.g.deduction)

    def function_name(self, hint: str) -> str:
        """Return a name that no function of the program has."""
        return f"{hint}_{self.serial(hint)}"

    def serial(self, kind: str) -> int:
        """Return the next serial number of a kind, from 1 on, over all functions of the program."""
        number = self.functions[kind] = self.functions.get(kind, 0) + 1
        return number

    def inner(self, name: str) -> Writer:
        """Return a writer of another function of the program, with the same weights."""
        return Writer(
            self.g.inner(name),
            reserved=self.reserved,
            functions=self.functions,
            broadcasts=self.broadcasts,
            _weights=self._weights,
            _transposed=self._transposed,
            _constants=self._constants,
            _tables=self._tables,
        )

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Write values that are valid only in the block, such as one side of a branch."""
        tensors, required, joined = dict(self._tensors), set(self._required), dict(self._joined)
        known = dict(self._elements.known)  # inside, the condition of the branch may prove more
        try:
            yield
        finally:
            self._tensors, self._required, self._joined = tensors, required, joined
            self._elements.known = known

    # items

    def of(self, value: Value, natural: bool = False) -> ImportedValue:
        """Return a tensor of the graph."""
        info = value.info
        assert isinstance(info, TensorInfo)
        return ImportedValue(name_of(value, "value"), info, value, natural=natural)

    def constant(self, array: Array, name: str = "constant") -> ImportedValue:
        """Return a value that is the same at every run. It becomes a weight when it is first used as a tensor."""
        info = TensorInfo(tuple(const(int(d)) for d in array.shape), dtype(array.dtype))
        natural = array.dtype.kind in "iu" and array.size <= 1 << 20 and bool((array >= 0).all())
        # larger constants are weights, for which the scan would cost more than the simplifications save
        first = array.reshape(-1)[0] if 0 < array.size <= 1 << 16 else None
        one = first is not None and bool((array == first).all())
        # -0.0 equals 0.0, but x + -0.0 is x, while -0.0 + 0.0 is 0.0
        if one and is_floating(array.dtype) and first == 0:
            one = not np.signbit(array).any()
        uniform = first.item() if one and first is not None else None
        return ImportedValue(name, info, array=array, natural=natural, uniform=uniform)

    def table(self, name: str, element: DType, make: Callable[[], Array]) -> ImportedValue:
        """Return a generated constant, created once per name and element type."""
        item = self._tables.get((name, element))
        if item is None:
            item = self._tables[name, element] = self.constant(converted(make(), element), name)
        return item

    def known(self, scalars: NDArray[np.object_], element: DType = i64, name: str = "shape") -> ImportedValue:
        """Return known integers or truth values as an item: a constant if all are literals."""
        flat = [self.simplify(e) for e in scalars.reshape(-1)]
        if all(e.value is not None for e in flat):
            values = np.array([e.value for e in flat], element.numpy).reshape(scalars.shape)
            return self.constant(values, name)
        expressions = np.empty(len(flat), object)
        expressions[:] = flat
        info = TensorInfo(tuple(const(int(d)) for d in scalars.shape), element)
        natural = all(self.natural(e) for e in flat)
        return ImportedValue(name, info, scalars=expressions.reshape(scalars.shape), natural=natural)

    def scalars(self, item: ImportedValue) -> NDArray[np.object_] | None:
        """Return the values of an integer or boolean item as expressions, if they are known and few."""
        if item.scalars is not None:
            return item.scalars
        if item.array is None or item.array.size > SCALAR_LIMIT or item.dtype.is_float:
            return None
        expressions = np.empty(item.array.size, object)
        expressions[:] = [const(bool(v)) if item.dtype is bool_ else const(int(v)) for v in item.array.reshape(-1)]
        return expressions.reshape(item.array.shape)

    def condition(self, item: ImportedValue) -> Expr | None:
        """Return a truth value over the symbols, decided or not; None if data decide it."""
        if item.scalars is not None:
            return item.scalars.reshape(-1)[0] if item.scalars.size == 1 else None
        known = self._elements.of(item.value) if isinstance(item.value, GVar) else None
        if known is None or known.elements.size != 1 or known.elements.dtype != object:
            return None
        e = known.elements.reshape(-1)[0]
        return e if isinstance(e, Expr) else None

    def numbers(self, item: ImportedValue) -> Array | None:
        """Return the array of a constant, or of a small tensor that is computed from constants."""
        if item.array is not None or not isinstance(item.value, GVar):
            return item.array
        known = self._elements.of(item.value)
        return None if known is None or known.elements.dtype == object else known.elements

    def whole(self, item: ImportedValue) -> Expr | None:
        """Return a tensor of one whole number, of any dtype, as an expression; None for others."""
        scalars = self.scalars(item)
        if scalars is not None:
            return scalars.reshape(-1)[0] if scalars.size == 1 else None
        array = self.numbers(item)
        if array is not None:
            n = float(array.item()) if array.size == 1 else np.nan
            return const(int(n)) if n.is_integer() and abs(n) < WHOLE_FLOATS else None
        known = self._elements.of(item.value) if isinstance(item.value, GVar) else None
        ratio = known.elements.reshape(-1)[0] if known is not None and known.elements.size == 1 else None
        if known is None or not isinstance(ratio, Ratio) or ratio.below != 1 or not all(map(self.require, known.needs)):
            return None
        return ratio.above

    def unknown(self, item: ImportedValue) -> str:
        """Say why `scalars` does not know the values of an item, as the end of an error."""
        operator = None if item.value is None else self._elements.obstacle(item.value)
        if operator is None:
            return "values computed from tensors"
        return f"sizes computed by an operator that is not followed for sizes: {operator}"

    def folded(self, item: ImportedValue) -> ImportedValue:
        """Return an item whose integers or truth values are computed only from constants and sizes as a known one.

        Others, and large ones, are returned as they are."""
        if not isinstance(item.value, GVar) or item.dtype.is_float or item.dtype.is_small:
            return item
        known = self._elements.of(item.value)
        if known is None:
            return item
        if known.elements.dtype != object:
            return self.constant(known.elements, item.name)
        undecided = item.dtype is bool_ and any(e.value is None for e in known.elements.reshape(-1))
        if undecided or not all(map(self.require, known.needs)):
            return item
        return self.known(known.elements, item.dtype, item.name)

    def tensor(self, item: ImportedValue) -> Value:
        """Return the item as an operand."""
        value = item.value or self._weights.get(item) or self._tensors.get(item)
        if value is not None:
            return value
        if item.array is not None:
            value = self._weights[item] = self.g.constant(self._name(item.name), item.array)
            return value
        assert item.scalars is not None
        value = self.emit(Scalars(tuple(item.scalars.reshape(-1))))
        if item.ndim != 1:
            value = self.emit(Reshape(item.shape), value)
        if item.dtype is not i64:
            value = self.cast(value, item.dtype)
        self._tensors[item] = value
        return value

    def transposed(self, item: ImportedValue) -> Value:
        """Return the transpose of a constant of two dims as an operand, created once under the constant's name."""
        value = self._transposed.get(item)
        if value is None:
            assert item.array is not None
            value = self.g.constant(self._name(item.name), np.ascontiguousarray(item.array.T))
            self._transposed[item] = value
        return value

    def _name(self, name: str) -> str:
        count = self._constants[name] = self._constants.get(name, 0) + 1
        return name if count == 1 and name not in self.reserved else self._name(f"{name}_{max(count - 1, 1)}")

    # operators

    def emit(self, op: OperatorSpec, *args: Value) -> Value:
        """Write an operator and return its result, rewritten by the rules of `IMPORT_RULES`. Raises DeduceError."""
        if isinstance(op, (Binary, Where, Matmul)):
            args = self.agreeing(args, 2 if isinstance(op, Matmul) else 0)
        if isinstance(op, Einsum):
            terms = op.letters([len(tensor_dims(a)) for a in args])[0]
            equal = {c for t in terms for c in t if t.count(c) > 1}  # of a diagonal, where 1 is not broadcast
            args = self.joining(args, [["" if c in equal else c for c in t] for t in terms])
        rewritten = self._rules.put(Call(op, args), self.definitions, self.g.so_far, self.g.deduction.env)
        if rewritten is not None:
            return self._write(rewritten)
        value = self.g.call(op, *args)
        self.definitions[value] = Call(op, args)
        info = value.info
        if isinstance(info, TensorInfo) and (info.shape is None or info.dtype is None):
            raise ParseError(
                f"{op.name}: expected dims that are known at import, got {[a.info for a in args]!r}; "
                "export the model with more precise dims"
            )
        return value

    def _write(self, value: Value) -> Value:
        """Emit the result of a rule, operand by operand."""
        if not isinstance(value, Call):
            return value
        assert isinstance(value.op, OperatorSpec)
        return self.emit(value.op, *map(self._write, value.args))

    def agreeing(self, args: tuple[Value, ...], excluded: int = 0) -> tuple[Value, ...]:
        """Return operands that certainly broadcast.

        Args:
            excluded: The number of last dims that are not broadcast.
        """
        return self.joining(args, [["" if p >= -excluded else p for p in range(-len(tensor_dims(a)), 0)] for a in args])

    def joining(self, args: tuple[Value, ...], labels: Sequence[Sequence[object]]) -> tuple[Value, ...]:
        """Return operands whose dims with the same label certainly broadcast. The label "" excludes a dim.

        Dims whose relation is known only at run time are required to be equal, or are broadcast to their joint dim.
        """
        dims: dict[object, list[Expr]] = {}
        for a, names in zip(args, labels, strict=True):
            for name, d in zip(names, tensor_dims(a), strict=True):
                dims.setdefault(name, []).append(d)
        joined = {n: self.joint(every) for n, every in dims.items() if n != ""}
        results = []
        for a, names in zip(args, labels, strict=True):
            wide = [joined.get(n) for n in names]
            pairs = zip(tensor_dims(a), wide, strict=True)
            results.append(self.broadcast(a, [d if as_int(d) == 1 or to is None else to for d, to in pairs]))
        return tuple(results)

    def broadcast(self, value: Value, wide: Sequence[Expr]) -> Value:
        """Return a tensor broadcast to dims; the value itself if it has these dims."""
        dims_of_value, equal = tensor_dims(value), self.g.deduction.equal
        aligned = []
        for d, to in zip(dims_of_value, wide[len(wide) - len(dims_of_value) :], strict=True):
            # a dim that cannot be 1 is not broadcast, so it must equal the joint dim
            wider = equal(d, to) is Proof.UNKNOWN and equal(d, 1) is Proof.NO
            aligned.append(to if wider or self._equal_at_run(d, to) else d)
        value = self.viewed(value, aligned)
        dims = tensor_dims(value)
        same = len(dims) == len(wide) and all(map(self.g.deduction.same, dims, wide))
        return value if same else self.broadcast_to(value, tuple(wide))

    def _equal_at_run(self, a: Expr, b: Expr) -> bool:
        """Return whether two dims, which are not proved equal, are required to be: neither is 1, or they share a symbol.

        In formats that broadcast only dims whose annotation is 1, such as torch's, all other dims are required to be equal.
        """
        equal = self.g.deduction.equal
        if equal(a, b) is not Proof.UNKNOWN:
            return False
        known = equal(a, 1) is Proof.NO and equal(b, 1) is Proof.NO
        return not self.broadcasts or known or not set(free_vars(a)).isdisjoint(free_vars(b))

    def viewed(self, value: Value, dims: Sequence[Expr]) -> Value:
        """Return a tensor with other dims, which are required to equal its dims one by one. Raises DeduceError."""
        for axis, (d, to) in enumerate(zip(tensor_dims(value), dims, strict=True)):
            proof = self.g.deduction.equal(d, to)
            if proof is Proof.NO:
                raise DeduceError(f"dim {axis} of {value.info!r}: expected {to!r}, got {d!r}")
            if proof is Proof.UNKNOWN and eq(d, to) not in self._required:
                self._required.add(eq(d, to))
                self.g.match_cast(ShapeValue((d,)), ShapeInfo((to,)), f"dim_{axis}_of_{name_of(value, 'value')}")
        return self.reshape(value, dims)

    def joint(self, dims: Sequence[Expr]) -> Expr | None:
        """Return the dim that dims broadcast to; None if two of them never fit.

        If only a run decides which of them are 1, the result is a new symbol.
        """
        ctx = self.g.deduction
        # literals first, then symbols: of equal dims the first is the result
        plainest = sorted(dims, key=lambda d: 0 if d.value is not None else 1 if isinstance(d, Var) else 2)
        known: list[Expr] = []
        for d in plainest:
            if as_int(d) != 1 and not any(ctx.same(d, k) or self._equal_at_run(d, k) for k in known):
                known.append(d)
        certain = [d for d in known if ctx.equal(d, 1) is Proof.NO]
        if len(certain) > 1 or (len(known) > 1 and not self.broadcasts):
            return None
        if certain or len(known) < 2:
            return (*certain, *known, const(1))[0]
        # joint dims are resolved to their parts, so that a chain of broadcasts makes one symbol
        parts = tuple(dict.fromkeys(p for d in known for p in self._joined.get(d, (d,))))
        symbol = next((d for d, parts_of_symbol in self._joined.items() if set(parts_of_symbol) == set(parts)), None)
        return self._join(parts) if symbol is None else symbol

    def _join(self, parts: tuple[Expr, ...]) -> Var:
        """Return a new symbol whose value is the part that is not 1, or the last part if all are 1."""
        *others, size = parts
        for d in others:
            size = select(eq(d, 1), size, d)
        least = int(all(self.g.deduction.proves(ge(d, 1)) is Proof.YES for d in parts))
        names = list(dict.fromkeys(v.name for d in parts for v in free_vars(d)))
        symbol = self.g.symbol("_or_".join(names if len(names) > 1 else [*names, "1"]), least)
        self.g.match_cast(ShapeValue((size,)), ShapeInfo((symbol,)), "joint")
        self._joined[symbol] = parts
        return symbol

    def literal(self, value: float, element: DType) -> Value:
        """Return a constant without dims."""
        return self.tensor(self.constant(np.asarray(value, element.numpy), "literal"))

    def size(self, e: Expr) -> Value:
        """Return an integer over the shape symbols as a tensor without dims."""
        return self.tensor(self.number(e))

    def number(self, e: Expr) -> ImportedValue:
        """Return an integer over the shape symbols as an item without dims."""
        scalar = np.empty((), object)
        scalar[()] = e
        return self.known(scalar)

    def full(self, shape: Sequence[Expr], value: float, element: DType) -> Value:
        """Return a tensor filled with one value."""
        return self.broadcast_to(self.literal(value, element), tuple(shape))

    def uniform(self, shape: Sequence[Expr], value: float, element: DType) -> ImportedValue:
        """Return a tensor filled with one value, and remember the value."""
        filled = self.full(shape, value, element)
        info = TensorInfo(tuple(shape), element)
        return ImportedValue("uniform", info, filled, natural=element.is_int and value >= 0, uniform=value)

    def require(self, cond: Expr) -> bool:
        """Require a condition on the symbols; an undecided one is checked at run time. Returns False if it never holds."""
        proof = self.g.deduction.proves(cond)
        if proof is Proof.UNKNOWN and cond not in self._required:
            self._required.add(cond)
            self.g.match_cast(PrimValue(cond), PrimInfo(bool_, const(True)), "required")
        return proof is not Proof.NO

    # shapes

    def simplify(self, e: Expr) -> Expr:
        return self.g.deduction.simplify(e) if e.dtype.is_int else e

    def natural(self, e: Expr) -> bool:
        """Return whether an expression is proved to be 0 or more."""
        n = as_int(e)
        return n >= 0 if n is not None else e.dtype.is_int and self.g.deduction.proves(ge(e, 0)) is Proof.YES

    def reshape(self, value: Value, shape: Sequence[Expr]) -> Value:
        """Return the same elements under other dims; the value itself if the dims are the same."""
        dims, old = tuple(map(expr, shape)), tensor_dims(value)
        if len(old) == len(dims) and all(map(self.g.deduction.same, old, dims)):
            return value
        return self.emit(Reshape(dims), value)
