"""Collapse neighbouring dims that every index traverses in order into one dim.

Tests: `tests/ir/passes/test_graph_passes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Const, Expr, Load, Var, const, free_vars, load, mul, transform
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph import AnyBinding, Binding, Call, CallTIR, Function
from relax_tune.ir.core.plain_loops import all_loads, plain_blocks, with_blocks
from relax_tune.ir.core.stmt import Block, BufferStore, IterVar
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.op.base import env_of
from relax_tune.ir.op.indexing.movement import Reshape
from relax_tune.ir.passes.fusion.symbol_interface import LiftedFunction, bind_symbols, lift_symbols
from relax_tune.ir.rewrite.emitter import Emitter, FunctionTable, map_graphs, rewrite_function, tensor_info

Groups = tuple[tuple[int, ...], ...]
"""The dims of a buffer, in order; each group becomes one dim."""


@dataclass(frozen=True, slots=True)
class Collapsed:
    """A function over merged dims.

    Attributes:
        lifted: The function, with the values of its symbols over the original ones.
        groups: Merged dims of each parameter.
    """

    lifted: LiftedFunction
    groups: tuple[Groups, ...]


@dataclass(frozen=True, slots=True)
class CollapseDims:
    """Replace functions over (b, n, k) that traverse b and n together by functions over (b*n, k), called through views.

    Two neighbouring dims merge if every block traverses them by two neighbouring iterators of one kind that it uses for nothing else. A
    constant last dim (other than 1) is not merged, so that its size remains a constant.
    """

    def __call__(self, module: IRModule) -> IRModule:
        env = env_of(module.bounds)
        done: dict[str, Collapsed | None] = {}

        def function(f: Function, table: FunctionTable) -> Function:
            def visit(out: Emitter, binding: AnyBinding) -> None:
                call = binding.value
                func = table.functions.get(call.callee) if isinstance(call, CallTIR) else None
                if not isinstance(call, CallTIR) or not isinstance(func, PrimFunc):
                    out.keep(binding)
                    return
                if call.callee not in done:
                    done[call.callee] = collapse(func)
                collapsed = done[call.callee]
                # Several outputs would each need a view, bound to fields of a tuple.
                if collapsed is None or len(call.out) != 1:
                    out.keep(binding)
                    return
                symbols = bind_symbols(func, [tensor_info(a) for a in call.args], call.out, call.scalars)
                args = []
                for arg, groups in zip(call.args, collapsed.groups, strict=False):
                    value = out.value(arg)
                    info = tensor_info(value)
                    merged = tuple(simplify(d, env) for d in merge_dims(info.shape or (), groups))
                    args.append(out.view(value, TensorInfo(merged, info.dtype), "rows"))
                old = call.out[0]
                shape = tuple(simplify(d, env) for d in merge_dims(old.shape or (), collapsed.groups[-1]))
                new = TensorInfo(shape, old.dtype)
                scalars = tuple(
                    simplify(transform(e, lambda x: symbols.get(x) if isinstance(x, Var) else None), env)
                    for e in collapsed.lifted.scalars
                )
                callee = table.add(collapsed.lifted.func)
                result = CallTIR(callee, tuple(args), (new,), scalars, call.inplace)
                if shape == old.shape:
                    out.bindings.append(Binding(binding.var, result))
                    return
                var = out.bind(result, new, f"{binding.var.name}_rows")
                # bound to the original variable, since results are identified by name
                out.bindings.append(Binding(binding.var, Call(Reshape(old.shape or ()), (var,))))

            return rewrite_function(f, visit)

        return map_graphs(module, function)


def merge_dims(shape: Sequence[Expr], groups: Groups) -> tuple[Expr, ...]:
    """Return the product of each group's dims."""
    merged: list[Expr] = []
    for group in groups:
        size = shape[group[0]]
        for p in group[1:]:
            size = mul(size, shape[p])
        merged.append(size)
    return tuple(merged)


Seam = tuple[Buffer, int]
"""The border between dims `p` and `p + 1` of a buffer."""
Pair = tuple[Block, Var, Var]


def collapse(func: PrimFunc) -> Collapsed | None:
    """Return `func` over merged dims; None if no dims merge."""
    blocks = plain_blocks(func)
    if blocks is None:
        return None
    seams = _open_seams(func, blocks)
    if not seams:
        return None
    groups = {b: _groups(b, seams) for b in (*func.buffers, *func.allocs)}
    buffers = {b: replace(b, shape=tuple(simplify(d) for d in merge_dims(b.shape, groups[b]))) for b in groups}
    merged = replace(
        func,
        params=(*(buffers[b] for b in func.buffers), *func.scalar_params),
        allocs=tuple(buffers[b] for b in func.allocs),
        consts=tuple(buffers[b] for b in func.consts),
    )
    new = [_merge_block(b, _pairs(b, seams), buffers, groups) for b in blocks]
    return Collapsed(lift_symbols(with_blocks(merged, new), derived=True), tuple(groups[b] for b in func.buffers))


def _groups(buffer: Buffer, seams: set[Seam]) -> Groups:
    groups: list[list[int]] = []
    for p in range(len(buffer.shape)):
        if p and (buffer, p - 1) in seams:
            groups[-1].append(p)
        else:
            groups.append([p])
    return tuple(map(tuple, groups))


def _accesses(block: Block) -> list[tuple[Buffer, tuple[Expr, ...]]]:
    stores = [block.body] if block.init is None else [block.body, block.init]
    writes = [(s.buffer, s.indices) for s in stores]
    return writes + [(r.buffer, r.indices) for r in all_loads(e for s in stores for e in (s.value, *s.indices))]


def _pairs(block: Block, seams: set[Seam]) -> dict[Var, Var]:
    """Return the iterators that merge with the next one."""
    following: dict[Var, Var] = {}
    for buffer, indices in _accesses(block):
        for p in range(len(indices) - 1):
            left, right = indices[p], indices[p + 1]
            if (buffer, p) in seams and isinstance(left, Var) and isinstance(right, Var):
                following[left] = right
    return following


def _open_seams(func: PrimFunc, blocks: Sequence[Block]) -> set[Seam]:
    """Return the seams at which dims can merge.

    It is the largest set such that only mergeable pairs of iterators index across each seam, and each pair merges at all seams where it
    occurs.
    """
    crossings: dict[Seam, list[Pair | None]] = {
        (b, p): [None] if _keeps_last(b, p) else []
        for b in (*func.buffers, *func.allocs)
        for p in range(len(b.shape) - 1)
    }
    places: dict[Pair, list[Seam]] = {}
    broken: set[Pair] = set()
    for block in blocks:
        extents = {i.var: i for i in block.iters}
        position = {i.var: p for p, i in enumerate(block.iters)}
        single = _used_outside_indices(block)
        accesses = _accesses(block)
        for buffer, indices in accesses:
            for p in range(len(indices) - 1):
                left, right = indices[p], indices[p + 1]
                pair: Pair | None = None
                if (
                    isinstance(left, Var)
                    and isinstance(right, Var)
                    and left in extents
                    and right in extents
                    # Neighbours in the nest, too: merging moves the inner loop out to the place of the outer one,
                    # which must not change the order of the others.
                    and position[right] == position[left] + 1
                    and extents[left].kind == extents[right].kind
                    # The iterators must traverse the dims whole, or the merged iterator would leave gaps.
                    and extents[left].extent is buffer.shape[p]
                    and extents[right].extent is buffer.shape[p + 1]
                ):
                    pair = (block, left, right)
                    places.setdefault(pair, []).append((buffer, p))
                crossings[buffer, p].append(pair)
        for block_pair in [q for q in places if q[0] is block]:
            _, left, right = block_pair
            for buffer, indices in accesses:
                adjacent = [
                    p
                    for p in range(len(indices) - 1)
                    if (buffer, p) in places[block_pair] and indices[p : p + 2] == (left, right)
                ]
                mentions = sum(v in (left, right) for i in indices for v in _mentions(i))
                # A single occurrence (a bias that is indexed by n only) needs the separate value of the iterator,
                # which the merged one could give only by a division.
                if mentions != 2 * len(adjacent):
                    broken.add(block_pair)
            if left in single or right in single:
                broken.add(block_pair)
    return _stable_seams(crossings, places, broken)


def _stable_seams(
    crossings: Mapping[Seam, Sequence[Pair | None]], places: Mapping[Pair, Sequence[Seam]], broken: set[Pair]
) -> set[Seam]:
    """Return the seams that stay open.

    Closing a seam breaks the pairs of iterators across it, which closes the other seams where these occur.

    Args:
        crossings: What indexes across each seam; None if it is no mergeable pair.
        places: The seams where each pair occurs.
        broken: Pairs that cannot merge; pairs across closed seams are added.
    """
    # From the largest set downwards: a fixpoint that starts empty could not open seams that depend on each other.
    open_seams = set(crossings)
    changed = True
    while changed:
        changed = False
        for seam in list(open_seams):
            if not crossings[seam] or any(q is None or q in broken for q in crossings[seam]):
                open_seams.discard(seam)
                changed = True
        for pair, where in places.items():
            if pair not in broken and any(s not in open_seams for s in where):
                broken.add(pair)
                changed = True
    return open_seams


def _keeps_last(buffer: Buffer, p: int) -> bool:
    # Rules choose vector widths that divide a constant last dim. Merged with a symbolic dim, it would become
    # symbolic.
    return p + 2 == len(buffer.shape) and isinstance(buffer.shape[-1], Const) and buffer.shape[-1] is not const(1)


def _mentions(index: Expr) -> tuple[Var, ...]:
    """Return the variables of one index, without reads inside it, which are separate accesses."""
    return tuple(_outside_reads((index,)))


def _used_outside_indices(block: Block) -> set[Var]:
    """Return the iterators that are used other than in indices: in the stored value, or in the extent of another iterator."""
    stores = [block.body] if block.init is None else [block.body, block.init]
    return _outside_reads([s.value for s in stores]) | set(free_vars(*(i.extent for i in block.iters)))


def _outside_reads(exprs: Sequence[Expr]) -> set[Var]:
    """Return the variables of expressions outside of reads."""
    variables: set[Var] = set()
    stack, visited = list(exprs), set[Expr]()
    while stack:
        e = stack.pop()
        if e in visited or isinstance(e, Load):
            continue
        visited.add(e)
        if isinstance(e, Var):
            variables.add(e)
        stack.extend(e.children)
    return variables


def _merge_block(
    block: Block, pairs: Mapping[Var, Var], buffers: Mapping[Buffer, Buffer], groups: Mapping[Buffer, Groups]
) -> Block:
    dropped = set(pairs.values())
    iters: list[IterVar] = []
    for i in block.iters:
        if i.var in dropped:
            continue
        size, var = i.extent, i.var
        while var in pairs:
            var = pairs[var]
            size = mul(size, next(o.extent for o in block.iters if o.var is var))
        iters.append(replace(i, extent=simplify(size)))

    def indices(buffer: Buffer, old: Sequence[Expr]) -> tuple[Expr, ...]:
        return tuple(old[g[0]] for g in groups[buffer])

    def swap(e: Expr) -> Expr:
        return transform(
            e,
            lambda x: (
                load(buffers[x.buffer], indices(x.buffer, x.indices))
                if isinstance(x, Load) and x.buffer in buffers
                else None
            ),
        )

    def store(s: BufferStore) -> BufferStore:
        where = indices(s.buffer, s.indices)
        return BufferStore(buffers[s.buffer], tuple(map(swap, where)), swap(s.value))

    return replace(
        block, iters=tuple(iters), body=store(block.body), init=None if block.init is None else store(block.init)
    )
