"""Values of a model that is being imported, and the writer of its graph, for importers of every format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ParseError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import DType, bool_, dtype, i64, is_floating
from relax_tune.ir.core.expr import Expr, Var, as_int, const, eq, expr, ge, select
from relax_tune.ir.core.graph import Call, GVar, PrimValue, ShapeValue, Value, name_of
from relax_tune.ir.core.scalar_ops import converted
from relax_tune.ir.core.struct_info import PrimInfo, ShapeInfo, TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.shared import decomposed_ops, repeated_heads, simplify_broadcasts
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.create import Scalars
from relax_tune.ir.op.indexing.movement import BroadcastTo, Reshape
from relax_tune.ir.op.math.elementwise import Binary, Cast
from relax_tune.ir.op.math.logic import Where
from relax_tune.ir.op.reduction.einsum import Einsum
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.rewrite.fixpoint import RuleTable

Array = NDArray[Any]
IMPORT_RULES = (*repeated_heads.RULES, *decomposed_ops.RULES, *simplify_broadcasts.RULES)
"""The rules that importers apply to every value they write, in the order in which they are tried."""
# Integer constants of up to this many elements are followed as scalar expressions.
SCALAR_LIMIT = 256


@dataclass(frozen=True, slots=True, eq=False)
class ImportedValue:
    """A value of the model, in one of three forms.

    value: a tensor of the graph
    array: an array that is the same at every run
    scalars: integers and truth values known as expressions over the shape symbols (an array of `Expr`)
    natural: integers that are never negative
    uniform: the value of every element, if known
    progression: the first element of a vector and the difference of neighbours, if known
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


def tensor_dims(value: Value) -> tuple[Expr, ...]:
    """Return the dims of a tensor, which the importer always knows."""
    info = value.info
    assert isinstance(info, TensorInfo) and info.shape is not None
    return info.shape


def identifier(name: str) -> str:
    """Return `name` as the text form can print it."""
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    return plain if plain and not plain[0].isdigit() else f"v_{plain}"


@dataclass(slots=True, eq=False)
class Writer:
    """A writer of operators, which handlers of a format's operators call.

    definitions: the call that computes each variable written so far.
    reserved: names of the program's inputs and results, which no constant takes.
    functions: number of functions of each name, and of things of each kind, so far.
    apart: symbols that the model tells apart by name: where two meet, either may be 1.
    """

    g: GraphBuilder
    definitions: dict[GVar, Value] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)
    _rules: RuleTable = field(default_factory=lambda: RuleTable(IMPORT_RULES))
    functions: dict[str, int] = field(default_factory=dict)
    apart: set[Var] = field(default_factory=set)
    _tensors: dict[ImportedValue, Value] = field(default_factory=dict)
    _weights: dict[ImportedValue, Value] = field(default_factory=dict)
    _transposed: dict[ImportedValue, Value] = field(default_factory=dict)
    _constants: dict[str, int] = field(default_factory=dict)
    _tables: dict[tuple[str, DType], ImportedValue] = field(default_factory=dict)
    _required: set[Expr] = field(default_factory=set)
    _joined: dict[Var, frozenset[Var]] = field(default_factory=dict)

    def function_name(self, hint: str) -> str:
        """Return a name that no function of the program has."""
        return f"{hint}_{self.serial(hint)}"

    def serial(self, kind: str) -> int:
        """Return the number of a thing of a kind, from 1 on, over all functions of the program."""
        number = self.functions[kind] = self.functions.get(kind, 0) + 1
        return number

    def inner(self, name: str) -> Writer:
        """Return a writer of another function of the program, with the same weights."""
        return Writer(
            self.g.inner(name),
            reserved=self.reserved,
            functions=self.functions,
            apart=self.apart,
            _weights=self._weights,
            _transposed=self._transposed,
            _constants=self._constants,
            _tables=self._tables,
        )

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Write values that end with the block, such as those of one side of a branch."""
        tensors, required, joined = dict(self._tensors), set(self._required), dict(self._joined)
        try:
            yield
        finally:
            self._tensors, self._required, self._joined = tensors, required, joined

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
        first = array.reshape(-1)[0] if 0 < array.size <= 1 << 16 else None
        one = first is not None and bool((array == first).all())
        if one and is_floating(array.dtype) and first == 0:
            one = not np.signbit(array).any()
        uniform = first.item() if one and first is not None else None
        return ImportedValue(name, info, array=array, natural=natural, uniform=uniform)

    def table(self, name: str, element: DType, make: Callable[[], Array]) -> ImportedValue:
        """Return a constant that is no weight of the model, made once under a name that says what it holds."""
        found = self._tables.get((name, element))
        if found is None:
            found = self._tables[name, element] = self.constant(converted(make(), element), name)
        return found

    def known(self, scalars: NDArray[np.object_], element: DType = i64, name: str = "shape") -> ImportedValue:
        """Return known integers or truth values as an item: a constant if all are literals."""
        flat = [self.simplify(e) for e in scalars.reshape(-1)]
        if all(e.value is not None for e in flat):
            values = np.array([e.value for e in flat], element.numpy).reshape(scalars.shape)
            return self.constant(values, name)
        kept = np.empty(len(flat), object)
        kept[:] = flat
        info = TensorInfo(tuple(const(int(d)) for d in scalars.shape), element)
        natural = all(self.natural(e) for e in flat)
        return ImportedValue(name, info, scalars=kept.reshape(scalars.shape), natural=natural)

    def scalars(self, item: ImportedValue) -> NDArray[np.object_] | None:
        """Return the values of an integer or boolean item as expressions, if they are known and few."""
        if item.scalars is not None:
            return item.scalars
        if item.array is None or item.array.size > SCALAR_LIMIT or item.dtype.is_float:
            return None
        found = np.empty(item.array.size, object)
        found[:] = [const(bool(v)) if item.dtype is bool_ else const(int(v)) for v in item.array.reshape(-1)]
        return found.reshape(item.array.shape)

    def tensor(self, item: ImportedValue) -> Value:
        """Return the item as an operand."""
        found = item.value or self._weights.get(item) or self._tensors.get(item)
        if found is not None:
            return found
        if item.array is not None:
            found = self._weights[item] = self.g.constant(self._name(item.name), item.array)
            return found
        assert item.scalars is not None
        found = self.emit(Scalars(tuple(item.scalars.reshape(-1))))
        if item.ndim != 1:
            found = self.emit(Reshape(item.shape), found)
        if item.dtype is not i64:
            found = self.emit(Cast(item.dtype), found)
        self._tensors[item] = found
        return found

    def transposed(self, item: ImportedValue) -> Value:
        """Return the transpose of a constant of two dims as an operand, made once under the constant's name."""
        found = self._transposed.get(item)
        if found is None:
            assert item.array is not None
            found = self.g.constant(self._name(item.name), np.ascontiguousarray(item.array.T))
            self._transposed[item] = found
        return found

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
        found = self._rules.put(Call(op, args), self.definitions, self.g.so_far, self.g.deduction.env)
        if found is not None:
            return self._write(found)
        value = self.g.call(op, *args)
        self.definitions[value] = Call(op, args)
        info = value.info
        if isinstance(info, TensorInfo) and (info.shape is None or info.dtype is None):
            raise ParseError(
                f"{op.name}: wanted dims that can be told without running, found {[a.info for a in args]!r}; "
                "export the model with more precise dims"
            )
        return value

    def _write(self, value: Value) -> Value:
        """Emit the value that a rule gives, part by part."""
        if not isinstance(value, Call):
            return value
        assert isinstance(value.op, OperatorSpec)
        return self.emit(value.op, *map(self._write, value.args))

    def agreeing(self, args: tuple[Value, ...], own: int = 0) -> tuple[Value, ...]:
        """Return operands that certainly broadcast.

        If only a run can tell whether two dims are equal, one operand is viewed under the other's dim, checked at run time; of
        symbols that are told apart, either may be 1.
        own: the number of last dims that do not take part
        """
        axes = [range(-len(tensor_dims(a)), 0) for a in args]
        args = self.joining(args, [["" if axis >= -own else axis for axis in places] for places in axes])
        shapes = [list(tensor_dims(a)) for a in args]
        for axis in range(-max(map(len, shapes)), -own):
            taking = [s for s in shapes if len(s) >= -axis and as_int(s[axis]) != 1]
            dims: list[Expr] = [s[axis] for s in taking]
            plainest = [d for d in dims if d.value is not None] + [d for d in dims if isinstance(d, Var)] + dims
            for s in taking:
                if self.g.deduction.equal(s[axis], plainest[0]) is Proof.UNKNOWN:
                    s[axis] = plainest[0]
        return tuple(self.reshape(a, s) for a, s in zip(args, shapes, strict=True))

    def joining(self, args: tuple[Value, ...], labels: Sequence[Sequence[object]]) -> tuple[Value, ...]:
        """Return operands whose dims of one label are broadcast where they are symbols that are told apart. No label: ""."""
        dims: dict[object, list[Expr]] = {}
        for a, names in zip(args, labels, strict=True):
            for name, d in zip(names, tensor_dims(a), strict=True):
                dims.setdefault(name, []).append(d)
        joined = {n: self.joint(found) for n, found in dims.items() if n != ""}
        made = []
        for a, names in zip(args, labels, strict=True):
            wider = [d if as_int(d) == 1 else joined.get(n) for n, d in zip(names, tensor_dims(a), strict=True)]
            shape = tuple(d if w is None else w for w, d in zip(wider, tensor_dims(a), strict=True))
            made.append(a if shape == tensor_dims(a) else self.emit(BroadcastTo(shape), a))
        return tuple(made)

    def joint(self, dims: Sequence[Expr]) -> Expr | None:
        """Return the dim that dims broadcast to, if they are symbols that are told apart; else None."""
        known = [d for d in dict.fromkeys(dims) if as_int(d) != 1]
        symbols = [d for d in known if isinstance(d, Var) and (d in self.apart or d in self._joined)]
        numbers = [d for d in known if d.value is not None]
        if not symbols or len(known) < 2 or len(symbols) + len(numbers) < len(known):
            return None
        if numbers:
            return numbers[0]
        parts = frozenset[Var]().union(*(self._joined.get(v, {v}) for v in symbols))
        found = next((d for d, own in self._joined.items() if own == parts), None)
        if found is None:
            *others, last = sorted(parts, key=lambda v: v.name)
            size: Expr = last
            for v in others:
                size = select(eq(v, 1), size, v)
            found = self.g.symbol("_or_".join(v.name for v in (*others, last)))
            self.g.match_cast(ShapeValue((size,)), ShapeInfo((found,)), "joint")
            self._joined[found] = parts
        return found

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
        return self.emit(BroadcastTo(tuple(shape)), self.literal(value, element))

    def uniform(self, shape: Sequence[Expr], value: float, element: DType) -> ImportedValue:
        """Return a tensor filled with one value, and remember the value."""
        found = self.full(shape, value, element)
        info = TensorInfo(tuple(shape), element)
        return ImportedValue("uniform", info, found, natural=element.is_int and value >= 0, uniform=value)

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
