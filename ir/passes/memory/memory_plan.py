"""Static memory planning over symbolic sizes (paper section 4.3)."""

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

    storages: sizes in bytes, over the symbols of the graph
    assignment: variable -> storage of each tensor it holds, one per field of a tuple; None for a returned field
    workspaces: variable -> storages that its call needs while it runs

    Parameters, constants and returned values have no storage of the plan. Views, results of branches and in-place outputs
    have the storage of the tensor they alias.
    """

    storages: tuple[Expr, ...]
    assignment: Mapping[GVar, tuple[int | None, ...]]
    workspaces: Mapping[GVar, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Assign storages by live ranges, over symbolic sizes.

    constant: replace each size by its greatest value, so that one allocation serves all calls; a size over a symbol without an
        upper bound stays symbolic in that symbol
    """

    constant: bool = False

    def plan(
        self, module: IRModule, name: str = "main", workspaces: Mapping[GVar, Sequence[Expr]] | None = None
    ) -> MemoryPlan:
        """Plan the memory of one graph function.

        workspaces: bytes that the call of a variable needs while it runs."""
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

    var: variable that holds it
    index: number of its field; None for a workspace of the call that binds `var`
    nbytes: bytes, over the symbols of the graph
    first: position of the binding that makes it
    last: position of its last reader
    """

    var: GVar
    index: int | None
    nbytes: Expr
    first: int
    last: int


def lifetimes(
    module: IRModule, name: str = "main", workspaces: Mapping[GVar, Sequence[Expr]] | None = None
) -> tuple[Lifetime, ...]:
    """List the tensors that a plan of the graph function `name` places, in order of allocation.

    Views and returned tensors are left out. The workspaces of a call follow its outputs.
    Raises BuildError, naming the value, for unknown dims or dtype."""
    func = module.functions[name]
    assert isinstance(func, Function)
    env = env_of(module.bounds)
    aliases = AliasSets()
    last: dict[AllocatedTensor, int] = {}
    made: list[tuple[int, GVar, int, TensorInfo]] = []
    for position, b in enumerate(all_bindings(func)):
        var, value = b.var, b.value
        aliases.bind(var, value)
        made += [(position, var, i, t) for i, t in allocated_tensors(value, var.info)]
        for read in aliases.read_tensors(value):
            last[read] = position
    kept = aliases.read_tensors(func.ret)
    placed = [m for m in made if (m[1], m[2]) not in kept]
    lives = [Lifetime(v, i, _nbytes(v, t, env), at, last.get((v, i), at)) for at, v, i, t in placed]
    where = {b.var: at for at, b in enumerate(all_bindings(func))}
    for v, sizes in (workspaces or {}).items():
        lives += [Lifetime(v, None, simplify(size, env), where[v], where[v]) for size in sizes]
    return tuple(sorted(lives, key=lambda life: life.first))


def _nbytes(var: GVar, info: TensorInfo, env: Env) -> Expr:
    if info.shape is None or info.dtype is None:
        raise BuildError(f"{var.name}: wanted known dims and dtype to plan memory, found {info!r}; add a match_cast")
    return simplify(mul(product(info.shape), info.dtype.bytes), env)


def overlay(groups: Sequence[Sequence[Expr]], env: Env) -> tuple[tuple[Expr, ...], tuple[tuple[int, ...], ...]]:
    """Pack groups of arrays that are in use one group at a time.

    Returns storage sizes, and for each group the storages of its arrays."""
    sizes, places = pack([LiveRange(at, at, size) for at, group in enumerate(groups) for size in group], env)
    left = iter(places)
    return sizes, tuple(tuple(next(left) for _ in group) for group in groups)
