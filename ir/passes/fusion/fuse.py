"""Group calls of tensor functions for fusion along post-dominators (`FuseOps`, Relax, section 4.2).

The pattern kinds and the post-dominator rule are TVM's (Chen et al., OSDI 2018).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.check.inplace import ordering_constrained
from relax_tune.ir.core.expr import Expr, const, le, postorder
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph import AnyBinding, AnyBlock, Binding, CallTIR, Function, GVar
from relax_tune.ir.core.graph_walk import all_blocks, all_uses, used_vars
from relax_tune.ir.core.plain_loops import block_loads, plain_blocks
from relax_tune.ir.deduce.copies import compares_copies_of, rounds
from relax_tune.ir.deduce.pattern_kinds import (
    Access,
    PatternKind,
    is_movement,
    is_trivial,
    output_access,
    pattern_kind,
    uses_math,
    windowed,
)
from relax_tune.ir.op.base import env_of, product
from relax_tune.ir.passes.fusion.fuse_tensor import FusionStage, fuse_stages
from relax_tune.ir.passes.fusion.tree_size import tree_size
from relax_tune.ir.rewrite.emitter import Emitter, FunctionTable, map_graphs, rewrite_function

NOWHERE = -1
"""Stands for the post-dominator of a value that the function returns, or whose uses never join."""


@dataclass(frozen=True, slots=True)
class FusionNode:
    """One binding of a dataflow block.

    Attributes:
        var: The bound variable.
        call: The `call_tir`, or None for another value.
        kind: Pattern kind of the callee.
        reads: Positions of the bindings that it reads.
    """

    var: GVar
    call: CallTIR | None
    kind: PatternKind
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FuseOps:
    """Replace each group of calls by one call of a merged function.

    * Matmul-like functions and reductions fuse with elementwise epilogues whose index order is the same or permuted.
    * Elementwise, broadcasting and injective functions fuse with each other and with reductions that read them.
    * A producer fuses into a matmul-like function if it only moves values, or reads fewer bytes than it writes (unpacking), so that no
      arithmetic is repeated. If the reader is a convolution, which reads elements several times, producers may not unpack.
    * Spatial functions fuse into a concatenation of values computed in the same block, except resampling, for which one kernel was slower
      than two.
    * A function of several contractions (attention) fuses with such producers, and with a cast or permutation of its result.

    Groups end at views, values with readers outside of the group, opaque functions, and comparisons of copies of a rounded value.

    Attributes:
        max_stages: Largest number of calls in a group.
        through_columns: Whether a producer of a matmul-like function may also select elements, at indices that do not depend on data.
        max_nodes: Largest expression of a group, in nodes of its text.
    """

    max_stages: int = 16
    through_columns: bool = False
    max_nodes: int = 8192

    def __call__(self, module: IRModule) -> IRModule:
        env = env_of(module.bounds)
        kinds: dict[str, PatternKind] = {}
        return map_graphs(module, lambda f, table: self._function(f, table, env, kinds))

    def groups(self, module: IRModule, name: str = "main") -> tuple[tuple[GVar, ...], ...]:
        """Return the groups of two or more calls in the graph function `name`."""
        func = module.functions[name]
        assert isinstance(func, Function)
        fusible = self._fusible(func, FunctionTable.of(module.functions), {})
        return tuple(tuple(node.var for node in group) for group in fusible)

    def _function(self, func: Function, table: FunctionTable, env: Env, kinds: dict[str, PatternKind]) -> Function:
        stages_of: dict[GVar, tuple[FusionStage, ...]] = {}  # by the variable that the last call of a group binds
        inner: set[GVar] = set()
        for group in self._fusible(func, table, kinds):
            stages = tuple(_stage(node, table) for node in group)
            stages_of[stages[-1].out] = stages
            inner.update(s.out for s in stages[:-1])
        if not stages_of:
            return func

        def visit(out: Emitter, binding: AnyBinding) -> None:
            if binding.var in inner:
                return
            stages = stages_of.get(binding.var)
            if stages is None:
                out.keep(binding)
                return
            name = "fused_" + "_".join(s.func.name for s in stages)
            fused = fuse_stages(name, stages, out.env)
            callee = table.add(fused.lifted.func)
            call = CallTIR(callee, tuple(map(out.value, fused.args)), stages[-1].call.out, fused.lifted.scalars)
            out.bindings.append(Binding(binding.var, call))

        return rewrite_function(func, visit, env)

    def _fusible(
        self, func: Function, table: FunctionTable, kinds: dict[str, PatternKind]
    ) -> Iterator[list[FusionNode]]:
        """Yield the groups of two or more calls in all blocks of a function."""
        # A merged function runs where its last call stood. Calls around in-place outputs must keep their place, so
        # they count as opaque.
        uses, fixed = Counter(v for value in all_uses(func) for v in used_vars(value)), ordering_constrained(func)
        for block in all_blocks(func):
            nodes = _nodes(block, table, kinds, fixed)
            yield from ([nodes[i] for i in g] for g in self._groups(nodes, uses, table) if len(g) > 1)

    def _groups(self, nodes: Sequence[FusionNode], uses: Mapping[GVar, int], table: FunctionTable) -> list[list[int]]:
        """Return the positions of each group, in order.

        Args:
            uses: Number of reads of each variable in the whole function.
        """
        readers: list[list[int]] = [[] for _ in nodes]
        for i, node in enumerate(nodes):
            for r in node.reads:
                readers[r].append(i)
        # A value with readers in another block, or that the function returns, must exist in memory: it ends a group.
        escaping = {n.var for n, block_readers in zip(nodes, readers) if uses.get(n.var, 0) > len(block_readers)}
        dominators = _post_dominators(nodes, readers, escaping)
        groups = _Groups(nodes)
        unpacked = {p for p, rs in enumerate(readers) if _unpacks_for_contractions(nodes, p, rs, table)}
        # In this order, as in TVM: what follows a contraction or reduction joins it, and producers then see these
        # groups as their readers.
        for rule in (self._epilogue, self._producer):
            for i in range(len(nodes)):
                sink = groups.sink(i)
                if sink != i or dominators[i] == NOWHERE:
                    continue
                if dominators[i] in unpacked and not self._all_cheap(groups, nodes, i, table):
                    continue
                # all nodes on paths to the post-dominator join, else the group would depend on a node that depends on the group
                path = _between(i, dominators[i], readers)
                if rule(groups, nodes, i, dominators[i], path, table):
                    members = groups.union((i, *path))
                    if len(members) <= self.max_stages and self._is_short(nodes, members, table):
                        groups.merge(members)
        return groups.lists()

    def _is_short(self, nodes: Sequence[FusionNode], members: Sequence[int], table: FunctionTable) -> bool:
        return tree_size([_stage(nodes[m], table) for m in members]) <= self.max_nodes

    def _all_cheap(self, groups: _Groups, nodes: Sequence[FusionNode], i: int, table: FunctionTable) -> bool:
        """Return whether a contraction may compute the group of `i` whenever it reads its result.

        Each function of the group must permute or unpack, or, with `through_columns`, select single elements.
        """

        def is_cheap(node: FusionNode) -> bool:
            selects = self.through_columns and _selects(node, table)
            return selects or _permutes(node, table) or _unpacks(node, table)

        return groups.kind(i) <= PatternKind.INJECTIVE and all(is_cheap(nodes[m]) for m in groups.members(i))

    @staticmethod
    def _epilogue(
        groups: _Groups, nodes: Sequence[FusionNode], i: int, end: int, path: Sequence[int], table: FunctionTable
    ) -> bool:
        """Return whether a contraction or reduction may fuse with the elementwise functions that read its result."""
        # Attention rules write their result tile by tile and know these two epilogues only.
        if groups.kind(i) is PatternKind.CHAIN:
            permutes = nodes[end].kind is PatternKind.INJECTIVE and _permutes(nodes[end], table)
            return len(path) == 1 and (permutes or _casts(nodes[end], table))
        if groups.kind(i) not in (PatternKind.OUT_FUSIBLE, PatternKind.REDUCTION):
            return False
        tile = {Access.IDENTITY, Access.PERMUTATION}
        if groups.kind(i) is PatternKind.REDUCTION:
            tile.discard(Access.PERMUTATION)
        for p in path:
            call, inside = nodes[p].call, {i, *path}
            if call is None or groups.kind(p) > PatternKind.INJECTIVE:
                return False
            if nodes[p].kind is PatternKind.INJECTIVE and not _permutes(nodes[p], table):
                return False
            for position, arg in enumerate(call.args):
                from_group = any(nodes[q].var is arg for q in inside if q < p)
                if from_group and output_access(_prim(nodes[p], table), position) not in tile:
                    return False
        return len(path) == 1 or not any(_permutes(nodes[p], table) for p in path)

    def _producer(
        self, groups: _Groups, nodes: Sequence[FusionNode], i: int, end: int, path: Sequence[int], table: FunctionTable
    ) -> bool:
        """Return whether spatial functions may fuse into their readers."""
        if groups.kind(i) > PatternKind.INJECTIVE:
            return False
        if any(nodes[p].kind > PatternKind.INJECTIVE for p in path[:-1]):
            return False
        if any(groups.kind(p) > PatternKind.INJECTIVE for p in path[:-1]):
            return False
        kind = nodes[end].kind
        # Each part of a concatenation is copied by a separate loop nest, so a producer in it is computed once per
        # element.
        if len(path) == 1 and _concatenates(nodes[end], table):
            return not any(_divides(nodes[m], table) for m in groups.members(i))
        if kind in (PatternKind.OUT_FUSIBLE, PatternKind.CHAIN):
            if len(path) != 1 or not self._all_cheap(groups, nodes, i, table):
                return False
            return not _in_windows(nodes[i], nodes[end], table) or not any(
                _unpacks(nodes[m], table) for m in groups.members(i)
            )
        if kind > PatternKind.REDUCTION or _compared_copies(nodes, groups.union((i, *path)), table):
            return False
        if kind is PatternKind.REDUCTION:
            return True
        # The reader may be the epilogue of a contraction already. Then only producers that it reads once per element may join.
        return groups.kind(end) <= PatternKind.INJECTIVE or groups.kind(i) <= PatternKind.BROADCAST


class _Groups:
    """A partition of the nodes. The sink of a group is its last node."""

    def __init__(self, nodes: Sequence[FusionNode]) -> None:
        self._nodes = nodes
        self._of = list(range(len(nodes)))
        self._members: dict[int, list[int]] = {i: [i] for i in range(len(nodes))}

    def members(self, i: int) -> list[int]:
        return self._members[self._of[i]]

    def sink(self, i: int) -> int:
        return self.members(i)[-1]

    def kind(self, i: int) -> PatternKind:
        return max(self._nodes[m].kind for m in self.members(i))

    def union(self, parts: Iterable[int]) -> list[int]:
        return sorted({m for p in parts for m in self.members(p)})

    def merge(self, members: Sequence[int]) -> None:
        for old in {self._of[m] for m in members}:
            del self._members[old]
        for m in members:
            self._of[m] = members[-1]
        self._members[members[-1]] = list(members)

    def lists(self) -> list[list[int]]:
        return sorted(self._members.values(), key=lambda g: g[-1])


def _nodes(
    block: AnyBlock, table: FunctionTable, kinds: dict[str, PatternKind], fixed: frozenset[GVar]
) -> list[FusionNode]:
    at: dict[GVar, int] = {}
    nodes: list[FusionNode] = []
    for i, b in enumerate(block.bindings):
        call = b.value if isinstance(b, Binding) and isinstance(b.value, CallTIR) else None
        kind = PatternKind.OPAQUE
        if call is not None:
            callee = table.functions[call.callee]
            assert isinstance(callee, PrimFunc)
            if callee.outputs == 1 and b.var not in fixed:
                if call.callee not in kinds:
                    # Remembered by name: layers call the same function many times, and proofs about its dims are the
                    # costly part.
                    kinds[call.callee] = pattern_kind(callee)
                kind = kinds[call.callee]
        nodes.append(FusionNode(b.var, call, kind, tuple(at[v] for v in used_vars(b.value) if v in at)))
        at[b.var] = i
    return nodes


def _prim(node: FusionNode, table: FunctionTable) -> PrimFunc:
    assert node.call is not None
    func = table.functions[node.call.callee]
    assert isinstance(func, PrimFunc)
    return func


def _stage(node: FusionNode, table: FunctionTable) -> FusionStage:
    assert node.call is not None
    return FusionStage(node.var, node.call, _prim(node, table))


def _permutes(node: FusionNode, table: FunctionTable) -> bool:
    """Return whether the function only permutes one tensor."""
    func = _prim(node, table)
    blocks = plain_blocks(func)
    return (
        blocks is not None
        and len(blocks) == 1
        and is_movement(blocks[0])
        and len(func.input_buffers) == 1
        and output_access(func, 0) is Access.PERMUTATION
    )


def _casts(node: FusionNode, table: FunctionTable) -> bool:
    """Return whether the function only casts every element."""
    blocks = plain_blocks(_prim(node, table)) if node.kind is PatternKind.ELEMENTWISE else None
    return blocks is not None and len(blocks) == 1 and is_trivial(blocks[0])


def _concatenates(node: FusionNode, table: FunctionTable) -> bool:
    """Return whether the function only concatenates values computed in this block, each copied by a separate loop nest.

    A concatenation with a parameter does not count: it may be computed in the memory of the parameter, without the copy.
    """
    if node.call is None or len(node.reads) < 2 or len(node.reads) != len(node.call.args):
        return False
    func = _prim(node, table)
    blocks = plain_blocks(func) if func.outputs == 1 else None
    return blocks is not None and len(blocks) == len(node.reads) and all(map(is_trivial, blocks))


def _divides(node: FusionNode, table: FunctionTable) -> bool:
    """Return whether an index is a quotient or remainder, as in resampling."""
    loads = [r for b in plain_blocks(_prim(node, table)) or () for r in block_loads(b)]
    return any(e.op in ("floordiv", "floormod") for e in postorder(i for r in loads for i in r.indices))


def _selects(node: FusionNode, table: FunctionTable) -> bool:
    """Return whether every element of the result is one element of one input."""
    func = _prim(node, table)
    blocks = plain_blocks(func)
    if blocks is None or len(blocks) != 1 or not is_movement(blocks[0]) or len(func.input_buffers) != 1:
        return False
    return len(block_loads(blocks[0])) == 1


def _unpacks_for_contractions(
    nodes: Sequence[FusionNode], p: int, readers: Sequence[int], table: FunctionTable
) -> bool:
    """Return whether `p` unpacks and only contractions read it; it fuses into them, so that they unpack while reading."""
    only_contractions = readers and all(nodes[r].kind is PatternKind.OUT_FUSIBLE for r in readers)
    return bool(only_contractions) and nodes[p].kind is PatternKind.ELEMENTWISE and _unpacks(nodes[p], table)


def _unpacks(node: FusionNode, table: FunctionTable) -> bool:
    """Return whether the function reads fewer bytes than it writes, and computes no transcendental functions."""
    func = _prim(node, table)
    blocks = plain_blocks(func)
    if blocks is None or len(blocks) != 1 or uses_math(func):
        return False
    output = func.output_buffers[0]
    # An input of lower rank is broadcast and adds few bytes.
    read = dict.fromkeys(r.buffer for r in block_loads(blocks[0]) if len(r.buffer.shape) >= len(output.shape))
    if not read:
        return False
    # all inputs count: an element of a smaller buffer, such as the scale of a group, serves several elements of the result
    total: Expr = const(0)
    for b in read:
        total = total + product(b.shape) * b.dtype.bytes
    written = product(output.shape) * output.dtype.bytes
    # Element sizes decide without a proof; otherwise the bytes must be at most three quarters at every shape.
    fewer = sum(b.dtype.bytes for b in read) < output.dtype.bytes
    return fewer or prove(le(total * 4, written * 3), Env({v: (0, None) for v in func.symbols})) is Proof.YES


def _in_windows(node: FusionNode, reader: FusionNode, table: FunctionTable) -> bool:
    """Return whether a sum of products reads the value of `node` through sliding windows, where unpacking would be repeated."""
    call, func = reader.call, _prim(reader, table)
    assert call is not None
    in_windows = {b for block in plain_blocks(func) or () for b in windowed(block)}
    return any(arg is node.var and b in in_windows for arg, b in zip(call.args, func.input_buffers))


def _compared_copies(nodes: Sequence[FusionNode], members: Sequence[int], table: FunctionTable) -> bool:
    """Return whether a member would compare differently rounded copies of one value (`ir/deduce/copies`)."""
    computed: set[GVar] = set()
    for m in members:
        call, func = nodes[m].call, _prim(nodes[m], table)
        assert call is not None
        inputs = [b for a, b in zip(call.args, func.input_buffers, strict=True) if a in computed]
        if any(compares_copies_of(func, b) for b in inputs):
            return True
        # The result is rounded if this function rounds, or passes on what an earlier member has rounded.
        if inputs or any(map(rounds, plain_blocks(func) or ())):
            computed.add(nodes[m].var)
    return False


def _between(start: int, end: int, readers: Sequence[Sequence[int]]) -> list[int]:
    """Return the nodes on paths from `start` to its post-dominator `end`, which is last; `start` is excluded."""
    visited: set[int] = set()
    stack = list(readers[start])
    while stack:
        n = stack.pop()
        if n in visited:
            continue
        visited.add(n)
        if n != end:
            stack.extend(readers[n])
    return sorted(visited)


def _post_dominators(
    nodes: Sequence[FusionNode], readers: Sequence[Sequence[int]], escaping: Iterable[GVar]
) -> list[int]:
    """Return the immediate post-dominator of each node, or NOWHERE."""
    escaped = set(escaping)
    immediate = [NOWHERE] * len(nodes)
    depth = [0] * len(nodes)
    # bindings are in topological order, so in reverse order the post-dominators of all readers are known
    for i in range(len(nodes) - 1, -1, -1):
        if nodes[i].var in escaped or not readers[i]:
            continue
        # The nearest common ancestor of all readers in the tree of post-dominators.
        meet = readers[i][0]
        for other in readers[i][1:]:
            while meet != other and NOWHERE not in (meet, other):
                if depth[meet] > depth[other]:
                    meet = immediate[meet]
                else:
                    other = immediate[other]
            if NOWHERE in (meet, other):
                meet = NOWHERE
                break
        immediate[i] = meet
        depth[i] = 0 if meet == NOWHERE else depth[meet] + 1
    return immediate
