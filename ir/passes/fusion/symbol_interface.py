"""Symbols at the interface of tensor functions, which have separate symbols from the graph that calls them.

Tests: `tests/ir/passes/fusion/test_fuse.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from relax_tune.errors import VerifyError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove_equal
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Const, Expr, Load, Var, free_vars, load, loads, substitute, transform
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.plain_loops import plain_blocks, with_blocks
from relax_tune.ir.core.stmt import Block, BufferStore, blocks
from relax_tune.ir.core.struct_info import TensorInfo


@dataclass(frozen=True, slots=True)
class LiftedFunction:
    """A tensor function over new symbols.

    Attributes:
        func: The function.
        meaning: Value of each of its symbols, over the original symbols.
    """

    func: PrimFunc
    meaning: Mapping[Var, Expr]

    @property
    def scalars(self) -> tuple[Expr, ...]:
        """Scalar arguments of a call of the function."""
        return tuple(self.meaning[v] for v in self.func.scalar_params)


def bind_symbols(
    func: PrimFunc, args: Sequence[TensorInfo], out: Sequence[TensorInfo], scalars: Sequence[Expr]
) -> dict[Var, Expr]:
    """Return the value of each symbol of `func` in one call, from the dims of the tensors and the scalar arguments.

    Args:
        args: Annotations of the arguments.
        out: Annotations of the outputs.

    Raises:
        VerifyError: The call does not fit the signature.
    """
    buffers, infos = func.buffers, (*args, *out)
    if len(buffers) != len(infos) or len(scalars) != len(func.scalar_params):
        raise VerifyError(
            f"call of {func.name}: expected {len(buffers)} tensors and {len(func.scalar_params)} scalars, "
            f"got {len(infos)} and {len(scalars)}"
        )
    values: dict[Var, Expr] = dict(zip(func.scalar_params, scalars, strict=True))
    for buffer, info in zip(buffers, infos, strict=True):
        if info.shape is None or len(info.shape) != len(buffer.shape) or info.dtype is not buffer.dtype:
            raise VerifyError(f"call of {func.name}: expected {buffer!r}, got {info!r}")
        for dim, value in zip(buffer.shape, info.shape, strict=True):
            if isinstance(dim, Var):
                # The first occurrence decides. The verifier has compared the others with it.
                values.setdefault(dim, value)
    return values


@dataclass(frozen=True, slots=True)
class _FunctionParts:
    """The parts of an unscheduled function, so that several rewrites need not rebuild its buffers each time.

    Attributes:
        shapes: Dims of each parameter, constant and allocation.
        params: The parameters.
        blocks: The blocks, which refer to the buffers with the old shapes.
    """

    shapes: Mapping[Buffer, tuple[Expr, ...]]
    params: tuple[Buffer, ...]
    blocks: tuple[Block, ...]

    @property
    def dims(self) -> tuple[Expr, ...]:
        """Distinct dims of parameters."""
        return tuple(dict.fromkeys(d for b in self.params for d in self.shapes[b]))

    @property
    def symbols(self) -> tuple[Var, ...]:
        return _free([d for shape in self.shapes.values() for d in shape], self.blocks)

    def map_exprs(self, fn: Callable[[Expr], Expr]) -> _FunctionParts:
        shapes = {b: tuple(map(fn, shape)) for b, shape in self.shapes.items()}
        return _FunctionParts(shapes, self.params, tuple(b.map_own_exprs(fn) for b in self.blocks))

    def replaced(self, mapping: Mapping[Expr, Expr]) -> _FunctionParts:
        return self.map_exprs(lambda e: transform(e, mapping.get)) if mapping else self


def outer_symbols(func: PrimFunc) -> tuple[Var, ...]:
    """Return the free variables of `func`, symbols of parameter dims first."""
    dims = [d for b in (*func.buffers, *func.allocs) for d in b.shape]
    return _free([*dims, *func.scalar_params], blocks(func.body))


def _free(first: Sequence[Expr], blocks: Iterable[Block]) -> tuple[Var, ...]:
    """Return the variables of `first`, followed by the free variables of the blocks."""
    symbols = dict.fromkeys(free_vars(*first))
    for block in blocks:
        iterators = {i.var for i in block.iters}
        stores = [block.body] if block.init is None else [block.body, block.init]
        roots = [i.extent for i in block.iters] + [e for s in stores for e in (*s.indices, s.value)]
        symbols.update(dict.fromkeys(v for v in free_vars(*roots) if v not in iterators))
    return tuple(symbols)


def substitute_symbols(func: PrimFunc, mapping: Mapping[Var, Expr]) -> PrimFunc:
    """Replace symbols in every dim, extent, index and value of an unscheduled function, without its scalar parameters."""
    return _build(func, _parts_of(func), mapping, ())


def _parts_of(func: PrimFunc) -> _FunctionParts:
    blocks = plain_blocks(func)
    assert blocks is not None, func.name
    return _FunctionParts({b: b.shape for b in (*func.buffers, *func.allocs)}, func.buffers, blocks)


def _build(func: PrimFunc, parts: _FunctionParts, mapping: Mapping[Var, Expr], scalars: tuple[Var, ...]) -> PrimFunc:
    """Return `func` with other parts and scalar parameters, its symbols replaced."""
    renamed = {b: replace(b, shape=tuple(substitute(d, mapping) for d in s)) for b, s in parts.shapes.items()}

    def leaf(e: Expr) -> Expr | None:
        match e:
            case Load():
                return load(renamed[e.buffer], e.indices) if e.buffer in renamed else None
            case Var():
                return mapping.get(e)
        return None

    def redirected(store: BufferStore) -> BufferStore:
        return replace(store, buffer=renamed.get(store.buffer, store.buffer))

    return with_blocks(
        replace(
            func,
            params=(*(renamed[b] for b in func.buffers), *scalars),
            allocs=tuple(renamed[b] for b in func.allocs),
            consts=tuple(renamed[b] for b in func.consts),
        ),
        [b.map_own_stores(redirected) for b in parts.blocks],
        leaf,
    )


def lift_symbols(func: PrimFunc, env: Env | None = None, derived: bool = False) -> LiftedFunction:
    """Replace the free symbols of an unscheduled function by new symbols (lambda lifting).

    A dim that is a product of symbols becomes one symbol, unless each factor is also a dim (rows of collapsed dims). A symbol that is not
    a dim of a parameter becomes a scalar parameter.

    Args:
        derived: Whether other dims become one symbol too, if their symbols occur nowhere else.
    """
    known = env or Env()
    meaning: dict[Var, Expr] = {}
    # simplified, so that equal dims of shapes, extents and indices are the same node
    parts = _parts_of(func).map_exprs(lambda e: simplify(e, known) if e.dtype.is_int and not _reads(e) else e)
    # Two dims may be equal only by a fact. As two symbols, the function could not know that they are equal.
    parts = parts.replaced(_representatives([d for d in parts.dims if not isinstance(d, (Var, Const))], known))
    dims = parts.dims
    dim_vars = {d for d in dims if isinstance(d, Var)}
    products: dict[Expr, Expr] = {}
    for d in dims:
        if not set(free_vars(d)) <= dim_vars and (
            _factors(d) is not None or (derived and _has_private_symbols(parts, d))
        ):
            var = Var("m" if not products else f"m{len(products)}")
            products[d] = var
            meaning[var] = d
    parts = parts.replaced(products)
    names = {v.name for v in products.values() if isinstance(v, Var)}
    renamed: dict[Var, Expr] = {}
    scalars: list[Var] = []
    readable = {d for d in parts.dims if isinstance(d, Var)}
    for v in parts.symbols:
        fresh = v
        if v not in meaning:
            name = v.name if v.name not in names else f"{v.name}_{len(renamed)}"
            names.add(name)
            fresh = Var(name, v.dtype)
            renamed[v], meaning[fresh] = fresh, v
        # A kernel reads symbols from the dims of its parameters. A symbol that is no whole dim has to be passed.
        if v not in readable:
            scalars.append(fresh)
    return LiftedFunction(_build(func, parts, renamed, tuple(scalars)), meaning)


def _representatives(dims: Sequence[Expr], env: Env) -> dict[Expr, Expr]:
    """Map each dim that provably equals an earlier one to that earlier dim."""
    earlier: dict[Expr, Expr] = {}
    first: list[Expr] = []
    for d in dims:
        same = next((e for e in first if prove_equal(d, e, env) is Proof.YES), None)
        if same is None:
            first.append(d)
        else:
            earlier[d] = same
    return earlier


def _reads(e: Expr) -> bool:
    return bool(e.children) and bool(loads(e))


def _factors(d: Expr) -> tuple[Var, ...] | None:
    """Return the symbols of a product of at least two symbols and any constants; None for another expression."""
    symbols: list[Var] = []
    stack = [d]
    while stack:
        e = stack.pop()
        if e.op == "mul":
            stack.extend(e.args)
        elif isinstance(e, Var):
            symbols.append(e)
        elif not isinstance(e, Const):
            return None
    return tuple(symbols) if len(symbols) > 1 else None


def _has_private_symbols(parts: _FunctionParts, d: Expr) -> bool:
    """Return whether the symbols of `d` occur only as part of `d`."""
    return not set(free_vars(d)) & set(parts.replaced({d: Var("m")}).symbols)
