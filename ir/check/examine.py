"""Trial runs of user-written tensor functions, interpreted at a few small sizes before compilation.

A well-formed function may still read past the end of a buffer, or leave part of its output unwritten. Compiled code would not
detect this; the interpreter does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from relax_tune.errors import UserError, VerifyError
from relax_tune.ir.core.expr import Expr, Var, as_int, const, free_vars, substitute
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph import CallTIR, Function
from relax_tune.ir.core.graph_walk import all_uses
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.interp.interp import run_prim

# Values of the first symbol, the second and so on in each trial; distinct values distinguish dims.
# The first and the last trial order every two sizes the other way round, so that an index into the wrong dim leaves
# it in one of them. With dims of 1, neighbours such as i + 1 are outside.
TRIES = ((3, 5, 2, 4), (1, 1, 1, 1), (4, 2, 5, 3))
LARGEST = 4096
"""Largest number of elements of all buffers of a call; functions that need more are not tried."""
MOST_ITERATIONS = 1 << 20
"""The most iterations of a trial; functions with more are not tried. Their loops may have any extents, such as 2**40."""


def examine(module: IRModule, names: Collection[str] | None = None) -> None:
    """Interpret every call of a tensor function at small sizes within the declared bounds.

    Floats are 1, 2, 3 ...; integers are 0, a valid index of every non-empty dim. Sizes that do not fit the signature are skipped, since
    run-time checks refuse them.

    Args:
        names: functions to try; None: all.

    Raises:
        VerifyError: a function accesses memory illegally; names the sizes and the statement.
    """
    bounds = {b.var: (b.lower, b.upper) for b in module.bounds}
    tried: set[tuple[object, ...]] = set()
    for f in module.functions.values():
        if not isinstance(f, Function):
            continue
        for value in all_uses(f):
            if isinstance(value, CallTIR) and (names is None or value.callee in names):
                _call(value, module.prim(value.callee), bounds, tried)


def _call(
    call: CallTIR,
    func: PrimFunc,
    bounds: Mapping[Var, tuple[int, int | None]],
    tried: set[tuple[object, ...]],
) -> None:
    infos = [*(a.info for a in call.args), *call.out]
    if not all(isinstance(i, TensorInfo) and i.shape is not None for i in infos):
        return
    shapes = [i.shape or () for i in infos if isinstance(i, TensorInfo)]
    symbols = free_vars(*(d for s in shapes for d in s), *call.scalars)
    for values in TRIES:
        sizes = {v: _within(values[i % len(values)], *bounds.get(v, (0, None))) for i, v in enumerate(symbols)}
        known: dict[Var, Expr] = {v: const(s) for v, s in sizes.items()}
        dims = [_numbers(s, known) for s in shapes]
        scalars = _numbers(call.scalars, known)
        key = (call.callee, *dims, scalars)
        if key in tried or scalars is None or None in dims:
            continue
        tried.add(key)
        known_dims = [d for d in dims if d is not None]
        if (
            min((x for d in known_dims for x in d), default=0) >= 0
            and sum(int(np.prod(d)) for d in known_dims) <= LARGEST
        ):
            _run(func, known_dims, scalars, {v.name: s for v, s in sizes.items()})


def _within(value: int, lower: int, upper: int | None) -> int:
    return max(lower, value if upper is None else min(value, upper))


def _numbers(dims: Sequence[Expr], known: Mapping[Var, Expr]) -> tuple[int, ...] | None:
    numbers = [as_int(substitute(d, known)) for d in dims]
    return tuple(x for x in numbers if x is not None) if None not in numbers else None


def _run(func: PrimFunc, dims: Sequence[tuple[int, ...]], scalars: Sequence[int], sizes: Mapping[str, int]) -> None:
    args = []
    for buffer, shape in zip(func.buffers, dims, strict=True):
        count = int(np.prod(shape))
        # Zero is valid as an index and as data, so an integer input needs no analysis of what it is used for.
        numbers = np.zeros(count) if not buffer.dtype.is_float else np.arange(1, count + 1)
        args.append(numbers.astype(buffer.dtype.numpy).reshape(shape))
    try:
        run_prim(func, args, scalars, most_iterations=MOST_ITERATIONS)
    except UserError:
        return  # these sizes do not fit, or the loops are too long
    except VerifyError as error:
        at = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        raise VerifyError(f"tried{f' at {at}' if at else ''}: {error}") from None
