"""Match the elementwise operations after a matrix product against the epilogue operations of libraries.

Tests: `tests/ir/passes/library/test_library_lowering.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from relax_tune.ir.arith.prove import Proof, prove_equal
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Const, Expr, Load, Var, add, load, mul, postorder, substitute, transform
from relax_tune.ir.core.plain_loops import block_loads
from relax_tune.ir.core.stmt import Block, BufferStore
from relax_tune.ir.op.math.elementwise import AddScalar, Gelu, MulScalar, Relu, Sigmoid, Tanh

EPILOGUE_OPS: Mapping[str, str] = {
    "add": "y + d, with an array d",
    "bias": "y + d, with an array d over the columns only",
    "residual": "y + d, with an array d of every element",
    "mul": "y * d, with an array d",
    "relu": "max(y, 0)",
    "gelu": "y * (1 + erf(y / sqrt(2))) / 2",
    "gelu_tanh": "y * (1 + tanh(sqrt(2 / pi) * (y + 0.044715 * y ** 3))) / 2",
    "tanh": "tanh(y)",
    "sigmoid": "1 / (1 + exp(-y))",
    "swish": "y / (1 + exp(-y))",
}
"""Formula of each epilogue operation on an element y of the product, by name."""

BINARY_EPILOGUE_OPS: Mapping[str, str] = {"add": "add", "bias": "add", "residual": "add", "mul": "mul"}
"""Scalar operation of each epilogue operation that reads an array, by name."""


def _swish(y: Expr) -> Expr:
    return mul(y, Sigmoid().scalar(y))


def _tanh_of_cube(y: Expr) -> Expr:
    """Return the tanh form of GELU (Hendrycks & Gimpel 2016)."""
    inner = MulScalar(math.sqrt(2 / math.pi)).scalar(add(y, MulScalar(0.044715).scalar(mul(mul(y, y), y))))
    return mul(MulScalar(0.5).scalar(y), AddScalar(1.0).scalar(Tanh().scalar(inner)))


def _sigmoid_of_cube(y: Expr) -> Expr:
    """Return the tanh form of GELU through a sigmoid: tanh(x) = 2 / (1 + exp(-2 x)) - 1."""
    cubic = AddScalar(1.0).scalar(MulScalar(0.044715).scalar(mul(y, y)))
    return mul(y, Sigmoid().scalar(MulScalar(2 * math.sqrt(2 / math.pi)).scalar(mul(y, cubic))))


_FORMS: Mapping[str, Sequence[Callable[[Expr], Expr]]] = {
    "relu": (Relu().scalar,),
    "gelu": (Gelu().scalar,),
    "gelu_tanh": (_tanh_of_cube, _sigmoid_of_cube),
    "tanh": (Tanh().scalar,),
    "sigmoid": (Sigmoid().scalar,),
    "swish": (_swish,),
}


@dataclass(frozen=True, slots=True, eq=False)
class Epilogue:
    """Epilogue operations matched after a product.

    Attributes:
        names: The operations, in order.
        arrays: Reads of the operations with an array, over the iterators of the product.
        rest: Block of the remaining operations, over the array and iterators of the product.
    """

    names: tuple[str, ...]
    arrays: tuple[Load, ...]
    rest: Block

    @property
    def is_complete(self) -> bool:
        """Whether no operation remains, so that `rest` is a copy."""
        return isinstance(self.rest.body.value, Load)


def take_epilogue(
    product: Block,
    after: Sequence[Block],
    known: Callable[[Sequence[str]], Sequence[str]],
    readable: Callable[[str, Load], bool],
    least: int = 1,
) -> Epilogue | None:
    """Match the longest sequence of epilogue operations at the start of the first block after a product.

    Args:
        known: Returns the operations that are possible after a sequence of names.
        readable: Returns whether an operation can read an array.
        least: Smallest number of operations.

    Returns:
        The operations; None if fewer match, or if the block does not iterate over the elements of the product.
    """
    target = product.body.buffer
    if not after or any(r.buffer is target for b in after[1:] for r in block_loads(b)):
        return None
    first = after[0]
    meaning = _same_points(product, first)
    if meaning is None:
        return None
    y = load(target, product.body.indices)
    store = replace(
        first.body,
        indices=tuple(substitute(i, meaning) for i in first.body.indices),
        value=substitute(first.body.value, meaning),
    )
    value = store.value
    now: Expr = y
    names: list[str] = []
    arrays: list[Load] = []

    def fits(operation: str, read: Load) -> bool:
        return read.buffer is not target and readable(operation, read)

    while True:
        step = _next(value, now, known(names), fits)
        if step is None:
            break
        name, now, array = step
        names.append(name)
        arrays += [] if array is None else [array]
    if len(names) < least:
        return None
    left = transform(value, lambda e: y if e is now else None)
    spatial = tuple(i for i in product.iters if i.kind == "spatial")
    rest = Block(
        f"{first.name}_rest", spatial, tuple(i.var for i in spatial), BufferStore(store.buffer, store.indices, left)
    )
    return Epilogue(tuple(names), tuple(arrays), rest)


def _same_points(product: Block, first: Block) -> dict[Var, Expr] | None:
    """Map the iterators of the block after a product to the iterators of the product.

    Return None unless the block reads each element of the product once.
    """
    reads = [r for r in block_loads(first) if r.buffer is product.body.buffer]
    if len(reads) != 1 or len(first.iters) != sum(i.kind == "spatial" for i in product.iters):
        return None
    first_extents, extents = {i.var: i.extent for i in first.iters}, {i.var: i.extent for i in product.iters}
    mapping: dict[Var, Expr] = {}
    for written, read in zip(product.body.indices, reads[0].indices, strict=True):
        if isinstance(written, Const) and written is read:
            continue
        if not (isinstance(written, Var) and isinstance(read, Var) and read in first_extents) or read in mapping:
            return None
        if prove_equal(extents[written], first_extents[read]) is not Proof.YES:
            return None
        mapping[read] = written
    return mapping if len(mapping) == len(first_extents) else None


def _next(
    value: Expr, now: Expr, known: Sequence[str], readable: Callable[[str, Load], bool]
) -> tuple[str, Expr, Load | None] | None:
    """Match an operation on `now` that is the only user of `now` in `value`.

    Returns:
        Its name, its node in `value`, and the read of its array; None without such an operation.
    """
    # Expressions are interned, so the formula applied to `now` is the very node of the value if the value contains it.
    nodes = tuple(postorder((value,)))
    for name in known:
        if name in _FORMS:
            for form in _FORMS[name]:
                node = form(now)
                if node in nodes and _only_through(value, now, node):
                    return name, node, None
            continue
        for node in nodes:
            if not (node.op == BINARY_EPILOGUE_OPS[name] and now in node.args):
                continue
            (other,) = [a for a in node.args if a is not now] or [now]
            if isinstance(other, Load) and readable(name, other) and _only_through(value, now, node):
                return name, node, other
    return None


def _only_through(value: Expr, now: Expr, node: Expr) -> bool:
    """Return whether every use of `now` in `value` is below `node`."""
    placeholder = load(Buffer("placeholder", (), f32), ())
    return now not in postorder((transform(value, lambda e: placeholder if e is node else None),))
