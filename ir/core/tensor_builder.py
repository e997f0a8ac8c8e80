"""A builder of tensor functions: declare buffers, then define each element.

Tests: `tests/ir/interp/test_interp.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from relax_tune.ir.core.buffer import Buffer, Scope
from relax_tune.ir.core.dtype import DType, f32
from relax_tune.ir.core.expr import Expr, ExprLike, Load, Var, add, expr, load
from relax_tune.ir.core.function import Param, PrimFunc
from relax_tune.ir.core.names import fresh
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, Stmt, seq


class Tensor:
    """A buffer that can be indexed to build a load: `A[i, j]`."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def __getitem__(self, indices: ExprLike | tuple[ExprLike, ...]) -> Load:
        return load(self.buffer, indices if isinstance(indices, tuple) else (indices,))


class TensorBuilder:
    """Builds one `PrimFunc`, block by block.

    >>> n = Var("n")
    >>> b = TensorBuilder("double")
    >>> x, y = b.input("x", (n,)), b.output("y", (n,))
    >>> b.compute(y, lambda i: x[i] * 2.0)
    >>> f = b.finish()
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._inputs: list[Buffer] = []
        self._outputs: list[Buffer] = []
        self._scalars: list[Var] = []
        self._allocs: list[Buffer] = []
        self._consts: list[Buffer] = []
        self._stmts: list[Stmt] = []
        self._names: set[str] = set()

    def _unique(self, name: str) -> str:
        self._names.add(unique := fresh(name, self._names))
        return unique

    def _buffer(self, name: str, shape: Sequence[ExprLike], dtype: DType, scope: Scope = "global") -> Buffer:
        return Buffer(self._unique(name), tuple(expr(d) for d in shape), dtype, scope)

    def input(self, name: str, shape: Sequence[ExprLike], dtype: DType = f32, const: bool = False) -> Tensor:
        """Declare an input.

        Args:
            const: it holds the same values at every call.
        """
        buffer = self._buffer(name, shape, dtype)
        self._inputs.append(buffer)
        if const:
            self._consts.append(buffer)
        return Tensor(buffer)

    def output(self, name: str, shape: Sequence[ExprLike], dtype: DType = f32) -> Tensor:
        buffer = self._buffer(name, shape, dtype)
        self._outputs.append(buffer)
        return Tensor(buffer)

    def scalar(self, var: Var) -> Var:
        """Declare an explicit scalar parameter."""
        self._scalars.append(var)
        return var

    def alloc(self, name: str, shape: Sequence[ExprLike], dtype: DType = f32) -> Tensor:
        """Declare an intermediate buffer."""
        buffer = self._buffer(name, shape, dtype)
        self._allocs.append(buffer)
        return Tensor(buffer)

    def compute(self, out: Tensor, value: Callable[..., Expr], name: str | None = None) -> None:
        """Add a spatial block: `out[i...] = value(i...)` for every element."""
        self._block(out, out.buffer.shape, (), name, lambda s, _r: (s, None, value(*s)))

    def compute_window(self, out: Tensor, extents: Sequence[Expr], value: Callable[..., Expr], name: str) -> None:
        """Store `out[i...] = value(i...)` for i below `extents`, which are at most the dims of the tensor."""
        self._block(out, extents, (), name, lambda s, _: (s, None, value(*s)))

    def place(self, out: Tensor, starts: Mapping[int, Expr], x: Tensor, name: str) -> None:
        """Store `out[..., start + i, ...] = x[..., i, ...]` for the starts of some axes."""
        self._block(
            out,
            x.buffer.shape,
            (),
            name,
            lambda s, _: (tuple(add(v, starts[a]) if a in starts else v for a, v in enumerate(s)), None, x[s]),
        )

    def store(
        self,
        out: Tensor,
        extents: Sequence[Expr],
        element: Callable[..., tuple[tuple[Expr, ...], Expr]],
        name: str,
    ) -> None:
        """Store `out[place] = value` for each point below `extents`. element: returns the place and the value of a point"""

        def stored(s: tuple[Var, ...], _: object) -> tuple[tuple[Expr, ...], Expr | None, Expr]:
            place, value = element(*s)
            return place, None, value

        self._block(out, extents, (), name, stored)

    def reduce(
        self,
        out: Tensor,
        extents: Sequence[ExprLike],
        init: Expr | Callable[..., Expr],
        combine: Callable[..., Expr],
        name: str | None = None,
    ) -> None:
        """Add a reduction block: `out[i...] = init`, then `out[i...] = combine(out[i...], i..., r...)` over `extents`.

        Args:
            init: the first value, or a function of i...; without extents the only one that is combined
        """

        def first(*s: Expr) -> Expr:
            return init(*s) if callable(init) else init

        if not extents:
            # A block without reduction iterators is spatial: it reads no element that it stores, and has no initial value.
            self.compute(out, lambda *s: combine(first(*s), *s), name)
            return
        self._block(
            out,
            out.buffer.shape,
            tuple(expr(e) for e in extents),
            name,
            lambda s, r: (s, first(*s), combine(out[s], *s, *r)),
        )

    def _block(
        self,
        out: Tensor,
        spatial: Sequence[Expr],
        reduce: Sequence[Expr],
        name: str | None,
        make: Callable[[tuple[Var, ...], tuple[Var, ...]], tuple[tuple[Expr, ...], Expr | None, Expr]],
    ) -> None:
        block = self._unique(name or f"{out.buffer.name}_block")
        letters = "ijlpqst"
        s = tuple(Var(f"v{letters[a] if a < 7 else f's{a}'}") for a in range(len(spatial)))
        r = tuple(Var(f"vk{a or ''}") for a in range(len(reduce)))
        indices, init, value = make(s, r)
        iters = tuple(IterVar(v, e) for v, e in zip(s, spatial, strict=True))
        iters += tuple(IterVar(v, e, "reduce") for v, e in zip(r, reduce, strict=True))
        loops = [Var(self._unique(f"{block}_{i.var.name[1:]}")) for i in iters]
        body: Stmt = Block(
            block,
            iters,
            tuple(loops),
            BufferStore(out.buffer, indices, value),
            None if init is None else BufferStore(out.buffer, indices, init),
        )
        for var, i in reversed(list(zip(loops, iters, strict=True))):
            body = For(var, i.extent, body)
        self._stmts.append(body)

    def finish(self) -> PrimFunc:
        params: tuple[Param, ...] = (*self._inputs, *self._outputs, *self._scalars)
        return PrimFunc(
            self.name, params, len(self._outputs), seq(*self._stmts), tuple(self._allocs), tuple(self._consts)
        )
