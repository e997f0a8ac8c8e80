"""The judge of results: NumPy in float64, repeated with every rounding moved, so that each element has its tolerance.

A run evaluates each operator in float64 and rounds its result to its type. The nominal run moves nothing. In each of the others
(`RUNS`) arguments of sums and results of inexact operators move by some units in the last place, as the operator's entry in
`operators.ENTRIES` says, where they are not exact anyway. An element may differ from the nominal one by three times the range of
its values over all runs, and two units in the last place. An element that is NaN, infinite or of another truth value in some
runs only has no value that could be asked for, and is skipped: so are results of what `KNOWN` lists. What seems wrong is judged
again with more runs (`MORE`), since two values that are nearly equal need not change places in any of the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import ml_dtypes
import numpy as np
from tests.fuzz.known import KNOWN, LINEAR
from tests.fuzz.operators import ENTRIES

from relax_tune.errors import RelaxTuneError
from relax_tune.ir.core.dtype import is_floating
from relax_tune.ir.core.expr import Expr, Var, as_int, substitute
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, Function, GVar, PrimValue, ShapeValue, TupleItem, TupleValue, Value
from relax_tune.ir.core.struct_info import CallableInfo, ObjectInfo, StructInfo, TensorInfo, TupleInfo
from relax_tune.ir.deduce.relations import solve
from relax_tune.ir.interp.graph_values import actual_info
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.math.elementwise import ScalarUnary
from relax_tune.ir.op.math.logic import Compare

Array = np.ndarray[Any, Any]
RUNS, MORE = 6, 96
NOMINAL, UNROUNDED = 0, RUNS
POISONS = (math.nan, 0.0, -math.inf, 2.0, math.inf)
"""What stands for a value that nobody can ask for, run by run. Functions and comparisons distinguish two of them."""
SAMPLED = frozenset(["resize", "grid_sample"])
EXTREMES = frozenset([
    "maximum", "minimum", "relu", "maximum_scalar", "max", "min", "max_or_lowest", "min_or_highest", "pool", "unique",
])  # fmt: skip
"""Operators whose result may be either zero where an argument is -0; so may scatters of extremes."""

ENDED = frozenset(["acos", "acosh", "asin"])
"""Functions with an end at 1, where neighbouring results are far."""
PRODUCTS = frozenset(["mul", "mul_scalar"])
"""Operators whose result is not rounded where a sum follows (`fma`): what is infinite by itself need not be so there."""
ADDED = {
    "attention": (2,), "rotary": (0, 1, 2), "mean_pool": (0,), "fold": (0,), "resize": (0,), "grid_sample": (0,), "layer_norm": (0, 1, 2),
}  # fmt: skip
"""Arguments that operators other than LINEAR add, weighed by the others."""


@dataclass(frozen=True)
class Judgement:
    """problems: a sentence for each output that is wrong; judged, skipped: numbers of elements."""

    problems: tuple[str, ...]
    judged: int
    skipped: int


class Expected:
    """The outputs of the nominal run, and of the others where a result is not near it.

    target: some known differences are of one target alone. exempt: skip results of defects too."""

    def __init__(
        self, module: IRModule, arrays: Sequence[Array], target: str, seed: int = 0, exempt: bool = True
    ) -> None:
        self.module, self.arrays, self.target, self.seed, self.exempt = module, arrays, target, seed, exempt
        self.nominal = self.run(NOMINAL)

    def run(self, number: int) -> tuple[Any, ...]:
        with np.errstate(all="ignore"):
            rng = np.random.default_rng([self.seed, number])
            return _Run(self.module, number, self.target, rng, self.exempt).outputs(self.arrays)

    @cached_property
    def runs(self) -> tuple[tuple[Any, ...] | None, ...]:
        """The outputs of every run; None for a run that refused what the nominal one did not."""
        return (self.nominal, *self.tried(range(1, RUNS + 1)))

    @cached_property
    def more(self) -> tuple[tuple[Any, ...] | None, ...]:
        result = self.tried(range(RUNS + 1, RUNS + 1 + MORE))
        return (*self.runs, *(r for r in result if r is not None))

    def tried(self, numbers: Iterable[int]) -> Iterator[tuple[Any, ...] | None]:
        for number in numbers:
            try:
                yield self.run(number)
            except Exception:  # a poisoned or moved value can be an index or a size
                yield None

    def judge(self, actual: Sequence[Any]) -> Judgement:
        if len(actual) != len(self.nominal):
            return Judgement((f"expected {len(self.nominal)} results, got {len(actual)}",), 0, 0)
        if all(_near(got, expected) for got, expected in zip(actual, self.nominal)):
            return Judgement((), sum(np.size(got) for got in actual), 0)
        first = self.compared(actual, self.runs)
        return self.compared(actual, self.more) if first.problems else first

    def compared(self, result: Sequence[Any], runs: Sequence[tuple[Any, ...] | None]) -> Judgement:
        if any(r is None for r in runs):
            return Judgement((), 0, 1)
        problems, judged, skipped = [], 0, 0
        for p, got in enumerate(result):
            text, n, s = _compare(got, [r[p] for r in runs if r is not None])
            problems += [f"result {p}: {text}"] * bool(text)
            judged, skipped = judged + n, skipped + s
        return Judgement(tuple(problems), judged, skipped)


def _near(got: Any, expected: Any) -> bool:
    """Tell whether a result is as near to the nominal one as is enough whatever the other runs say."""
    if not isinstance(expected, np.ndarray):
        return tuple(got) == tuple(expected)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if not is_floating(expected.dtype):
        return np.array_equal(got, expected)
    value = expected.astype(np.float64)
    with np.errstate(all="ignore"):
        near = np.isfinite(value) & (np.abs(got.astype(np.float64) - value) <= _allowed(value, expected.dtype))
    return bool(np.all(near | (got == expected) | (np.isnan(value) & np.isnan(got))))


def _allowed(value: Array, dtype: np.dtype[Any]) -> Any:
    """The distance of any result from the nominal one: two units in the last place."""
    info = ml_dtypes.finfo(dtype)
    return 2 * float(info.eps) * np.abs(value) + 2 * float(info.smallest_normal)


def nominal_values(module: IRModule, arrays: Sequence[Array]) -> dict[GVar, Any]:
    """The values of all variables."""
    run = _Run(module, NOMINAL, "", np.random.default_rng(0))
    with np.errstate(all="ignore"):
        run.outputs(arrays)
    return run.values


def indices_inside(module: IRModule, arrays: Sequence[Array]) -> bool:
    """Tell whether all elements that operators use as indices are inside their dims."""
    run = _Indices(module, NOMINAL, "", np.random.default_rng(0))
    try:
        with np.errstate(all="ignore"):
            run.outputs(arrays)
    except (RelaxTuneError, ArithmeticError, IndexError, ValueError):  # NumPy refuses the call for another reason
        return False
    return run.inside


def _compare(got: Any, runs: Sequence[Any]) -> tuple[str, int, int]:
    """Return what is wrong with a result, and how many elements were judged and skipped."""
    nominal = runs[NOMINAL]
    if not isinstance(nominal, np.ndarray):
        return ("" if tuple(got) == tuple(nominal) else f"expected {nominal}, got {got}"), 1, 0
    if any(r.shape != nominal.shape for r in runs):  # a size that depends on data
        return "", 0, 1
    if got.shape != nominal.shape or got.dtype != nominal.dtype:
        return f"expected {nominal.dtype}{nominal.shape}, got {got.dtype}{got.shape}", 0, 0
    if not nominal.size:
        return "", 0, 0
    if is_floating(nominal.dtype):
        wrong, sure = _float_wrong(got, runs)
    else:
        every = np.stack(runs)
        low, high = every.min(0), every.max(0)
        sure = np.asarray(low == high)
        wrong = sure & (got != nominal)
    text = ""
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        count = int(np.count_nonzero(wrong))
        text = f"{count} of {nominal.size} wrong, at {list(at)} expected {nominal[at]!r}, got {got[at]!r}"
    judged = int(np.count_nonzero(sure))
    return text, judged, nominal.size - judged


def _float_wrong(got: Array, runs: Sequence[Array]) -> tuple[Array, Array]:
    info = ml_dtypes.finfo(got.dtype)
    every = np.stack([r.astype(np.float64) for r in runs])
    value, result = every[NOMINAL], got.astype(np.float64)
    classes = np.where(np.isnan(every), 3, np.where(np.isinf(every), np.sign(every), 0))
    sure = np.asarray((classes == classes[0]).all(0))
    finite = sure & (classes[0] == 0)
    kind = np.where(np.isnan(result), 3, np.where(np.isinf(result), np.sign(result), 0))
    calm = np.where(finite, every, 0.0)
    spread = calm.max(0) - calm.min(0)
    allowed = 3 * spread + _allowed(calm[0], got.dtype)
    # a value that rounding may carry over the largest number
    with np.errstate(over="ignore"):
        near = finite & (np.abs(calm[0]) + allowed > float(info.max))
    sure &= ~near
    wrong = np.where(finite, (kind != 0) | (np.abs(np.where(kind == 0, result, 0) - np.where(finite, value, 0)) > allowed),
                     kind != classes[0])  # fmt: skip
    return np.asarray(sure & wrong), sure


class _Run:
    """One evaluation. Its number says what is moved: nothing, all at random, or nothing is rounded to 16 bits."""

    def __init__(
        self, module: IRModule, number: int, target: str, rng: np.random.Generator, exempt: bool = True
    ) -> None:
        main = module.functions["main"]
        assert isinstance(main, Function)
        self.main, self.module, self.number, self.target, self.rng = main, module, number, target, rng
        self.values: dict[GVar, Any] = {}
        self.known = [k for k in KNOWN if exempt or not k.defect]
        self.symbols: dict[Var, Expr] = {}
        self.hidden: dict[int, tuple[Array, Array]] = {}  # arrays with elements that nobody can ask for, and which

    def outputs(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        signature = CallableInfo(tuple(p.info for p in self.main.params), ObjectInfo())
        result = solve(signature, [actual_info(a) for a in arrays])
        self.symbols = {v: d for v, d in result.items() if d is not None}
        self.values.update(zip(self.main.params, arrays, strict=True))
        for b in self.main.bindings:
            self.values[b.var] = self.value(b.value, b.var.info)
        result = self.value(self.main.ret, self.main.ret.info)
        return result if isinstance(self.main.ret.info, TupleInfo) else (result,)

    def value(self, v: Value, info: StructInfo) -> Any:
        match v:
            case GVar():
                return self.values[v]
            case TupleValue(parts):
                return tuple(self.value(p, p.info) for p in parts)
            case TupleItem(whole, index):
                return self.value(whole, whole.info)[index]
            case ShapeValue(dims):
                return tuple(as_int(substitute(d, self.symbols)) for d in dims)
            case PrimValue(scalar):
                return substitute(scalar, self.symbols).value
            case Call(OperatorSpec() as op, args):
                return self.operator(op, [self.value(a, a.info) for a in args], info)
        raise TypeError(f"no case for {type(v).__name__}")

    def operator(self, op: OperatorSpec, args: list[Any], info: StructInfo) -> Any:
        entry, op = ENTRIES[op.name], op.substituted(self.symbols)
        op = op.for_dtype(args[0].dtype) if isinstance(op, ScalarUnary) else op
        moved = self.number not in (NOMINAL, UNROUNDED)
        by = {"summed": 2 + max((np.size(a) for a in args), default=0) ** 0.5, "approximate": 1}.get(entry.rounding, 0)
        plain = entry.rounding == "summed" and not entry.ulps
        wide = [self.moved(a, by, plain) if moved and by else _wide(a) for a in args]
        if moved and op.name == "grid_sample":  # places are counted from one end, -1
            wide[1] = wide[1] + 4 * float(ml_dtypes.finfo(args[1].dtype).eps) * self.rng.choice(
                [-1.0, 1.0], wide[1].shape
            )
        if self.number == 3 and op.name in ENDED:  # the slope is infinite there: no small move need reach the end
            near = np.abs(np.abs(wide[0]) - 1) <= 64 * float(ml_dtypes.finfo(args[0].dtype).eps)
            wide[0] = np.where(near, np.sign(wide[0]), wide[0])
        if op.name == "power":  # of negative numbers only whole powers have a value
            wide[1] = np.where(args[1] == np.rint(_wide(args[1])), _wide(args[1]), wide[1])
        result = op.evaluate(wide)
        if isinstance(result, tuple):
            kinds = info.fields if isinstance(info, TupleInfo) else ()
            return tuple(self.rounded(r, _dtype(k)) for r, k in zip(result, kinds)) if kinds else result
        target = _dtype(info)
        actual = self.rounded(result, target)
        if self.number == 5 and op.name in PRODUCTS and is_floating(target):
            over = reduce(np.logical_and, (np.isfinite(_wide(a)) for a in args), np.isinf(actual))
            actual = np.where(over, np.copysign(ml_dtypes.finfo(target).max, actual).astype(target), actual)
        if moved and is_floating(target):
            actual = self.inexact(actual, result, entry.rounding, max(1.0, entry.ulps))
            if entry.argument_ulps:
                by = (
                    entry.argument_ulps
                    * float(ml_dtypes.finfo(target).eps)
                    * np.where(np.isfinite(wide[0]), wide[0], 0)
                )
                wide_actual = _wide(actual)
                step = by * self.rng.choice([-1.0, 1.0], actual.shape)
                if self.number > RUNS:  # a remainder may have any value between the remainders at both ends
                    step = step * self.rng.random(actual.shape)
                if self.number == 4:  # what may be of either sign may be 0
                    step = np.where(np.abs(wide_actual) <= np.abs(by), -wide_actual, step)
                actual = np.asarray(wide_actual + step).astype(target)
            if op.name == "layer_norm":
                actual = self.off_mean(op, args, actual)
            if op.name in LINEAR and target == np.float64:
                actual = actual + self.lost(op, args, wide, actual)
            elif op.name in LINEAR and target == np.float32 and self.number in (1, 2):
                actual = self.biased(op, args, actual)
            if op.name in SAMPLED and getattr(op, "kernel", "") != "nearest":
                actual = self.weighed(op, args[0], actual)
            if self.number == 3:
                actual = self.cancelled(op, [_wide(a) for a in args], actual)
            if op.name in EXTREMES:
                actual = self.signed(args, actual)
            elif getattr(op, "mode", "") in ("max", "min"):
                actual = self.signed([np.concatenate([np.ravel(args[0]), np.ravel(args[2])])], actual)
            if is_floating(target):
                actual = self.signless(op, args, actual)
        return self.poisoned(op, args, actual) if moved else actual

    def rounded(self, a: Array, dtype: np.dtype[Any]) -> Array:
        a = np.asarray(a)
        if self.number == UNROUNDED and is_floating(dtype) and dtype.itemsize == 2 and is_floating(a.dtype):
            return a.astype(np.float32).astype(np.float64)
        return a.astype(dtype)

    def moved(self, a: Any, ulps: float, sums: bool) -> Any:
        """Move floats by up to some units, unless their sums alone are asked for, and exact: of multiples of 1/16."""
        if not isinstance(a, np.ndarray) or not is_floating(a.dtype):
            return a
        wide = _wide(a)
        steps = wide * 16
        if sums and np.all(
            np.isfinite(steps)
            & (steps == np.rint(steps))
            & (np.abs(steps) <= 1 << (6 if a.dtype.itemsize == 2 else 13))
        ):
            return wide
        return self.jittered(wide, ulps * float(ml_dtypes.finfo(a.dtype).eps))

    def jittered(self, a: Array, by: float) -> Array:
        steps = self.rng.choice([-1.0, -0.5, 0.5, 1.0], a.shape)
        if self.number > RUNS:  # of few steps all sums may be even multiples of the last place
            steps = steps + self.rng.uniform(-0.25, 0.25, a.shape)
        return a * (1 + by * steps)

    def inexact(self, actual: Array, result: Array, rounding: str, ulps: float) -> Array:
        """Move what was rounded."""
        if rounding == "exact":
            return actual
        if rounding == "rounded" and actual.dtype != np.float64:
            hit = actual.astype(np.float64) != result
        elif rounding == "rounded":  # the run itself rounds as often: exact are multiples of 1/16 alone
            hit = actual * 16 != np.rint(actual * 16)
        else:
            wide = _wide(actual)
            hit = wide * 16 != np.rint(wide * 16) if rounding == "summed" and ulps <= 1 else np.ones(actual.shape, bool)
        eps = float(ml_dtypes.finfo(actual.dtype).eps)
        way = {1: 0.5, 2: -0.5}.get(self.number) if rounding == "approximate" else None
        wide = _wide(actual)
        # a run with all of them above and one with all below, so that no end of a range is missed
        other = self.jittered(wide, ulps * eps) if way is None else wide * (1 + way * ulps * eps)
        below = np.abs(wide) < float(ml_dtypes.finfo(actual.dtype).smallest_normal)
        if rounding != "rounded":  # below the normal numbers units are not relative, and results may be 0
            unit = float(ml_dtypes.finfo(actual.dtype).smallest_subnormal)
            steps = unit * self.rng.integers(-1, 2, wide.shape)
            other = np.where(below, 0 * wide if self.number == 3 else other + steps, other)
        return np.asarray(np.where(hit, other.astype(actual.dtype), actual))

    def lost(self, op: OperatorSpec, args: Sequence[Any], wide: Sequence[Any], result: Array) -> Array:
        """Draw what sums lose in the order of a loop, as the run itself does. wide: arguments as moved, or exact"""
        if all(a is w or np.array_equal(a, w, equal_nan=True) for a, w in zip(args, wide)):
            return np.zeros(result.shape)
        total = op.evaluate([np.abs(a) if is_floating(a.dtype) else a for a in wide])
        terms = max(np.size(a) for a in args) / max(1, result.size)
        by = float(np.finfo(np.float64).eps) * terms**0.5 * np.where(np.isfinite(total), total, 0)
        return np.asarray(by * self.rng.choice([-1.0, 1.0], result.shape))

    def biased(self, op: OperatorSpec, args: Sequence[Any], result: Array) -> Array:
        """Move sums by half of their bound (docs/design/meaning): of many equal terms all roundings have one sign."""
        if all(a is w or np.array_equal(a, w, equal_nan=True) for a, w in ((a, self.moved(a, 1, True)) for a in args)):
            return result
        total = op.evaluate([np.abs(_wide(a)) for a in args])
        terms = max(np.size(a) for a in args) / max(1, result.size)
        by = terms * 2.0**-25 * np.where(np.isfinite(total), total, 0)
        return np.asarray(_wide(result) + (by if self.number == 1 else -by)).astype(result.dtype)

    def weighed(self, op: OperatorSpec, x: Array, result: Array) -> Array:
        """Move what was interpolated by what the weights of x lose, whose terms cancel near 0."""
        axes = getattr(op, "axes", None) or range(2, x.ndim)  # of grid_sample, whose result is (n, c, places...)
        most = np.where(np.isfinite(_wide(x)), np.abs(_wide(x)), 0).max(tuple(axes), initial=0, keepdims=True)
        most = most if most.ndim == result.ndim else most.reshape(*x.shape[:2], *[1] * (result.ndim - 2))
        by = 4 * float(ml_dtypes.finfo(result.dtype).eps) * most
        return np.asarray(_wide(result) + by * self.rng.choice([-1.0, 1.0], result.shape)).astype(result.dtype)

    def cancelled(self, op: OperatorSpec, args: Sequence[Any], result: Array) -> Array:
        """Replace sums by 0 where their terms cancel but for rounding: another order of float32 may reach 0 exactly."""
        if op.name == "layer_norm":  # of which differences from the mean cancel, beside beta
            rows = tuple(range(-getattr(op, "axes", 1), 0))
            deviations = np.abs(args[0] - args[0].mean(rows, keepdims=True))
            none = deviations <= np.abs(args[0]).max(rows, initial=0, keepdims=True) * 2.0**-22
            return np.where(none, np.broadcast_to(args[2], result.shape).astype(result.dtype), result)
        total = _magnitudes(op, args)
        if total is None:
            return result
        return np.where(np.abs(op.evaluate(args)) <= total * 2.0**-22, result * 0, result)

    def off_mean(self, op: OperatorSpec, args: Sequence[Any], result: Array) -> Array:
        """Move a layer_norm by what the rounding of its mean does: a row of two elements is blind to moved arguments."""
        rows = tuple(range(-getattr(op, "axes", 1), 0))
        x = _wide(args[0])
        mean = x.mean(rows, keepdims=True)
        spread = np.sqrt(np.square(x - mean).mean(rows, keepdims=True) + getattr(op, "eps", 0.0))
        eps = float(ml_dtypes.finfo(args[0].dtype if args[0].dtype.itemsize > 2 else np.float32).eps)
        by = self.rng.choice([-1.0, 1.0], mean.shape) * eps * np.abs(mean) / spread * _wide(args[1])
        return np.asarray(_wide(result) + np.where(np.isfinite(by), by, 0.0)).astype(result.dtype)

    def signless(self, op: OperatorSpec, args: Sequence[Any], result: Array) -> Array:
        """Move sums whose terms are zeros, or so small that they become zeros: their sign, since a sum that begins at a term may be -0,
        and by a unit, since each term may be rounded by itself."""
        total = _magnitudes(op, args) if np.any(result == 0) else None
        if total is None:
            return result
        info = ml_dtypes.finfo(result.dtype)
        zero = (result == 0) & (total < float(info.smallest_normal))
        signed = np.where(zero & (self.rng.random(result.shape) < 0.5), -result, result)
        steps = float(info.smallest_subnormal) * self.rng.integers(-1, 2, result.shape)
        return np.where(zero & (total > 0) & (steps != 0), steps.astype(result.dtype), signed)

    def signed(self, args: Sequence[Any], result: Array) -> Array:
        """Move the sign of zeros that are the extreme of zeros, or of what a run moved below zero."""
        floats = [_wide(a) for a in args if isinstance(a, np.ndarray) and is_floating(a.dtype)]
        least = float(ml_dtypes.finfo(result.dtype).smallest_normal)
        below = [(np.abs(a) < least) & np.signbit(a) for a in floats]
        pointwise = np.broadcast_shapes(*(b.shape for b in below)) == result.shape
        either = reduce(np.logical_or, (b if pointwise else b.any() for b in below), np.False_)
        return np.where(either & (result == 0) & (self.rng.random(result.shape) < 0.5), -result, result)

    def poisoned(self, op: OperatorSpec, args: Sequence[Any], result: Array) -> Array:
        """Give another value in each run to elements that nobody can ask for."""
        hidden: Any = False
        if isinstance(op, Compare) and self.number > RUNS:  # no value that is drawn need be equal to the other operand
            masks = (self.hidden[id(a)][1] for a in args if id(a) in self.hidden)
            hidden = reduce(np.logical_or, masks, np.broadcast_to(_close(args), result.shape))
            result = np.where(hidden, self.rng.random(result.shape) < 0.5, result)
        for known in self.known:
            mask = known.where(op, args, result, self.target)
            if mask is not None and self.number == 4 and is_floating(result.dtype):
                mask = mask & ~np.isnan(result)  # of a value that may be 0 in this run alone: a remainder by it is none
            if mask is None or not np.any(mask):
                continue
            # one value alike for all, then values drawn for each: equal ones are ties, which have an order
            if is_floating(result.dtype):
                alike = self.number <= len(POISONS)
                other = np.asarray(POISONS)[self.number - 1] if alike else self.rng.choice(POISONS, result.shape)
                if self.number > RUNS:  # remainders, for one, make one value of nearly all of the five
                    size = 2.0 ** self.rng.uniform(-16, 15, result.shape)
                    other = np.where(
                        self.rng.random(result.shape) < 0.5, other, size * self.rng.choice([-1, 1], result.shape)
                    )
            else:
                other = self.number % 2 if self.number <= 2 else self.rng.integers(0, 2, result.shape)
            other = np.broadcast_to(np.asarray(other), result.shape).astype(result.dtype)
            result = np.where(mask, other, result)
            hidden = hidden | mask
        if np.any(hidden):
            self.hidden[id(result)] = result, np.broadcast_to(hidden, result.shape)
        return result


def _close(args: Sequence[Any]) -> Any:
    """Return which elements of two tensors of floats are unequal, but so close that rounding may make them equal."""
    if not all(isinstance(a, np.ndarray) and is_floating(a.dtype) for a in args):
        return np.False_
    a, b = (_wide(x) for x in args)
    eps = float(ml_dtypes.finfo(args[0].dtype).eps)
    return (a != b) & (np.abs(a - b) <= 8 * eps * np.maximum(np.abs(a), np.abs(b)))


class _Indices(_Run):
    """An evaluation that looks at indices."""

    inside = True

    def operator(self, op: OperatorSpec, args: list[Any], info: StructInfo) -> Any:
        result = [actual_info(a) for a in args]
        for used in op.substituted(self.symbols).indexed([i for i in result if isinstance(i, TensorInfo)]):
            places, size = args[used.position].reshape(-1)[used.offset :: used.stride], as_int(used.size)
            self.inside &= bool(size is not None and ((places >= 0) & (places < size)).all())
        return super().operator(op, args, info)


def _magnitudes(op: OperatorSpec, args: Sequence[Any]) -> Any:
    """Return the sums of the magnitudes of what an operator adds; None for one that adds nothing."""
    added = range(len(args)) if op.name in LINEAR else ADDED.get(op.name)
    if added is None:
        return None
    return op.evaluate([np.abs(_wide(a)) if p in added else a for p, a in enumerate(args)])


def _dtype(info: StructInfo) -> np.dtype[Any]:
    assert isinstance(info, TensorInfo) and info.dtype is not None
    return info.dtype.numpy


def _wide(a: Any) -> Any:
    return a.astype(np.float64) if isinstance(a, np.ndarray) and is_floating(a.dtype) else a
