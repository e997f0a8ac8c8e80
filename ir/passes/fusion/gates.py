"""Fuse the steps of recurrent layers: a product with the state, and what is computed from its columns (`FuseGates`).

Tests: `tests/ir/frontend/onnx/test_recurrent.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.check.aliasing import is_view
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, Load, Var, add, as_int, const, free_vars, load, loads, mul, transform
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, CallTIR, Constant, DataflowBlock, Function, GVar, TupleItem
from relax_tune.ir.core.graph_walk import callees, used_vars
from relax_tune.ir.core.names import fresh
from relax_tune.ir.core.plain_loops import block_loads, plain_blocks
from relax_tune.ir.core.stmt import Block, BufferStore, IterVar
from relax_tune.ir.core.struct_info import TensorInfo, TupleInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.deduce.copies import compares_copies
from relax_tune.ir.deduce.pattern_kinds import PatternKind, block_kind, is_trivial, store_axes
from relax_tune.ir.op.base import env_of
from relax_tune.ir.passes.fusion.fuse_tensor import FusedStages, FusionStage, join_stages, substitution
from relax_tune.ir.passes.fusion.tree_size import tree_size
from relax_tune.ir.rewrite.emitter import FunctionTable, map_graphs, tensor_info

MOST_NODES = 8192
"""Nodes of a group's largest expression, as of `FuseOps.max_nodes`."""
LANES = 8
"""Each gate has a multiple of this many columns; others would need conditions in the innermost loop."""


@dataclass(frozen=True, slots=True)
class FuseGates:
    """Merge a product of a state with a weight and its readers, in the functions that a recursion calls for each step.

    `FuseOps` ends a group at a value whose columns are read separately, as the gates of an LSTM are, and at one with several readers.
    Here, what is computed from one element of all gates is merged with the product, and several values may be results. Elements that
    this selects, such as the row of a step, are read in place.

    Before: `p = matmul(h, R); i = sigmoid(p[:, :n]); g = tanh(p[:, n:]); c2 = i * g; h2 = tanh(c2)`, which returns c2 and h2
    After: `(c2, h2) = call_tir("fused_gates", (h, R))`, in which the product has the dims (gates, rows, n)
    """

    def __call__(self, module: IRModule) -> IRModule:
        env = env_of(module.bounds)
        called = {f.name: callees(f) for f in module.graphs.values()}
        steps = {n for name, names in called.items() if name in names for n in names if n != name}
        return map_graphs(module, lambda f, table: _fuse(f, table, env) if f.name in steps else f)


def _fuse(func: Function, table: FunctionTable, env: Env) -> Function:
    """Return the function with one call for each group."""
    bindings: Sequence[AnyBinding] = func.bindings
    if len(func.blocks) != 1 or not isinstance(func.blocks[0], DataflowBlock):
        return func
    if any(isinstance(b.value, CallTIR) and b.value.inplace for b in bindings):
        return func
    names = {v.name for v in (*func.params, *(b.var for b in bindings))}
    for product in func.bindings:
        group = _group(func, bindings, product, table)
        fused = None if group is None else group.fused(env)
        if group is None or fused is None:
            continue
        infos = tuple(tensor_info(v) for v in group.results)
        call = CallTIR(table.add(fused.lifted.func), fused.args, infos, fused.lifted.scalars)
        merged = [Binding(group.results[0], call)]
        if len(infos) > 1:
            whole = GVar(fresh("gates", names), TupleInfo(infos))
            names.add(whole.name)
            merged = [Binding(whole, call), *(Binding(v, TupleItem(whole, n)) for n, v in enumerate(group.results))]
        bindings = [*group.before, *merged, *group.after]
    return func if bindings is func.bindings else replace(func, blocks=(DataflowBlock(tuple(bindings)),))


@dataclass(frozen=True, slots=True)
class _Group:
    """A product and the calls that are merged with it.

    Attributes:
        stages: The calls, in order.
        product: Variable that the product binds.
        results: Variables that others read.
        width: Columns of a gate.
        before, after: The other bindings of the block: without and with values of the group among what they depend on.
    """

    stages: tuple[FusionStage, ...]
    product: GVar
    results: tuple[GVar, ...]
    width: int
    before: tuple[AnyBinding, ...]
    after: tuple[AnyBinding, ...]

    def fused(self, env: Env) -> FusedStages | None:
        """Return the merged function; None if it would not read the product gate by gate, or has nothing that `FuseOps` leaves."""
        if tree_size(self.stages) > MOST_NODES:
            return None
        joined = join_stages(self.stages, env)
        outputs = [joined.results[v] for v in self.results]
        blocks = _inlined(joined.blocks, outputs, self.width)
        (product,) = (b for b in blocks if b.body.buffer is joined.results[self.product])
        if not _reads_row(joined.blocks) and len(outputs) == 1 and product.body.buffer.shape[-1] is const(self.width):
            return None
        split = _split(blocks, product, self.width)
        return None if split is None else joined.fused("fused_gates", split, outputs, env)


def _group(func: Function, bindings: Sequence[AnyBinding], product: AnyBinding, table: FunctionTable) -> _Group | None:
    """Return the group of a product; None for a binding that is none, or whose readers cannot be merged with it."""
    stages = {b.var: s for b in bindings if (s := _stage(b, table)) is not None}
    if product.var not in stages or not _is_product(stages[product.var]):
        return None
    members, others = {product.var}, set[GVar]()
    for b in bindings:
        reads = set(used_vars(b.value))
        if reads & others or (reads & members and (b.var not in stages or not _is_spatial(stages[b.var]))):
            others.add(b.var)
        elif reads & members:
            members.add(b.var)
    readers: dict[GVar, list[GVar | None]] = {}
    for v, reader in ((v, b.var) for b in bindings for v in used_vars(b.value)):
        readers.setdefault(v, []).append(reader)
    for v in used_vars(func.ret):
        readers.setdefault(v, []).append(None)
    results = [b.var for b in bindings if b.var in members and not members.issuperset(readers.get(b.var, ()))]
    dims = {tensor_info(v).shape for v in results}
    width = as_int((tensor_info(results[0]).shape or (const(0),))[-1]) if len(dims) == 1 else None
    rows = (tensor_info(product.var).shape or ())[:-1]
    if not width or width % LANES or dims != {(*rows, const(width))}:
        return None
    copied = set[GVar]()
    for b in reversed(bindings):
        if b.var in members or b.var in others or members.isdisjoint(readers.get(b.var, ())) or b.var not in stages:
            continue
        only = members.issuperset(readers[b.var]) and copied.isdisjoint(readers[b.var])
        selects = is_trivial(_only_block(stages[b.var]))
        if selects or (only and _is_spatial(stages[b.var]) and _is_small(tensor_info(b.var), next(iter(dims)))):
            members.add(b.var)
            if not only:
                copied.add(b.var)
    return _Group(
        tuple(stages[b.var] for b in bindings if b.var in members),
        product.var,
        tuple(results),
        width,
        tuple(b for b in bindings if b.var not in others and (b.var not in members or b.var in copied)),
        tuple(b for b in bindings if b.var in others),
    )


def _stage(b: AnyBinding, table: FunctionTable) -> FusionStage | None:
    """Return a call of a function of one block, or a view with more or fewer dims of 1, as a stage; None for another binding."""
    value, info = b.value, b.var.info
    if isinstance(value, CallTIR) and len(value.out) == 1:
        func = table.prim(value.callee)
        return FusionStage(b.var, value, func) if len(plain_blocks(func) or ()) == 1 else None
    if not is_view(value) or not isinstance(info, TensorInfo) or info.shape is None or info.dtype is None:
        return None
    (source,) = value.operands
    shape = tensor_info(source).shape
    if shape is None or [d for d in shape if d is not const(1)] != [d for d in info.shape if d is not const(1)]:
        return None
    builder = TensorBuilder("view")
    x, y = builder.input("x", shape, info.dtype), builder.output("y", info.shape, info.dtype)

    def element(*at: Expr) -> Expr:
        axes = iter([v for v, d in zip(at, info.shape or (), strict=True) if d is not const(1)])
        return x[tuple(const(0) if d is const(1) else next(axes) for d in shape)]

    builder.compute(y, element)
    return FusionStage(b.var, CallTIR("view", (source,), (info,), ()), builder.finish())


def _only_block(stage: FusionStage) -> Block:
    (block,) = plain_blocks(stage.func) or ()
    return block


def _is_spatial(stage: FusionStage) -> bool:
    block = _only_block(stage)
    return not block.is_reduction and store_axes(block) is not None and not any(map(loads, _indices(block)))


def _indices(block: Block) -> tuple[Expr, ...]:
    """Return the indices at which a block reads."""
    return tuple(i for x in block_loads(block) for i in x.indices)


def _is_small(info: TensorInfo, dims: tuple[Expr, ...] | None) -> bool:
    """Return whether a value has the dims of a gate, or fewer elements because some of its dims are 1."""
    *_, rows, columns = (const(1), const(1), *(info.shape or ()))
    return (
        dims is not None
        and len(info.shape or ()) <= 2
        and rows in (dims[0], const(1))
        and columns in (dims[1], const(1))
    )


def _is_product(stage: FusionStage) -> bool:
    """Return whether a call multiplies rows of floats by a constant weight."""
    block = _only_block(stage)
    weight = any(isinstance(a, Constant) and len(tensor_info(a).shape or ()) == 2 for a in stage.call.args)
    matrix = len(block.body.indices) == 2 and store_axes(block) == block.body.indices
    return weight and matrix and block.body.buffer.dtype is f32 and block_kind(block) is PatternKind.OUT_FUSIBLE


def _reads_row(blocks: Sequence[Block]) -> bool:
    """Return whether a block only moves elements, and a symbol selects them."""
    return any(is_trivial(b) and not {i.var for i in b.iters}.issuperset(free_vars(*_indices(b))) for b in blocks)


def _inlined(blocks: Sequence[Block], outputs: Sequence[Buffer], width: int) -> list[Block]:
    """Inline spatial blocks into their readers, except results and what several blocks would compute for one element."""
    left = list(blocks)
    for block in reversed(blocks):
        target, axes = block.body.buffer, store_axes(block)
        if block.is_reduction or axes is None or target in outputs:
            continue
        readers = [
            n
            for n, b in enumerate(left)
            if b.body.buffer is not target and any(x.buffer is target for x in block_loads(b))
        ]
        # Values of several gates are read one gate at a time, so that nothing is computed twice.
        wide = target.shape[-1] is not const(width)
        if len(readers) > 1 and not is_trivial(block) and not wide:
            continue
        at = next(n for n, b in enumerate(left) if b.body.buffer is target)
        swap = substitution(target, axes, left[at].body.value)
        if compares_copies(target, [left[n] for n in readers], swap):
            continue
        for n in readers:
            left[n] = left[n].map_own_exprs(swap)
        left.pop(at)
    return left


def _split(blocks: Sequence[Block], product: Block, width: int) -> list[Block] | None:
    """Return the blocks with the product in the dims (gates, rows, width); None if a block does not read it at its own element of gates."""
    old, (row, column) = product.body.buffer, product.body.indices
    gates = (as_int(old.shape[-1]) or 0) // width
    new = replace(old, shape=(const(gates), old.shape[0], const(width)))
    gate, place = Var("vg"), Var("vp")
    if gates * width != as_int(old.shape[-1]):
        return None

    def at_gate(e: Expr) -> Expr | None:
        if isinstance(e, Load) and e.buffer is old:
            return load(new, (gate, row, place))
        return add(mul(gate, width), place) if e is column else None

    def store(s: BufferStore) -> BufferStore:
        return BufferStore(new, (gate, row, place), transform(s.value, at_gate))

    iters = [IterVar(gate, const(gates))]
    iters += [IterVar(place, const(width), i.kind) if i.var is column else i for i in product.iters]
    init = None if product.init is None else store(product.init)
    split = replace(
        product, iters=tuple(iters), bindings=tuple(i.var for i in iters), body=store(product.body), init=init
    )
    result: list[Block] = []
    for b in blocks:
        if b is product:
            result.append(split)
            continue
        axes, known = store_axes(b), dict[Load, Expr]()
        for x in block_loads(b):
            if x.buffer is old:
                if axes is None or b.body.buffer.shape != new.shape[1:] or x.indices[0] is not axes[0]:
                    return None
                number = as_int(simplify(x.indices[1] - axes[1]))
                if number is None or number % width or not 0 <= number < gates * width:
                    return None
                known[x] = load(new, (const(number // width), *axes))
        result.append(b.map_own_exprs(lambda e, known=known: transform(e, known.get)))  # type: ignore[misc]
    return result
