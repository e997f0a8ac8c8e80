"""Static memory planning over symbolic sizes (Relax, arXiv:2311.02103, section 4.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_tune.errors import BuildError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.check.aliasing import AliasSets, AllocatedTensor, allocated_tensors
from relax_tune.ir.core.expr import Expr, mul
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Function, GVar
from relax_tune.ir.core.graph_walk import all_bindings
from relax_tune.ir.core.struct_info import TensorInfo, TupleInfo
from relax_tune.ir.op.base import env_of, product
from relax_tune.ir.passes.memory.buffer_packing import LiveRange, pack
from relax_tune.ir.passes.memory.size_bounds import size_bound


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPlan:
    """Storages of the intermediate tensors of a graph function.

    Parameters, constants and returned values have no storage in the plan. Views, results of branches and in-place outputs have the
    storage of the tensor they alias.

    Attributes:
        storages: Sizes in bytes, over the symbols of the graph.
        assignment: For each variable, the storage of its tensor, or of each field of its tuple; None for a returned field.
        workspaces: For each variable, the storages that its call needs while it runs.
    """

    storages: tuple[Expr, ...]
    assignment: Mapping[GVar, tuple[int | None, ...]]
    workspaces: Mapping[GVar, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Assign storages by live ranges, over symbolic sizes.

    Attributes:
        constant: Replace each size by its greatest value, so that one allocation serves all calls. Symbols without an upper bound
            remain in the sizes.
    """

    constant: bool = False

    def plan(
        self, module: IRModule, name: str = "main", workspaces: Mapping[GVar, Sequence[Expr]] | None = None
    ) -> MemoryPlan:
        """Plan the memory of one graph function.

        Args:
            workspaces: Sizes in bytes of the workspaces that the call of a variable needs while it runs.
        """
        env = env_of(module.bounds)
        assignment: dict[GVar, list[int | None]] = {}
        spaces: dict[GVar, list[int]] = {}
        lives = lifetimes(module, name, workspaces)
        sizes = [life.nbytes for life in lives]
        if self.constant:
            largest = {e: size_bound(e, env) for e in dict.fromkeys(sizes)}
            sizes = [largest[e] for e in sizes]
        storages, slots = pack([LiveRange(x.first, x.last, e) for x, e in zip(lives, sizes, strict=True)], env)
        for life, slot in zip(lives, slots, strict=True):
            if life.index is None:
                spaces.setdefault(life.var, []).append(slot)
                continue
            fields = life.var.info.fields if isinstance(life.var.info, TupleInfo) else (None,)
            assignment.setdefault(life.var, [None] * len(fields))[life.index] = slot
        return MemoryPlan(
            storages, {v: tuple(s) for v, s in assignment.items()}, {v: tuple(s) for v, s in spaces.items()}
        )


@dataclass(frozen=True, slots=True, eq=False)
class Lifetime:
    """A tensor that needs memory, with its live range.

    Attributes:
        var: Variable whose value is the tensor or contains it.
        index: Field of the tuple; 0 for a tensor, None for a workspace of the call that binds `var`.
        nbytes: Bytes, over the symbols of the graph.
        first: Position of the binding that computes it.
        last: Position of its last reader.
    """

    var: GVar
    index: int | None
    nbytes: Expr
    first: int
    last: int


def lifetimes(
    module: IRModule, name: str = "main", workspaces: Mapping[GVar, Sequence[Expr]] | None = None
) -> tuple[Lifetime, ...]:
    """List the tensors that a plan of the graph function `name` must place, in order of allocation.

    Views and returned tensors are left out. The workspaces of a call follow its outputs.

    Raises:
        BuildError: The dims or the dtype of a tensor are unknown.
    """
    func = module.functions[name]
    assert isinstance(func, Function)
    env = env_of(module.bounds)
    aliases = AliasSets()
    last: dict[AllocatedTensor, int] = {}
    allocations: list[tuple[int, GVar, int, TensorInfo]] = []
    for position, b in enumerate(all_bindings(func)):
        var, value = b.var, b.value
        aliases.bind(var, value)
        allocations += [(position, var, i, t) for i, t in allocated_tensors(value, var.info)]
        for read in aliases.read_tensors(value):
            last[read] = position
    returned = aliases.read_tensors(func.ret)
    # returned tensors belong to the caller, and an unread tensor still needs memory while it is written
    placed = [a for a in allocations if (a[1], a[2]) not in returned]
    lives = [Lifetime(v, i, _nbytes(v, t, env), at, last.get((v, i), at)) for at, v, i, t in placed]
    position_of = {b.var: at for at, b in enumerate(all_bindings(func))}
    for v, sizes in (workspaces or {}).items():
        lives += [Lifetime(v, None, simplify(size, env), position_of[v], position_of[v]) for size in sizes]
    return tuple(sorted(lives, key=lambda life: life.first))


def _nbytes(var: GVar, info: TensorInfo, env: Env) -> Expr:
    if info.shape is None or info.dtype is None:
        raise BuildError(f"{var.name}: expected known dims and dtype to plan memory, got {info!r}; add a match_cast")
    return simplify(mul(product(info.shape), info.dtype.bytes), env)


def overlay(groups: Sequence[Sequence[Expr]], env: Env) -> tuple[tuple[Expr, ...], tuple[tuple[int, ...], ...]]:
    """Pack groups of arrays that are in use one group at a time.

    Returns:
        Sizes of the storages, and for each group the storages of its arrays.
    """
    sizes, places = pack([LiveRange(at, at, size) for at, group in enumerate(groups) for size in group], env)
    storages = iter(places)
    return sizes, tuple(tuple(next(storages) for _ in group) for group in groups)
