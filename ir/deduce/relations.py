"""Relations between annotations: substitution, subtyping, unification with arguments, and joins.

The order is that of `IsBaseOf` and the join that of `StructInfoLCA` in TVM Relax. Unknown parts are never guessed.
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


def is_certain(wanted: StructInfo, found: StructInfo, env: Env) -> bool:
    """Return True if every value annotated `found` provably satisfies `wanted`."""
    return next(differences(wanted, found, env), None) is None


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
        own = own_symbols(info)
        outer = {v: e for v, e in meaning.items() if v not in own}
        return CallableInfo(info.params, substitute_info(info.ret, outer, env), info.pure, info.names)
    return info


def _dims(dims: Sequence[Expr], meaning: Meaning, env: Env | None) -> tuple[Expr, ...] | None:
    found: list[Expr] = []
    for d in dims:
        new = _meant(d, meaning, env)
        if new is None:
            return None
        found.append(new)
    return tuple(found)


def _meant(e: Expr, meaning: Meaning, env: Env | None) -> Expr | None:
    """Substitute `meaning` in `e`; None when `e` contains a symbol without a value."""
    symbols = [v for v in free_vars(e) if v in meaning]
    known = {v: m for v in symbols if (m := meaning[v]) is not None}
    if len(known) < len(symbols):
        return None
    return simplify(substitute(e, known), env) if known else e


def without_symbols(info: StructInfo, known: Collection[Var]) -> StructInfo:
    """Replace parts over symbols outside `known` by unknown."""
    return substitute_info(info, {v: None for v in info_symbols(info) if v not in known})


def undetermined(v: Var, info: StructInfo) -> str:
    """Describe a symbol of a parameter's annotation that no argument determines."""
    way = f"make it a dim by itself somewhere, or add a parameter Shape([{v.name}])"
    return f"nothing determines symbol {v.name} of {info!r}; {way}"


@dataclass(frozen=True, slots=True)
class InfoDifference:
    """A part of a value that may not satisfy the wanted annotation.

    path: place of the part
    wanted: wanted part, as text
    found: found part, as text
    proof: NO when they never agree, UNKNOWN when run time decides
    dims: for scalars, the wanted one as written, the wanted one after substitution, and the found one
    """

    path: str
    wanted: str
    found: str
    proof: Proof
    dims: tuple[Expr, Expr, Expr] | None = None

    def __str__(self) -> str:
        return f"{self.path}wanted {self.wanted}, found {self.found}"


def differences(
    wanted: StructInfo, found: StructInfo, env: Env | None = None, meaning: Meaning | None = None, path: str = ""
) -> Iterator[InfoDifference]:
    """Yield the parts of a value annotated `found` that may not satisfy `wanted`, certain ones first.

    meaning: value of each symbol of `wanted`. Nothing listed: `found` is a subtype of `wanted`.
    """
    if isinstance(wanted, ObjectInfo):
        return
    if isinstance(found, ObjectInfo):
        yield InfoDifference(path, repr(wanted), "an object", Proof.UNKNOWN)
    elif type(wanted) is not type(found):
        yield InfoDifference(path, repr(wanted), repr(found), Proof.NO)
    elif isinstance(wanted, TupleInfo) and isinstance(found, TupleInfo):
        if len(wanted.fields) != len(found.fields):
            yield InfoDifference(path, f"{len(wanted.fields)} fields", str(len(found.fields)), Proof.NO)
            return
        for i, (w, f) in enumerate(zip(wanted.fields, found.fields, strict=True)):
            yield from differences(w, f, env, meaning, f"{path}field {i}: ")
    elif isinstance(wanted, CallableInfo) and isinstance(found, CallableInfo):
        yield from _callables(wanted, found, env, meaning or {}, path)
    else:
        yield from _plain(wanted, found, env, meaning or {}, path)


def _plain(
    wanted: StructInfo, found: StructInfo, env: Env | None, meaning: Meaning, path: str
) -> Iterator[InfoDifference]:
    """Yield the differences of tensors, shapes and scalars."""
    if isinstance(wanted, (TensorInfo, PrimInfo)) and isinstance(found, (TensorInfo, PrimInfo)):
        dtype = wanted.dtype
        if dtype not in (None, found.dtype):
            proof = Proof.UNKNOWN if found.dtype is None else Proof.NO
            yield InfoDifference(path, f"dtype {dtype}", str(found.dtype or "an unknown one"), proof)
    if isinstance(wanted, TensorInfo) and isinstance(found, TensorInfo) and wanted.device not in (None, found.device):
        proof = Proof.UNKNOWN if found.device is None else Proof.NO
        yield InfoDifference(path, f"device {wanted.device}", found.device or "none stated", proof)
    if isinstance(wanted, (TensorInfo, ShapeInfo)) and isinstance(found, (TensorInfo, ShapeInfo)):
        ndim = wanted.ndim
        if ndim not in (None, found.ndim):
            proof = Proof.UNKNOWN if found.ndim is None else Proof.NO
            yield InfoDifference(path, f"{ndim} dims", str("unknown" if found.ndim is None else found.ndim), proof)
            return
    dims, have = info_dims(wanted), info_dims(found)
    if dims is None:
        return
    if have is None:
        if any(_meant(d, meaning, env) is not None for d in dims):
            yield InfoDifference(path, repr(wanted), repr(found), Proof.UNKNOWN)
        return
    for axis, (want, size) in enumerate(zip(dims, have, strict=True)):
        where = f"{path}value: " if isinstance(wanted, PrimInfo) else f"{path}dim {axis}: "
        meant = _meant(want, meaning, env)
        if meant is None:
            continue
        proof = Proof.YES if meant is size else prove_equal(meant, size, env)
        if proof is not Proof.YES:
            text = repr(want) if meant is want else f"{want!r} = {meant!r}"
            apart = proof is Proof.NO and set(free_vars(meant)).isdisjoint(free_vars(size))
            limits = [_limits(e, env) if env is not None and apart else "" for e in (meant, size)]
            yield InfoDifference(where, text + limits[0], repr(size) + limits[1], proof, (want, meant, size))


def _limits(e: Expr, env: Env) -> str:
    """Describe the declared bounds of the symbols of a dim, in brackets; "" without any."""
    found = []
    for v in free_vars(e):
        lower, upper = env.bounds.get(v, (None, None))
        low = "" if lower is None or as_int(lower) == 0 else f"{lower!r} <= "
        high = "" if upper is None else f" <= {upper!r}"
        found += [f"{low}{v.name}{high}"] if low or high else []
    return f" ({', '.join(found)})" if found else ""


def _callables(
    wanted: CallableInfo, found: CallableInfo, env: Env | None, meaning: Meaning, path: str
) -> Iterator[InfoDifference]:
    """Yield the differences of signatures: parameters are contravariant, results covariant."""
    if wanted.pure and not found.pure:
        yield InfoDifference(path, "a pure function", "one with side effects", Proof.NO)
    if wanted.params is not None:
        if found.params is None:
            yield InfoDifference(path, repr(wanted), repr(found), Proof.UNKNOWN)
            return
        if len(wanted.params) != len(found.params):
            yield InfoDifference(path, f"{len(wanted.params)} parameters", str(len(found.params)), Proof.NO)
            return
        own = own_symbols(wanted)
        inner = {v: e for v, e in meaning.items() if v not in own}
        given = [substitute_info(p, inner, env) for p in wanted.params]
        solved = solve(found, given, env)
        for i, (p, a) in enumerate(zip(found.params, given, strict=True)):
            for d in differences(p, a, env, solved, f"{path}parameter {i}: "):
                yield _for_all(d, own, env)
        result = substitute_info(found.ret, solved, env)
        for d in differences(wanted.ret, result, env, inner, f"{path}result: "):
            yield _for_all(d, own, env)
        return
    yield from differences(wanted.ret, without_own(found), env, meaning, f"{path}result: ")


def _for_all(d: InfoDifference, own: Collection[Var], env: Env | None) -> InfoDifference:
    """Quantify a difference inside a signature over its own symbols; run time cannot decide it."""
    if d.dims is None or d.proof is not Proof.UNKNOWN or not any(v in own for v in free_vars(*d.dims[1:])):
        return d
    for start in (1, 2, 5):
        sample = {v: const(start + 2 * i) for i, v in enumerate(own)}
        if prove_equal(substitute(d.dims[1], sample), substitute(d.dims[2], sample), env) is Proof.NO:
            return replace(d, proof=Proof.NO)
    return replace(d, dims=None)


def without_own(signature: CallableInfo) -> StructInfo:
    """Return the result of a signature, without parts over its own symbols."""
    return substitute_info(signature.ret, dict.fromkeys(own_symbols(signature)))


def solve(signature: CallableInfo, args: Sequence[StructInfo], env: Env | None = None) -> dict[Var, Expr | None]:
    """Solve for the own symbols of a signature in a call; None for an undetermined symbol.

    A symbol that is a dim by itself takes that dim of the argument. Another symbol is solved for if it is the only unknown of a
    linear dim. Division rounds (`2 * n` against 7 gives 3): the caller compares the dims afterwards."""
    meaning: dict[Var, Expr | None] = dict.fromkeys(own_symbols(signature))
    pairs = [p for w, f in zip(signature.params or (), args, strict=False) for p in _pairs(w, f)]
    for want, size in pairs:
        if isinstance(want, Var) and want in meaning and meaning[want] is None:
            meaning[want] = size
    progress = True
    while progress:
        progress = False
        for want, size in pairs:
            missing = [v for v in free_vars(want) if v in meaning and meaning[v] is None]
            if len(missing) != 1:
                continue
            parts = linear(want, missing)
            factor = None if parts is None else parts[0].get(missing[0])
            if parts is None or not isinstance(factor, Const) or int(factor.value) <= 0:
                continue
            rest = _meant(parts[1], meaning, env)
            if rest is not None:
                meaning[missing[0]] = simplify((size - rest) // factor, env)
                progress = True
    return meaning


def _pairs(wanted: StructInfo, found: StructInfo) -> Iterator[tuple[Expr, Expr]]:
    """Yield pairs of scalars at the same place of two annotations of one kind."""
    if type(wanted) is not type(found):
        return
    if isinstance(wanted, TupleInfo) and isinstance(found, TupleInfo):
        for w, f in zip(wanted.fields, found.fields, strict=False):
            yield from _pairs(w, f)
    dims, have = info_dims(wanted), info_dims(found)
    if dims is not None and have is not None and len(dims) == len(have):
        yield from zip(dims, have, strict=True)


def call_differences(
    func: PrimFunc, infos: Sequence[StructInfo], scalars: Sequence[Expr], env: Env | None = None
) -> Iterator[tuple[Buffer, Iterator[InfoDifference]]]:
    """Yield the differences of each buffer of a tensor function from a call's arguments and outputs.

    infos: annotations of the arguments, then of the outputs.
    Raises DeduceError for a wrong number of buffers or scalars.
    """
    if len(infos) != len(func.buffers) or len(scalars) != len(func.scalar_params):
        raise DeduceError(
            f"{func.name}: wanted {len(func.input_buffers)} arguments, {func.outputs} outputs and {len(func.scalar_params)} "
            f"scalars, found {len(infos)} arguments and outputs, and {len(scalars)} scalars"
        )
    params = tuple(TensorInfo(b.shape, b.dtype) for b in func.buffers)
    whole = CallableInfo((ShapeInfo(func.scalar_params), *params), ObjectInfo())
    meaning = solve(whole, (ShapeInfo(tuple(scalars)), *infos), env)
    for buffer, wanted, found in zip(func.buffers, params, infos, strict=True):
        yield buffer, differences(wanted, found, env, meaning)


def is_base(wanted: StructInfo, found: StructInfo, env: Env | None = None) -> Proof:
    """Prove that every value annotated `found` satisfies `wanted`; NO when none does."""
    proofs = [d.proof for d in differences(wanted, found, env)]
    return Proof.NO if Proof.NO in proofs else Proof.UNKNOWN if proofs else Proof.YES


def conflict(declared: StructInfo, found: StructInfo, env: Env | None = None) -> str | None:
    """Return why a value annotated `found` can never satisfy `declared`, or None when it can."""
    return next((str(d) for d in differences(declared, found, env) if d.proof is Proof.NO), None)


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
        return CallableInfo(None, join(without_own(a), without_own(b), env), a.pure and b.pure)
    return ObjectInfo()


def _join_dims(a: tuple[Expr, ...] | None, b: tuple[Expr, ...] | None, env: Env | None) -> tuple[Expr, ...] | None:
    if a is None or b is None or len(a) != len(b):
        return None
    same = all(x is y or prove_equal(x, y, env) is Proof.YES for x, y in zip(a, b, strict=True))
    return a if same else None


def check_annotation(
    name: str, found: StructInfo, wanted: StructInfo, ctx: Deduction, bound: Collection[Var] | None = None
) -> set[Var]:
    """Require the value `name`, annotated `found`, to satisfy `wanted`, now or by run-time checks.

    bound: symbols that have a value; None: all. Any other symbol that is a dim of `wanted` is bound instead of checked.
    Returns the symbols that have a value afterwards.
    Raises DeduceError naming the value, the dim and both sizes, when it never fits.
    """
    symbols = info_symbols(wanted)
    meaning: Meaning = {}
    if bound is not None:
        meaning = solve(CallableInfo((wanted,), ObjectInfo()), (found,), ctx.env)
        meaning = {v: e for v, e in meaning.items() if v not in bound}
    require_all(name, differences(wanted, found, ctx.env, meaning), ctx)
    return set(bound or ()) | set(symbols)


def require_all(name: str, found: Iterator[InfoDifference], ctx: Deduction) -> None:
    """Require that no difference is certain; undecided scalars become run-time checks. Raises DeduceError."""
    for d in found:
        if d.proof is Proof.NO:
            raise DeduceError(f"{name}: {d}")
        if d.dims is not None:
            want, meant, size = d.dims
            sides = [f"{{0}} ({want!r})" if not isinstance(want, Const) else "{0}"]
            sides += [f"{{1}} ({size!r})" if not isinstance(size, Const) else "{1}"]
            ctx.require(eq(meant, size), f"{name}: {d.path}wanted {sides[0]}, found {sides[1]}", meant, size)
