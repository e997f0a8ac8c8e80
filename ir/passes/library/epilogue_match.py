"""Match the elementwise work after a matrix product against the epilogue operations of libraries."""

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
"""Epilogue operations on an element y of the product: name -> formula."""

BINARY_EPILOGUE_OPS: Mapping[str, str] = {"add": "add", "bias": "add", "residual": "add", "mul": "mul"}
"""Epilogue operations that read an array: name -> scalar operation."""


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

    names: operations, in order
    arrays: reads of the operations with an array, over the iterators of the product
    rest: block of the work left, on the array and iterators of the product
    """

    names: tuple[str, ...]
    arrays: tuple[Load, ...]
    rest: Block

    @property
    def whole(self) -> bool:
        """True if the rest only stores."""
        return isinstance(self.rest.body.value, Load)


def take_epilogue(
    product: Block,
    after: Sequence[Block],
    known: Callable[[Sequence[str]], Sequence[str]],
    readable: Callable[[str, Load], bool],
    least: int = 1,
) -> Epilogue | None:
    """Match the longest sequence of epilogue operations that the first block after a product begins with.

    known: operations allowed after a sequence of names
    readable: condition on an operation and the array it reads
    least: smallest number of operations

    None: fewer operations match, or the block iterates over other points than the product."""
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
    """Map the iterators of the block after a product to those of the product.

    None: the block does not read each element of the product once."""
    reads = [r for r in block_loads(first) if r.buffer is product.body.buffer]
    if len(reads) != 1 or len(first.iters) != sum(i.kind == "spatial" for i in product.iters):
        return None
    theirs, extents = {i.var: i.extent for i in first.iters}, {i.var: i.extent for i in product.iters}
    found: dict[Var, Expr] = {}
    for mine, other in zip(product.body.indices, reads[0].indices, strict=True):
        if isinstance(mine, Const) and mine is other:
            continue
        if not (isinstance(mine, Var) and isinstance(other, Var) and other in theirs) or other in found:
            return None
        if prove_equal(extents[mine], theirs[other]) is not Proof.YES:
            return None
        found[other] = mine
    return found if len(found) == len(theirs) else None


def _next(
    value: Expr, now: Expr, known: Sequence[str], readable: Callable[[str, Load], bool]
) -> tuple[str, Expr, Load | None] | None:
    """Find an operation on `now` through which every use of `now` in `value` passes.

    Returns its name, its node in `value` and the read of its array."""
    nodes = tuple(postorder((value,)))
    for name in known:
        if name in _FORMS:
            for form in _FORMS[name]:
                made = form(now)
                if made in nodes and _only_through(value, now, made):
                    return name, made, None
            continue
        for node in nodes:
            if not (node.op == BINARY_EPILOGUE_OPS[name] and now in node.args):
                continue
            (other,) = [a for a in node.args if a is not now] or [now]
            if isinstance(other, Load) and readable(name, other) and _only_through(value, now, node):
                return name, node, other
    return None


def _only_through(value: Expr, now: Expr, made: Expr) -> bool:
    taken = load(Buffer("taken", (), f32), ())
    return now not in postorder((transform(value, lambda e: taken if e is made else None),))
