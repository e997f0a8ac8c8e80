"""Relations between annotations: substitution, subtyping, unification with arguments, and joins.

The order is `IsBaseOf` and the join `StructInfoLCA` of TVM Relax. Unknown parts are never guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.linear import linear
from relax_tune.ir.arith.prove import Proof, prove_equal
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Const, Expr, Var, as_int, const, eq, free_vars, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.struct_info import (
    CallableInfo,
    ObjectInfo,
    PrimInfo,
    ShapeInfo,
    StructInfo,
    TensorInfo,
    TupleInfo,
    info_dims,
    info_symbols,
    own_symbols,
)
from relax_tune.ir.op.base import Deduction

Meaning = Mapping[Var, Expr | None]
"""The values of symbols; None for an unknown value."""


def is_known(info: StructInfo) -> TypeGuard[TensorInfo]:
    """Return True for a tensor of known dims and dtype."""
    return isinstance(info, TensorInfo) and info.shape is not None and info.dtype is not None


def is_certain(expected: StructInfo, actual: StructInfo, env: Env) -> bool:
    """Return True if every value annotated `actual` provably satisfies `expected`."""
    return next(differences(expected, actual, env), None) is None


def substitute_info(info: StructInfo, meaning: Meaning, env: Env | None = None) -> StructInfo:
    """Substitute symbols simultaneously; parts over a symbol without a value become unknown."""
    if isinstance(info, TensorInfo) and info.shape is not None:
        dims = _dims(info.shape, meaning, env)
        return TensorInfo(dims, info.dtype, info.ndim, info.device)
    if isinstance(info, ShapeInfo) and info.values is not None:
        return ShapeInfo(_dims(info.values, meaning, env), info.ndim)
    if isinstance(info, PrimInfo) and info.value is not None:
        value = _dims((info.value,), meaning, env)
        return PrimInfo(info.dtype, value[0] if value else None)
    if isinstance(info, TupleInfo):
        return TupleInfo(tuple(substitute_info(f, meaning, env) for f in info.fields))
    if isinstance(info, CallableInfo):
        bound = own_symbols(info)
        # A signature binds its own symbols: n in it is another n than the one outside.
        outer = {v: e for v, e in meaning.items() if v not in bound}
        return CallableInfo(info.params, substitute_info(info.ret, outer, env), info.pure, info.names)
    return info


def _dims(dims: Sequence[Expr], meaning: Meaning, env: Env | None) -> tuple[Expr, ...] | None:
    substituted: list[Expr] = []
    for d in dims:
        new = _meant(d, meaning, env)
        if new is None:
            return None
        substituted.append(new)
    return tuple(substituted)


def _meant(e: Expr, meaning: Meaning, env: Env | None) -> Expr | None:
    """Substitute `meaning` in `e`; None when `e` contains a symbol without a value."""
    symbols = [v for v in free_vars(e) if v in meaning]
    known = {v: m for v in symbols if (m := meaning[v]) is not None}
    if len(known) < len(symbols):
        return None
    return simplify(substitute(e, known), env) if known else e


def without_symbols(info: StructInfo, known: Collection[Var]) -> StructInfo:
    """Make parts over symbols outside `known` unknown."""
    return substitute_info(info, {v: None for v in info_symbols(info) if v not in known})


def undetermined(v: Var, info: StructInfo) -> str:
    """Describe a symbol of a parameter's annotation that no argument determines."""
    advice = f"make it a dim by itself somewhere, or add a parameter Shape([{v.name}])"
    return f"nothing determines symbol {v.name} of {info!r}; {advice}"


@dataclass(frozen=True, slots=True)
class InfoDifference:
    """A part of a value that may not satisfy the expected annotation.

    Attributes:
        path: place of the part.
        expected: expected part, as text.
        actual: actual part, as text.
        proof: NO when they never agree, UNKNOWN when run time decides.
        dims: for scalars, the expected one as written, the expected one after substitution, and the actual one.
    """

    path: str
    expected: str
    actual: str
    proof: Proof
    dims: tuple[Expr, Expr, Expr] | None = None

    def __str__(self) -> str:
        return f"{self.path}expected {self.expected}, got {self.actual}"


def differences(
    expected: StructInfo, actual: StructInfo, env: Env | None = None, meaning: Meaning | None = None, path: str = ""
) -> Iterator[InfoDifference]:
    """Yield the parts of a value annotated `actual` that may not satisfy `expected`, certain ones first.

    Args:
        meaning: value of each symbol of `expected`.

    Returns:
        Nothing if `actual` is a subtype of `expected`.
    """
    if isinstance(expected, ObjectInfo):
        return
    if isinstance(actual, ObjectInfo):
        yield InfoDifference(path, repr(expected), "an object", Proof.UNKNOWN)
    elif type(expected) is not type(actual):
        yield InfoDifference(path, repr(expected), repr(actual), Proof.NO)
    elif isinstance(expected, TupleInfo) and isinstance(actual, TupleInfo):
        if len(expected.fields) != len(actual.fields):
            yield InfoDifference(path, f"{len(expected.fields)} fields", str(len(actual.fields)), Proof.NO)
            return
        for i, (w, f) in enumerate(zip(expected.fields, actual.fields, strict=True)):
            yield from differences(w, f, env, meaning, f"{path}field {i}: ")
    elif isinstance(expected, CallableInfo) and isinstance(actual, CallableInfo):
        yield from _callables(expected, actual, env, meaning or {}, path)
    else:
        yield from _plain(expected, actual, env, meaning or {}, path)


def _plain(
    expected: StructInfo, actual: StructInfo, env: Env | None, meaning: Meaning, path: str
) -> Iterator[InfoDifference]:
    """Yield the differences of tensors, shapes and scalars."""
    if isinstance(expected, (TensorInfo, PrimInfo)) and isinstance(actual, (TensorInfo, PrimInfo)):
        dtype = expected.dtype
        if dtype not in (None, actual.dtype):
            proof = Proof.UNKNOWN if actual.dtype is None else Proof.NO
            yield InfoDifference(path, f"dtype {dtype}", str(actual.dtype or "an unknown one"), proof)
    if (
        isinstance(expected, TensorInfo)
        and isinstance(actual, TensorInfo)
        and expected.device not in (None, actual.device)
    ):
        proof = Proof.UNKNOWN if actual.device is None else Proof.NO
        yield InfoDifference(path, f"device {expected.device}", actual.device or "none stated", proof)
    if isinstance(expected, (TensorInfo, ShapeInfo)) and isinstance(actual, (TensorInfo, ShapeInfo)):
        ndim = expected.ndim
        if ndim not in (None, actual.ndim):
            proof = Proof.UNKNOWN if actual.ndim is None else Proof.NO
            yield InfoDifference(path, f"{ndim} dims", str("unknown" if actual.ndim is None else actual.ndim), proof)
            return
    dims, actual_dims = info_dims(expected), info_dims(actual)
    if dims is None:
        return
    if actual_dims is None:
        # Dims over symbols without a value are bound by the value, not checked against it.
        if any(_meant(d, meaning, env) is not None for d in dims):
            yield InfoDifference(path, repr(expected), repr(actual), Proof.UNKNOWN)
        return
    for axis, (dim, size) in enumerate(zip(dims, actual_dims, strict=True)):
        where = f"{path}value: " if isinstance(expected, PrimInfo) else f"{path}dim {axis}: "
        value = _meant(dim, meaning, env)
        if value is None:
            continue
        proof = Proof.YES if value is size else prove_equal(value, size, env)
        if proof is not Proof.YES:
            text = repr(dim) if value is dim else f"{dim!r} = {value!r}"
            # Bounds explain a refusal only if the two sides share no symbol: n and n + 1 differ under any bounds.
            never_equal = proof is Proof.NO and set(free_vars(value)).isdisjoint(free_vars(size))
            limits = [_limits(e, env) if env is not None and never_equal else "" for e in (value, size)]
            yield InfoDifference(where, text + limits[0], repr(size) + limits[1], proof, (dim, value, size))


def _limits(e: Expr, env: Env) -> str:
    """Describe the declared bounds of the symbols of a dim, in brackets; "" without any."""
    ranges = []
    for v in free_vars(e):
        lower, upper = env.bounds.get(v, (None, None))
        low = "" if lower is None or as_int(lower) == 0 else f"{lower!r} <= "
        high = "" if upper is None else f" <= {upper!r}"
        ranges += [f"{low}{v.name}{high}"] if low or high else []
    return f" ({', '.join(ranges)})" if ranges else ""


def _callables(
    expected: CallableInfo, actual: CallableInfo, env: Env | None, meaning: Meaning, path: str
) -> Iterator[InfoDifference]:
    """Yield the differences of signatures: parameters are contravariant, results covariant."""
    if expected.pure and not actual.pure:
        yield InfoDifference(path, "a pure function", "one with side effects", Proof.NO)
    if expected.params is not None:
        if actual.params is None:
            yield InfoDifference(path, repr(expected), repr(actual), Proof.UNKNOWN)
            return
        if len(expected.params) != len(actual.params):
            yield InfoDifference(path, f"{len(expected.params)} parameters", str(len(actual.params)), Proof.NO)
            return
        bound = own_symbols(expected)
        inner = {v: e for v, e in meaning.items() if v not in bound}
        params = [substitute_info(p, inner, env) for p in expected.params]
        solved = solve(actual, params, env)
        for i, (p, a) in enumerate(zip(actual.params, params, strict=True)):
            for d in differences(p, a, env, solved, f"{path}parameter {i}: "):
                yield _for_all(d, bound, env)
        result = substitute_info(actual.ret, solved, env)
        for d in differences(expected.ret, result, env, inner, f"{path}result: "):
            yield _for_all(d, bound, env)
        return
    yield from differences(expected.ret, without_own(actual), env, meaning, f"{path}result: ")


def _for_all(d: InfoDifference, bound: Collection[Var], env: Env | None) -> InfoDifference:
    """Quantify a difference inside a signature over its own symbols; run time cannot decide it."""
    if d.dims is None or d.proof is not Proof.UNKNOWN or not any(v in bound for v in free_vars(*d.dims[1:])):
        return d
    # One counterexample refutes what must hold for all sizes. The samples of different symbols differ, so that they
    # do not agree by chance.
    for start in (1, 2, 5):
        sample = {v: const(start + 2 * i) for i, v in enumerate(bound)}
        if prove_equal(substitute(d.dims[1], sample), substitute(d.dims[2], sample), env) is Proof.NO:
            return replace(d, proof=Proof.NO)
    return replace(d, dims=None)


def without_own(signature: CallableInfo) -> StructInfo:
    """Return the result of a signature, without parts over its own symbols."""
    return substitute_info(signature.ret, dict.fromkeys(own_symbols(signature)))


def solve(signature: CallableInfo, args: Sequence[StructInfo], env: Env | None = None) -> dict[Var, Expr | None]:
    """Solve for the symbols that a signature binds in a call; None for an undetermined symbol.

    A symbol that is a bare dim takes that dim of the argument. Another symbol is solved for if it is the only unknown of a
    linear dim. Division rounds (`2 * n` against 7 gives 3): the caller compares the dims afterwards."""
    meaning: dict[Var, Expr | None] = dict.fromkeys(own_symbols(signature))
    pairs = [p for w, f in zip(signature.params or (), args, strict=False) for p in _pairs(w, f)]
    for dim, size in pairs:
        # Bare dims first, since they are exact. A solved quotient may round.
        if isinstance(dim, Var) and dim in meaning and meaning[dim] is None:
            meaning[dim] = size
    progress = True
    while progress:
        progress = False
        for dim, size in pairs:
            missing = [v for v in free_vars(dim) if v in meaning and meaning[v] is None]
            if len(missing) != 1:
                continue
            parts = linear(dim, missing)
            factor = None if parts is None else parts[0].get(missing[0])
            # A symbolic factor could be 0, and division by it would invent a value.
            if parts is None or not isinstance(factor, Const) or int(factor.value) <= 0:
                continue
            rest = _meant(parts[1], meaning, env)
            if rest is not None:
                meaning[missing[0]] = simplify((size - rest) // factor, env)
                progress = True
    return meaning


def _pairs(expected: StructInfo, actual: StructInfo) -> Iterator[tuple[Expr, Expr]]:
    """Yield pairs of scalars at the same place of two annotations of one kind."""
    if type(expected) is not type(actual):
        return
    if isinstance(expected, TupleInfo) and isinstance(actual, TupleInfo):
        for w, f in zip(expected.fields, actual.fields, strict=False):
            yield from _pairs(w, f)
    dims, actual_dims = info_dims(expected), info_dims(actual)
    if dims is not None and actual_dims is not None and len(dims) == len(actual_dims):
        yield from zip(dims, actual_dims, strict=True)


def call_differences(
    func: PrimFunc, infos: Sequence[StructInfo], scalars: Sequence[Expr], env: Env | None = None
) -> Iterator[tuple[Buffer, Iterator[InfoDifference]]]:
    """Yield the differences of each buffer of a tensor function from a call's arguments and outputs.

    Args:
        infos: annotations of the arguments, then of the outputs.

    Raises:
        DeduceError: a wrong number of buffers or scalars.
    """
    if len(infos) != len(func.buffers) or len(scalars) != len(func.scalar_params):
        raise DeduceError(
            f"{func.name}: expected {len(func.input_buffers)} arguments, {func.outputs} outputs and {len(func.scalar_params)} "
            f"scalars, got {len(infos)} arguments and outputs, and {len(scalars)} scalars"
        )
    params = tuple(TensorInfo(b.shape, b.dtype) for b in func.buffers)
    whole = CallableInfo((ShapeInfo(func.scalar_params), *params), ObjectInfo())
    meaning = solve(whole, (ShapeInfo(tuple(scalars)), *infos), env)
    for buffer, expected, actual in zip(func.buffers, params, infos, strict=True):
        yield buffer, differences(expected, actual, env, meaning)


def is_base(expected: StructInfo, actual: StructInfo, env: Env | None = None) -> Proof:
    """Prove that every value annotated `actual` satisfies `expected`; NO when none does."""
    proofs = [d.proof for d in differences(expected, actual, env)]
    return Proof.NO if Proof.NO in proofs else Proof.UNKNOWN if proofs else Proof.YES


def conflict(declared: StructInfo, actual: StructInfo, env: Env | None = None) -> str | None:
    """Return why a value annotated `actual` can never satisfy `declared`, or None when it can."""
    return next((str(d) for d in differences(declared, actual, env) if d.proof is Proof.NO), None)


def join(a: StructInfo, b: StructInfo, env: Env | None = None) -> StructInfo:
    """Return the least annotation above `a` and `b`."""
    if isinstance(a, TensorInfo) and isinstance(b, TensorInfo):
        dtype = a.dtype if a.dtype is b.dtype else None
        ndim = a.ndim if a.ndim == b.ndim else None
        return TensorInfo(_join_dims(a.shape, b.shape, env), dtype, ndim, a.device if a.device == b.device else None)
    if isinstance(a, ShapeInfo) and isinstance(b, ShapeInfo):
        return ShapeInfo(_join_dims(a.values, b.values, env), a.ndim if a.ndim == b.ndim else None)
    if isinstance(a, PrimInfo) and isinstance(b, PrimInfo) and a.dtype is b.dtype:
        same = a.value is not None and b.value is not None and prove_equal(a.value, b.value, env) is Proof.YES
        return PrimInfo(a.dtype, a.value if a.value is b.value or same else None)
    if isinstance(a, TupleInfo) and isinstance(b, TupleInfo) and len(a.fields) == len(b.fields):
        return TupleInfo(tuple(join(x, y, env) for x, y in zip(a.fields, b.fields, strict=True)))
    if isinstance(a, CallableInfo) and isinstance(b, CallableInfo):
        for one, other in ((a, b), (b, a)):
            if is_base(one, other, env) is Proof.YES:
                return one
        # Parameters are contravariant: a common signature would need the meet of both, which annotations do not have.
        return CallableInfo(None, join(without_own(a), without_own(b), env), a.pure and b.pure)
    return ObjectInfo()


def _join_dims(a: tuple[Expr, ...] | None, b: tuple[Expr, ...] | None, env: Env | None) -> tuple[Expr, ...] | None:
    if a is None or b is None or len(a) != len(b):
        return None
    same = all(x is y or prove_equal(x, y, env) is Proof.YES for x, y in zip(a, b, strict=True))
    return a if same else None


def check_annotation(
    name: str, actual: StructInfo, expected: StructInfo, ctx: Deduction, bound: Collection[Var] | None = None
) -> set[Var]:
    """Require the value `name`, annotated `actual`, to satisfy `expected`, now or by run-time checks.

    Args:
        bound: symbols that have a value; None: all. Any other symbol that is a dim of `expected` is bound instead of checked.

    Returns:
        The symbols that have a value afterwards.

    Raises:
        DeduceError: names the value, the dim and both sizes, when it can never fit.
    """
    symbols = info_symbols(expected)
    meaning: Meaning = {}
    if bound is not None:
        meaning = solve(CallableInfo((expected,), ObjectInfo()), (actual,), ctx.env)
        # A symbol with a value stands for itself, so that the dims over it are compared instead of solved.
        meaning = {v: e for v, e in meaning.items() if v not in bound}
    require_all(name, differences(expected, actual, ctx.env, meaning), ctx)
    return set(bound or ()) | set(symbols)


def require_all(name: str, unmet: Iterator[InfoDifference], ctx: Deduction) -> None:
    """Require that no difference is certain; undecided scalars become run-time checks. Raises DeduceError."""
    for d in unmet:
        if d.proof is Proof.NO:
            raise DeduceError(f"{name}: {d}")
        if d.dims is not None:
            dim, value, size = d.dims
            sides = [f"{{0}} ({dim!r})" if not isinstance(dim, Const) else "{0}"]
            sides += [f"{{1}} ({size!r})" if not isinstance(size, Const) else "{1}"]
            ctx.require(eq(value, size), f"{name}: {d.path}expected {sides[0]}, got {sides[1]}", value, size)
