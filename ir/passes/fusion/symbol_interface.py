"""Symbols at the interface of tensor functions: a graph's symbols outside, a function's own symbols inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from relax_tune.errors import VerifyError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove_equal
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import Const, Expr, Var, free_vars, loads, transform
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.plain_loops import plain_blocks, with_blocks
from relax_tune.ir.core.stmt import blocks, replace_buffers
from relax_tune.ir.core.struct_info import TensorInfo


@dataclass(frozen=True, slots=True)
class LiftedFunction:
    """A tensor function over its own symbols.

    func: function
    meaning: value of each own symbol, over the symbols outside
    """

    func: PrimFunc
    meaning: Mapping[Var, Expr]

    @property
    def scalars(self) -> tuple[Expr, ...]:
        """Explicit scalar arguments of a call."""
        return tuple(self.meaning[v] for v in self.func.scalar_params)


def bind_symbols(
    func: PrimFunc, args: Sequence[TensorInfo], out: Sequence[TensorInfo], scalars: Sequence[Expr]
) -> dict[Var, Expr]:
    """Return the value of each symbol of `func` in one call, from its dims and scalar arguments.

    Raises VerifyError when the call does not fit the signature."""
    buffers, infos = func.buffers, (*args, *out)
    if len(buffers) != len(infos) or len(scalars) != len(func.scalar_params):
        raise VerifyError(
            f"call of {func.name}: wanted {len(buffers)} tensors and {len(func.scalar_params)} scalars, "
            f"found {len(infos)} and {len(scalars)}"
        )
    found: dict[Var, Expr] = dict(zip(func.scalar_params, scalars, strict=True))
    for buffer, info in zip(buffers, infos, strict=True):
        if info.shape is None or len(info.shape) != len(buffer.shape) or info.dtype is not buffer.dtype:
            raise VerifyError(f"call of {func.name}: wanted {buffer!r}, found {info!r}")
        for own, outside in zip(buffer.shape, info.shape, strict=True):
            if isinstance(own, Var):
                found.setdefault(own, outside)
    return found


def outer_symbols(func: PrimFunc) -> tuple[Var, ...]:
    """Return the free variables of `func`, symbols of parameter dims first."""
    dims = [d for b in (*func.buffers, *func.allocs) for d in b.shape]
    found = dict.fromkeys(free_vars(*dims, *func.scalar_params))
    for block in blocks(func.body):
        own = {i.var for i in block.iters}
        stores = [block.body] if block.init is None else [block.body, block.init]
        roots = [i.extent for i in block.iters] + [e for s in stores for e in (*s.indices, s.value)]
        found.update(dict.fromkeys(v for v in free_vars(*roots) if v not in own))
    return tuple(found)


def map_function(func: PrimFunc, fn: Callable[[Expr], Expr], scalars: Sequence[Var] | None = None) -> PrimFunc:
    """Apply `fn` to every dim, extent, index and value of an unscheduled function.

    scalars: new scalar parameters; None: unchanged"""
    found = plain_blocks(func)
    assert found is not None, func.name
    renamed = {b: replace(b, shape=tuple(fn(d) for d in b.shape)) for b in (*func.buffers, *func.allocs)}
    return with_blocks(
        replace(
            func,
            params=(*(renamed[b] for b in func.buffers), *(func.scalar_params if scalars is None else scalars)),
            allocs=tuple(renamed[b] for b in func.allocs),
            consts=tuple(renamed[b] for b in func.consts),
        ),
        [replace_buffers(b, renamed).map_own_exprs(fn) for b in found],
    )


def lift_symbols(func: PrimFunc, env: Env | None = None, derived: bool = False) -> LiftedFunction:
    """Replace the free symbols of an unscheduled function by symbols of its own (lambda lifting).

    A dim that is a product of symbols becomes one symbol, unless each factor is a dim by itself (rows of collapsed dims).
    A symbol that is no bare dim of a parameter becomes a scalar parameter.
    derived: a dim whose symbols occur nowhere else becomes one symbol too
    """
    known = env or Env()
    meaning: dict[Var, Expr] = {}
    # normal form of shapes, extents and indices, so that equal dims are the same node
    func = map_function(func, lambda e: simplify(e, known) if e.dtype.is_int and not _reads(e) else e, ())
    dims = list(dict.fromkeys(d for b in func.buffers for d in b.shape))
    equal = _representatives([d for d in dims if not isinstance(d, (Var, Const))], known)
    if equal:
        func = map_function(func, lambda e: transform(e, equal.get))
        dims = list(dict.fromkeys(d for b in func.buffers for d in b.shape))
    bare = {d for d in dims if isinstance(d, Var)}
    products: dict[Expr, Expr] = {}
    for d in dims:
        if not set(free_vars(d)) <= bare and (_factors(d) is not None or (derived and _alone(func, d))):
            var = Var("m" if not products else f"m{len(products)}")
            products[d] = var
            meaning[var] = d
    func = map_function(func, lambda e: transform(e, products.get)) if products else func
    taken = {v.name for v in products.values() if isinstance(v, Var)}
    own: dict[Expr, Expr] = {}
    for v in outer_symbols(func):
        if v in meaning:
            continue
        name = v.name if v.name not in taken else f"{v.name}_{len(own)}"
        taken.add(name)
        fresh = Var(name, v.dtype)
        own[v], meaning[fresh] = fresh, v
    func = map_function(func, lambda e: transform(e, own.get))
    readable = {d for b in func.buffers for d in b.shape if isinstance(d, Var)}
    scalars = tuple(v for v in outer_symbols(func) if v not in readable)
    return LiftedFunction(replace(func, params=(*func.buffers, *scalars)), meaning)


def _representatives(dims: Sequence[Expr], env: Env) -> dict[Expr, Expr]:
    """Map each dim that provably equals an earlier one to that earlier dim."""
    found: dict[Expr, Expr] = {}
    first: list[Expr] = []
    for d in dims:
        same = next((e for e in first if prove_equal(d, e, env) is Proof.YES), None)
        if same is None:
            first.append(d)
        else:
            found[d] = same
    return found


def _reads(e: Expr) -> bool:
    return bool(loads(e))


def _factors(d: Expr) -> tuple[Var, ...] | None:
    """Return the symbols of a product of at least two symbols and any numbers, or None for another expression."""
    found: list[Var] = []
    stack = [d]
    while stack:
        e = stack.pop()
        if e.op == "mul":
            stack.extend(e.args)
        elif isinstance(e, Var):
            found.append(e)
        elif not isinstance(e, Const):
            return None
    return tuple(found) if len(found) > 1 else None


def _alone(func: PrimFunc, d: Expr) -> bool:
    """Return True if the symbols of `d` occur in `func` only as part of `d`."""
    rest = outer_symbols(map_function(func, lambda e: transform(e, {d: Var("m")}.get)))
    return not set(free_vars(d)) & set(rest)
