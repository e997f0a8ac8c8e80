"""The NumPy interpreter of tensor functions: the oracle for the meaning of programs.

It runs scheduled functions (blocks with bindings and predicates, every kind of loop in order) and lowered ones (`If`, plain
stores) with the same code. Errors are: reads out of bounds or of unwritten elements, block iterators outside their domain,
and outputs left unwritten. So it also finds wrong schedules whose result happens to be right.

A loop nest whose points write different elements, and read none that another point writes, runs as arrays: all points at
once. Reduction loops
stay sequential, so results are bit for bit equal to running one point at a time. `ir/interp/interp_graph` runs graph functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError, VerifyError
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import TRUE, Expr, Tunable, Var, free_vars, loads
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import (
    Block,
    BufferStore,
    For,
    IfThenElse,
    Seq,
    Stmt,
    blocks,
    lower_block,
    map_blocks,
    stores,
    unknown,
    walk,
)
from relax_tune.ir.interp.empty_reductions import complete_empty_reductions
from relax_tune.ir.interp.interp_expr import Env, Fault, Storage, Tape
from relax_tune.ir.text.printer import excerpt

Array = NDArray[Any]

# Fewer points than this run one by one; a nest with more than this many is entered one outer iteration at a time.
_FEW, _MANY = 16, 1 << 20


def run_prim(
    func: PrimFunc,
    args: Sequence[Array],
    scalars: Sequence[int] = (),
    *,
    tunables: Mapping[Tunable, int] | None = None,
    vectorise: bool = True,
    most_iterations: int | None = None,
) -> None:
    """Run `func` on `args` (its buffers in call order, outputs last, which are overwritten) and its scalar parameters.

    Shape symbols are read off the arguments. `tunables` has the values of a sketch's tunables. `vectorise=False` runs
    one point at a time.

    Args:
        most_iterations: the most iterations of all loops together; None: any number.

    Raises:
        TooManyIterations: the loops have more than `most_iterations`.
        UserError: arguments that do not fit the parameters.
        VerifyError: a program that accesses memory illegally; names the buffer and index and shows the statement.
    """
    env = bind_symbols(func, args, scalars)
    func = replace(func, body=complete_empty_reductions(func.body))
    for tunable, value in (tunables or {}).items():
        env[tunable] = value
    storages: dict[Buffer, Storage] = {}
    outputs: list[tuple[Storage, Array]] = []
    for i, (buffer, arg) in enumerate(zip(func.buffers, args, strict=True)):
        if i < len(func.input_buffers):
            storages[buffer] = Storage(buffer.name, arg.shape, np.ascontiguousarray(arg).reshape(-1), None)
        else:
            storages[buffer] = Storage.poisoned(buffer.name, arg.shape, buffer.dtype)
            outputs.append((storages[buffer], arg))
    try:
        for buffer in func.allocs:
            shape = tuple(int(d) for d in Tape(buffer.shape, {}).run(env))
            if min(shape, default=0) < 0:
                raise Fault(f"buffer {buffer.name} would have the shape {shape}")
            storages[buffer] = Storage.poisoned(buffer.name, shape, buffer.dtype)
        with np.errstate(all="ignore"):
            _Compiler(func, storages, vectorise, _Budget(most_iterations)).stmt(func.body).run(env)
        for storage, _ in outputs:
            if storage.written is not None and not storage.written.all():
                missing = storage.index_of(int(np.argmin(storage.written)))
                raise Fault(f"output {storage.name}{missing} was never written")
    except Fault as fault:
        raise VerifyError(f"{func.name}: {fault}") from None
    for storage, arg in outputs:
        arg[...] = storage.data.reshape(storage.shape)


def bind_symbols(func: PrimFunc, args: Sequence[Array], scalars: Sequence[int] = ()) -> Env:
    """Return the values of the symbols of `func` for these arguments, checked. Raises UserError."""
    buffers, params = func.buffers, func.scalar_params
    if len(args) != len(buffers):
        names = ", ".join(b.name for b in buffers)
        raise UserError(f"{func.name}: expected {len(buffers)} arrays ({names}), got {len(args)}")
    if len(scalars) != len(params):
        names = ", ".join(p.name for p in params) or "none"
        raise UserError(f"{func.name}: expected {len(params)} scalar arguments ({names}), got {len(scalars)}")
    env: Env = {}
    for var, value in zip(params, scalars, strict=True):
        env[var] = int(value) if var.dtype is i64 else var.dtype.numpy.type(value)
    later: list[tuple[Buffer, int, int]] = []
    for b, a in zip(buffers, args, strict=True):
        if not isinstance(a, np.ndarray):
            raise UserError(f"{func.name}: expected an array for {b!r}, got {type(a).__name__}")
        if a.dtype != b.dtype.numpy or a.ndim != len(b.shape):
            raise UserError(
                f"{func.name}: expected {b!r} ({len(b.shape)} dims of {b.dtype.name}), "
                f"got {a.ndim} dims of {a.dtype} (shape {a.shape})"
            )
        for axis, dim in enumerate(b.shape):
            if isinstance(dim, Var) and not isinstance(dim, Tunable):
                if dim not in env:
                    env[dim] = a.shape[axis]
                elif env[dim] != a.shape[axis]:
                    raise _dim_error(func, b, axis, env[dim], a)
            else:
                later.append((b, axis, a.shape[axis]))
    by_buffer = dict(zip(buffers, args, strict=True))
    for b, axis, size in later:
        try:
            (expected,) = Tape((b.shape[axis],), {}).run(env)
        except Fault as fault:
            raise UserError(f"{func.name}: dim {axis} of {b!r}: {fault}; pass it as a scalar parameter") from None
        if expected != size:
            raise _dim_error(func, b, axis, expected, by_buffer[b])
    return env


def _dim_error(func: PrimFunc, b: Buffer, axis: int, expected: int, arg: Array) -> UserError:
    return UserError(
        f"{func.name}: expected {b!r} with dim {axis} ({b.shape[axis]!r}) equal to {expected}, "
        f"got {arg.shape[axis]} (shape {arg.shape})"
    )


class TooManyIterations(UserError):
    """A function has more iterations than the caller allows."""


@dataclass(slots=True)
class _Budget:
    """The iterations that may still run; None without a limit."""

    left: int | None

    def take(self, iterations: int, func: PrimFunc) -> None:
        """Count iterations before they run. Raises TooManyIterations."""
        if self.left is None:
            return
        self.left -= max(iterations, 0)
        if self.left < 0:
            raise TooManyIterations(f"{func.name}: expected fewer iterations of its loops; bound their extents")


# Compiled statements. The same code runs one point (numbers in the environment) or many (arrays in the environment).


@dataclass(slots=True)
class _Store:
    func: PrimFunc
    origin: Stmt
    storage: Storage
    tape: Tape

    def run(self, env: Env) -> None:
        try:
            *indices, value = self.tape.run(env)
            self.storage.write(self.storage.flat(indices, "write"), value)
        except Fault as fault:
            raise _located(self.func, fault, self.origin) from None


@dataclass(slots=True)
class _Domain:
    """Check that block iterators lie in their domain wherever the block's predicate holds."""

    func: PrimFunc
    origin: Block
    tape: Tape

    def run(self, env: Env) -> None:
        try:
            values = self.tape.run(env)
        except Fault as fault:
            raise _located(self.func, fault, self.origin) from None
        for it, value, extent in zip(self.origin.iters, values[::2], values[1::2], strict=True):
            wrong = np.logical_or(np.less(value, 0), np.greater_equal(value, extent))
            if wrong.any():
                at = value if not isinstance(value, np.ndarray) else value[np.argmax(wrong)]
                size = extent if not isinstance(extent, np.ndarray) else extent[np.argmax(wrong)]
                place = f"block {self.origin.name!r} runs with {it.var.name} = {int(at)}"
                expected = f"expected it in 0..{int(size) - 1}; a predicate is missing or a binding is wrong"
                raise _located(self.func, Fault(f"{place}, {expected}"), self.origin)


@dataclass(slots=True)
class _If:
    func: PrimFunc
    origin: Stmt
    tape: Tape
    then: _Code
    orelse: _Code | None

    def run(self, env: Env) -> None:
        try:
            (cond,) = self.tape.run(env)
        except Fault as fault:
            raise _located(self.func, fault, self.origin) from None
        if not isinstance(cond, np.ndarray):
            if cond:
                self.then.run(env)
            elif self.orelse is not None:
                self.orelse.run(env)
            return
        for code, chosen in ((self.then, cond), (self.orelse, ~cond)):
            if code is not None and chosen.all():
                code.run(env)
            elif code is not None and chosen.any():
                code.run({k: v[chosen] if isinstance(v, np.ndarray) else v for k, v in env.items()})


@dataclass(slots=True)
class _Seq:
    stmts: tuple[_Code, ...]

    def run(self, env: Env) -> None:
        for s in self.stmts:
            s.run(env)


@dataclass(slots=True)
class _For:
    func: PrimFunc
    origin: For
    extent: Tape
    body: _Code
    nest: _Nest | None
    budget: _Budget

    def run(self, env: Env) -> None:
        if self.nest is not None and self.nest.run(env):
            return
        try:
            (extent,) = self.extent.run(env)
        except Fault as fault:
            raise _located(self.func, fault, self.origin) from None
        self.budget.take(int(extent), self.func)
        var, body = self.origin.var, self.body
        number = int if var.dtype is i64 else var.dtype.numpy.type
        for i in range(int(extent)):
            env[var] = number(i)
            body.run(env)
        env.pop(var, None)


@dataclass(slots=True)
class _Nest:
    """A perfect loop nest whose points can run as arrays.

    Attributes:
        across: loops that choose the written element.
        along: reduction loops, run in order.
    """

    across: tuple[Var, ...]
    along: tuple[Var, ...]
    extents: Tape
    written: tuple[Tape, ...]
    leaf: _Code
    func: PrimFunc
    budget: _Budget

    def run(self, env: Env) -> bool:
        """Run the whole nest. Return False and run nothing where two points may touch one element."""
        sizes = [int(e) for e in self.extents.run(env)]
        if min(sizes) <= 0:
            return True
        wide = sizes[: len(self.across)]
        points = math.prod(wide)
        # A few points cost less one by one; very many at once would need arrays of their number for every value.
        if points < _FEW or (points > _MANY and len(wide) > 1):
            return False
        self.budget.take(math.prod(sizes), self.func)
        inner = dict(env)
        for var, index in zip(self.across, np.unravel_index(np.arange(points), wide), strict=True):
            inner[var] = np.ascontiguousarray(index, np.int64)
        try:
            # Points that write one element must run in order, so the nest is run as loops instead.
            if not all(_distinct(tape.run(inner), points) for tape in self.written):
                return False
        except Fault:  # an index may be evaluated at points that do not run
            return False
        for step in itertools.product(*map(range, sizes[len(self.across) :])):
            inner.update(zip(self.along, step, strict=True))
            self.leaf.run(inner)
        return True


_Code = Union[_Store, _Domain, _If, _Seq, _For]


def _located(func: PrimFunc, fault: Fault, origin: Stmt) -> VerifyError:
    return VerifyError(f"{func.name}: {fault}\n{excerpt(func, origin)}")


def _distinct(indices: Sequence[Any], points: int) -> bool:
    """Return whether all points have different indices."""
    key: Any = np.zeros(points, np.int64)
    room = 1
    for index in indices:
        if isinstance(index, np.ndarray):
            low = index.min()
            width = int(index.max() - low) + 1
            room *= width
            # Larger keys could overflow int64 and make different indices look equal.
            if room > 1 << 60:
                return False
            key = key * width + (index - low)
    # A table of marks is faster than sorting while it is not much larger than the number of points.
    if room <= 8 * points + 1024:
        written = np.zeros(room, np.bool_)
        written[key] = True
        return int(np.count_nonzero(written)) == points
    return len(np.unique(key)) == points


class _Compiler:
    def __init__(self, func: PrimFunc, storages: Mapping[Buffer, Storage], vectorise: bool, budget: _Budget) -> None:
        self.func = func
        self.storages = storages
        self.vectorise = vectorise
        self.budget = budget

    def tape(self, exprs: Sequence[Expr], origin: Stmt) -> Tape:
        try:
            return Tape(exprs, self.storages)
        except Fault as fault:
            raise _located(self.func, fault, origin) from None

    def stmt(self, s: Stmt, origin: Stmt | None = None) -> _Code:
        origin = origin or s
        inner = None if origin is s else origin
        match s:
            case For(extent=extent, body=body):
                nest = self.nest(s) if self.vectorise else None
                return _For(self.func, s, self.tape((extent,), s), self.stmt(body), nest, self.budget)
            case Seq(parts):
                return _Seq(tuple(self.stmt(c, inner) for c in parts))
            case IfThenElse(cond, then, orelse):
                other = None if orelse is None else self.stmt(orelse, inner)
                return _If(self.func, origin, self.tape((cond,), origin), self.stmt(then, inner), other)
            case BufferStore(buffer, indices, value):
                storage = self.storages.get(buffer)
                if storage is None:
                    raise _located(
                        self.func, Fault(f"buffer {buffer.name} is neither a parameter nor allocated"), origin
                    )
                return _Store(self.func, origin, storage, self.tape((*indices, value), origin))
            case Block():
                return self.block(s)
        raise unknown(s, "the interpreter")

    def block(self, s: Block) -> _Code:
        pairs = [e for it, b in zip(s.iters, s.bindings, strict=True) for e in (b, it.extent)]
        body = _Seq((_Domain(self.func, s, self.tape(pairs, s)), self.stmt(lower_block(replace(s, predicate=TRUE)), s)))
        return body if s.predicate is TRUE else _If(self.func, s, self.tape((s.predicate,), s), body, None)

    def nest(self, outer: For) -> _Nest | None:
        """Vectorise the nest that starts at `outer`; None unless its points are independent."""
        chain: list[For] = []
        leaf: Stmt = outer
        while isinstance(leaf, For):
            chain.append(leaf)
            leaf = leaf.body
        variables = {f.var for f in chain}
        if len(variables) != len(chain) or any(f.var.dtype is not i64 for f in chain):
            return None
        if any(isinstance(s, For) for s in walk(leaf)) or any(
            v in variables for f in chain for v in free_vars(f.extent)
        ):
            return None
        stores, read = _effects(leaf)
        places: dict[Buffer, tuple[Expr, ...]] = {}
        for s in stores:
            # Two stores at different elements, or a load of an element that another point writes, depend on the order
            # of points.
            if places.setdefault(s.buffer, s.indices) != s.indices:
                return None
        if any(places.get(load.buffer, load.indices) != load.indices for load in loads(*read)):
            return None
        # Loops that choose the written element run as arrays; the others, such as reductions, stay in order around
        # them.
        chosen = [variables.intersection(free_vars(*indices)) for indices in places.values()]
        if not chosen or not chosen[0] or any(c != chosen[0] for c in chosen):
            return None
        across = [f for f in chain if f.var in chosen[0]]
        along = [f for f in chain if f.var not in chosen[0]]
        return _Nest(
            tuple(f.var for f in across),
            tuple(f.var for f in along),
            self.tape([f.extent for f in across + along], outer),
            tuple(self.tape(indices, outer) for indices in places.values()),
            self.stmt(leaf),
            self.func,
            self.budget,
        )


def _effects(leaf: Stmt) -> tuple[list[BufferStore], list[Expr]]:
    """Return the stores of loop-free statements and all expressions they evaluate, in terms of the loops around."""
    plain = map_blocks(leaf, lower_block)
    read = [e for s in walk(plain) for e in s.own_exprs]
    domains = [e for b in blocks(leaf) for e in (*b.bindings, *(i.extent for i in b.iters))]
    return list(stores(plain)), read + domains
