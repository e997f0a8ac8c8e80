"""The border between graph symbols and a tensor function's own symbols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from relax_tune.errors import VerifyError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove_equal
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import Const, Expr, Op, Var, free_vars, loads, transform
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks, replace_buffers
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.passes.fusion.plain_loops import plain_blocks, with_blocks


@dataclass(frozen=True, slots=True)
class LiftedFunction:
    """A tensor function over its own symbols, and what each of them stands for outside."""

    func: PrimFunc
    meaning: Mapping[Var, Expr]

    @property
    def scalars(self) -> tuple[Expr, ...]:
        """The explicit scalar arguments of a call."""
        return tuple(self.meaning[v] for v in self.func.scalar_params)


def bind_symbols(
    func: PrimFunc, args: Sequence[TensorInfo], out: Sequence[TensorInfo], scalars: Sequence[Expr]
) -> dict[Var, Expr]:
    """What the symbols of `func` stand for in one call, from the dims of the arguments and the scalar arguments.

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
    """Every variable used that no block or loop binds: the symbols, first those of parameter dims."""
    dims = [d for b in (*func.buffers, *func.allocs) for d in b.shape]
    found = dict.fromkeys(free_vars(*dims, *func.scalar_params))
    for block in blocks(func.body):
        own = {i.var for i in block.iters}
        stores = [block.body] if block.init is None else [block.body, block.init]
        roots = [i.extent for i in block.iters] + [e for s in stores for e in (*s.indices, s.value)]
        found.update(dict.fromkeys(v for v in free_vars(*roots) if v not in own))
    return tuple(found)


def map_function(func: PrimFunc, fn: Callable[[Expr], Expr], scalars: Sequence[Var] | None = None) -> PrimFunc:
    """A plain function with `fn` applied to every dim, extent, index and value. scalars: the new scalar parameters."""
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
    """Give a plain function written over outside symbols its own.

    A dim that is a product of several symbols, not all of which are dims themselves, becomes one symbol (rows of collapsed
    dims); with `derived`, so does every dim whose symbols are used for nothing else. Symbols that are needed and are no bare
    dim of a parameter become scalar parameters.
    """
    known = env or Env()
    meaning: dict[Var, Expr] = {}
    # shapes, extents and indices in normal form, so that equal dims are the same node
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
    """For every dim that equals an earlier one in another form, that one."""
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
    """The symbols of a product of at least two symbols (and numbers)."""
    found: list[Var] = []
    stack = [d]
    while stack:
        e = stack.pop()
        if isinstance(e, Op) and e.op == "mul":
            stack.extend(e.args)
        elif isinstance(e, Var):
            found.append(e)
        elif not isinstance(e, Const):
            return None
    return tuple(found) if len(found) > 1 else None


def _alone(func: PrimFunc, d: Expr) -> bool:
    """Whether the symbols of `d` are used as a part of it only."""
    rest = outer_symbols(map_function(func, lambda e: transform(e, {d: Var("m")}.get)))
    return not set(free_vars(d)) & set(rest)
