"""Programs as lists of steps, which can be generated one by one, shortened, and turned into modules."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import DType, bool_, f32
from relax_tune.ir.core.expr import Expr, ExprLike, Var, as_int, const, expr, free_vars, substitute
from relax_tune.ir.core.function import Bound, IRModule
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.core.struct_info import TensorInfo, TupleInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.base import OperatorSpec

Array = NDArray[Any]
LARGEST = 40
SIZES = (0, 1, 1, 2, 3, 5, 7, 8, 16, 17, 31, 33, LARGEST)
"""Values of symbols: none, one, primes, around vectors and tiles, and the upper bound."""
ELEMENTS = 40_000
"""Most elements of a value; larger shapes are not tried."""


@dataclass(frozen=True)
class Input:
    """A tensor argument. below: where its integers are indices, the dim they index; positive: scales and the like.

    beyond: an axis and a number of its last places where they are no indices, and hold what none could"""

    dims: tuple[Expr, ...]
    dtype: DType
    below: Expr | None = None
    positive: bool = False
    beyond: tuple[int, int] | None = None


@dataclass(frozen=True)
class Step:
    """An operator on values by their numbers: inputs first, then the results of steps. item: a field of its result."""

    op: OperatorSpec
    args: tuple[int, ...]
    item: int | None = None


@dataclass(frozen=True)
class Draft:
    """A program. symbols: with their bounds; outputs: numbers of the values it returns."""

    symbols: tuple[Bound, ...]
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def module(self) -> IRModule:
        """The program as a module. Raises DeduceError, VerifyError where shortening left nothing that fits."""
        return self.parts()[0]

    def parts(self) -> tuple[IRModule, list[GVar]]:
        """The module and the variables of all values."""
        g = GraphBuilder()
        for bound in self.symbols:
            g._declare(bound)
        values: list[GVar] = [g.input(f"x{p}", i.dims, i.dtype) for p, i in enumerate(self.inputs)]
        for s in self.steps:
            values.append(emitted(g, s, values))
        result = [values[o] for o in self.outputs]
        return g.finish(result if len(result) > 1 else result[0]), values

    def pruned(self) -> Draft:
        """Without the steps and inputs that no output needs."""
        n, needed = len(self.inputs), set(self.outputs)
        for p in range(len(self.steps) - 1, -1, -1):
            if n + p in needed:
                needed.update(self.steps[p].args)
        expected = free_vars(*(e for k in needed if k >= n for e in exprs_of(self.steps[k - n].op)))
        expected += free_vars(*(d for k in needed if k < n for d in self.inputs[k].dims))
        for v in expected:  # an input that binds the symbol stays
            if not any(k < n and v in self.inputs[k].dims for k in needed):
                needed.update([k for k, i in enumerate(self.inputs) if v in i.dims][:1])
        remaining = sorted(needed)
        number = {old: new for new, old in enumerate(remaining)}
        steps = (
            replace(self.steps[k - n], args=tuple(number[a] for a in self.steps[k - n].args))
            for k in remaining
            if k >= n
        )
        inputs = tuple(self.inputs[k] for k in remaining if k < n)
        pruned = Draft(self.symbols, inputs, tuple(steps), tuple(number[o] for o in self.outputs))
        used = set(free_vars(*(d for i in inputs for d in i.dims)))
        return replace(pruned, symbols=tuple(b for b in self.symbols if b.var in used))

    def shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        known = {b.var: const(sizes[b.var.name]) for b in self.symbols}
        return [tuple(as_int(substitute(d, known)) or 0 for d in i.dims) for i in self.inputs]


def exprs_of(op: OperatorSpec) -> list[Expr]:
    """The expressions among an operator's attributes."""
    result: list[Expr] = []
    for f in fields(op):
        value = getattr(op, f.name)
        result += [e for e in (value if isinstance(value, tuple) else (value,)) if isinstance(e, Expr)]
    return result


def emitted(g: GraphBuilder, s: Step, values: Sequence[GVar]) -> GVar:
    value = g.call(s.op, *(values[a] for a in s.args))
    return value if s.item is None else g.item(value, s.item)


@dataclass
class Grower:
    """Grows a program, an operator at a time; deduction says what fits."""

    rng: random.Random
    g: GraphBuilder = field(default_factory=GraphBuilder)
    inputs: list[Input] = field(default_factory=list)
    order: list[tuple[str, Any]] = field(default_factory=list)
    """Each value as ("input", number) or ("step", Step over positions in this list)."""
    values: list[GVar] = field(default_factory=list)
    symbols: tuple[Var, ...] = ()

    def __post_init__(self) -> None:
        rng = self.rng
        self.symbols = tuple(Var(name) for name in "nm")
        self.bounds = tuple(
            Bound(v, rng.choice((0, 0, 0, 1, 2)), LARGEST if rng.random() < 0.7 else None) for v in self.symbols
        )
        for bound in self.bounds:
            self.g._declare(bound)

    @property
    def bound_symbols(self) -> list[Var]:
        return [v for v in self.symbols if any(v in i.dims for i in self.inputs)]

    def number(self) -> Expr:
        """A size for an attribute: small, or of a symbol that an input binds."""
        return expr(self.rng.choice([const(1), const(2), const(3), const(5), *self.bound_symbols * 2]))

    def dims(self, least: int = 0, most: int = 3) -> tuple[Expr, ...]:
        n, m = self.symbols
        choices: list[ExprLike] = [n, n, m, m, 1, 2, 3, 5, 8]
        return tuple(expr(self.rng.choice(choices)) for _ in range(self.rng.randint(least, most)))

    def fresh(
        self,
        dims: Sequence[ExprLike],
        dtype: DType,
        below: Expr | None = None,
        positive: bool = False,
        beyond: tuple[int, int] | None = None,
    ) -> int:
        new = Input(tuple(map(expr, dims)), dtype, below, positive, beyond)
        self.inputs.append(new)
        self.values.append(self.g.input(f"x{len(self.inputs) - 1}", new.dims, dtype))
        self.order.append(("input", len(self.inputs) - 1))
        return len(self.values) - 1

    def info(self, at: int) -> TensorInfo:
        result = self.values[at].info
        assert isinstance(result, TensorInfo)
        return result

    def shape(self, at: int) -> tuple[Expr, ...]:
        return self.info(at).shape or ()

    def dtype(self, at: int) -> DType:
        return self.info(at).dtype or f32

    def fitting(self, kinds: Sequence[DType], least: int = 0, most: int = 4) -> list[int]:
        result = []
        for at, v in enumerate(self.values):
            i = v.info
            if isinstance(i, TensorInfo) and i.shape is not None and i.dtype in kinds and least <= len(i.shape) <= most:
                result.append(at)
        return result

    def pick(self, kinds: Sequence[DType], least: int = 0, most: int = 4) -> int:
        """A value of one of these types and ranks, the newest one most often, or a new input."""
        result = self.fitting(kinds, least, most)
        if result and self.rng.random() < 0.85:
            return result[-1] if self.rng.random() < 0.65 else self.rng.choice(result)
        plain = [d for d in kinds if d is f32]
        dtype = f32 if plain and self.rng.random() < 0.4 else self.rng.choice(list(kinds))
        return self.fresh(self.dims(least, min(most, 3)), dtype)

    def like(self, at: int, dtype: DType | None = None) -> int:
        """A value that broadcasts with another, of its dtype or the given one."""
        dtype, dims = dtype or self.dtype(at), self.shape(at)
        result = [p for p in self.fitting([dtype]) if self.shape(p) == dims]
        if result and self.rng.random() < 0.5:
            return self.rng.choice(result)
        drawn = [d if self.rng.random() < 0.75 else self.other(d) for d in dims]
        return self.fresh(drawn[self.rng.choice([0, 0, 0, 1, len(drawn)]) :], dtype)

    def other(self, d: Expr) -> ExprLike:
        """A dim that broadcasts with `d`: 1, or a symbol that run time may find equal or 1."""
        return self.rng.choice([1, 1, *self.symbols])

    def step(self, s: Step) -> int:
        """Raises DeduceError for what does not fit."""
        if s.item is None:
            value = self.g.call(s.op, *(self.values[a] for a in s.args))
            if isinstance(value.info, TupleInfo):
                s = replace(s, item=self.rng.randrange(len(value.info.fields)))
        if s.item is not None:
            value = emitted(self.g, s, self.values)
        self.values.append(value)
        self.order.append(("step", s))
        return len(self.values) - 1

    def finish(self) -> Draft:
        """The program, with inputs in front, that returns its newest value and perhaps some others."""
        place: dict[int, int] = {}
        steps: list[Step] = []
        for at, (kind, what) in enumerate(self.order):
            if kind == "input":
                place[at] = what
            else:
                steps.append(replace(what, args=tuple(place[a] for a in what.args)))
                place[at] = len(self.inputs) + len(steps) - 1
        steps_at = [at for at, (kind, _) in enumerate(self.order) if kind == "step"]
        read = {a for kind, s in self.order if kind == "step" for a in s.args}
        unread = [at for at in steps_at if at not in read and at != steps_at[-1]]
        outputs = [steps_at[-1], *(at for at in unread if self.rng.random() < 0.5)]
        if self.rng.random() < 0.15:
            outputs.append(self.rng.choice(steps_at))
        chosen = tuple(dict.fromkeys(place[o] for o in outputs))
        return Draft(self.bounds, tuple(self.inputs), tuple(steps), chosen).pruned()


def sizes_of(draft: Draft, rng: random.Random) -> dict[str, int]:
    """Values of the symbols within their bounds: distinct, or equal."""
    both = rng.choice(SIZES)
    equal = rng.random() < 0.3
    drawn = {b.var.name: both if equal else rng.choice(SIZES) for b in draft.symbols}
    return {b.var.name: max(drawn[b.var.name], b.lower) for b in draft.symbols}


def arguments(draft: Draft, sizes: Mapping[str, int], rng: np.random.Generator, style: str) -> list[Array]:
    known = {b.var: const(sizes[b.var.name]) for b in draft.symbols}
    result = []
    for i, shape in zip(draft.inputs, draft.shapes(sizes), strict=True):
        if i.below is not None:
            limit = max(1, as_int(substitute(i.below, known)) or 0)
            drawn = rng.integers(0, limit, shape)
            if i.beyond is not None:
                axis, count = i.beyond
                drawn[(slice(None),) * axis + (slice(max(0, shape[axis] - count), None),)] = rng.choice(
                    [limit + 1000, -1000]
                )
            result.append(drawn.astype(i.dtype.numpy))
        else:
            result.append(numbers(i.dtype, shape, rng, style, i.positive))
    return result


def numbers(dtype: DType, shape: tuple[int, ...], rng: np.random.Generator, style: str, positive: bool) -> Array:
    """Random numbers. style: `plain` (normal), `small` (quarters, exact in sums), `edges` (some of the extremes), `zeros` (of
    either sign, and ones)."""
    if dtype is bool_:
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.is_int:
        low, high = (0, 6) if dtype.short[0] == "u" else (-5, 6)
        a = np.asarray(rng.integers(low, high, shape)).astype(dtype.numpy)
        ends = ml_dtypes.iinfo(dtype.numpy)
        special = [ends.min, ends.max, ends.max - 1, ends.min + 1, 0, 1, ends.max // 2 + 1]
    else:
        grain = rng.integers(-12, 13, shape) / 4 if style == "small" else rng.standard_normal(shape) * 2
        a = np.asarray(np.abs(grain) + 0.25 if positive else grain).astype(dtype.numpy)
        most, tiny = (
            float(x) for x in (ml_dtypes.finfo(dtype.numpy).max, ml_dtypes.finfo(dtype.numpy).smallest_subnormal)
        )
        special = [np.nan, np.inf, -np.inf, -0.0, 0.0, tiny * 3, -tiny, most, -most, 1e4, -300.0, 2.5, 1.0, -1.0]
    if style == "zeros" and dtype.is_float and not positive:
        return rng.choice([-0.0, -0.0, 0.0, 1.0, -1.0], shape).astype(dtype.numpy)
    if style != "edges" or positive:
        return a
    with np.errstate(over="ignore"):
        drawn = np.array(special, object)[rng.integers(0, len(special), shape)]
        drawn = np.asarray(drawn, np.float64 if dtype.is_float else dtype.numpy)
        return np.where(rng.random(shape) < 0.25, drawn.astype(dtype.numpy), a).astype(dtype.numpy)
