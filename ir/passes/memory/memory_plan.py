"""Static memory planning over symbolic sizes (paper section 4.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_tune.errors import BuildError
from relax_tune.ir.arith.bounds import Env, interval
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import Expr, const, free_vars, mul
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Function, GVar, all_bindings
from relax_tune.ir.core.struct_info import TensorInfo, TupleInfo
from relax_tune.ir.op.base import env_of, product
from relax_tune.ir.passes.memory.aliasing import AliasSets, AllocatedTensor, allocated_tensors
from relax_tune.ir.passes.memory.buffer_packing import LiveRange, pack


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPlan:
    """Where intermediate values live.

    storages: bytes of each, over the graph's symbols. assignment: for a variable, the storage of each tensor it holds (one,
    or one per field of a tuple, None for a field that is returned). Parameters, constants and returned values are not in it;
    views share what they view, what an `if` gives is what the side taken gave, and an output that is written in place lies where
    the argument lay. workspaces: the storages a call needs while it runs, for the variable it is bound to.
    """

    storages: tuple[Expr, ...]
    assignment: Mapping[GVar, tuple[int | None, ...]]
    workspaces: Mapping[GVar, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Assign storages by liveness: values that are never in use together may share one, which is as large as the largest of them.

    constant: replace sizes by the largest they can be within the declared bounds, so that memory can be taken once for all calls."""

    constant: bool = False

    def plan(
        self, module: IRModule, name: str = "main", workspaces: Mapping[GVar, Sequence[Expr]] | None = None
    ) -> MemoryPlan:
        """The plan of one graph function. workspaces: bytes that the calls of these variables need while they run.

        Raises BuildError when `constant` and a size has no upper bound."""
        env = env_of(module.bounds)
        assignment: dict[GVar, list[int | None]] = {}
        spaces: dict[GVar, list[int]] = {}
        lives = lifetimes(module, name, workspaces)
        sizes = [_at_bounds(life, env) if self.constant else life.nbytes for life in lives]
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


def _at_bounds(life: Lifetime, env: Env) -> Expr:
    """Its largest size within the declared bounds."""
    largest = interval(life.nbytes, env)[1]
    if largest is None:
        missing = [v.name for v in free_vars(life.nbytes) if env.range_of(v)[1] is None]
        raise BuildError(
            f"{life.var.name}: wanted an upper bound of {', '.join(missing) or repr(life.nbytes)} for a constant memory plan, "
            "found none; declare one or plan symbolically"
        )
    return const(largest)


@dataclass(frozen=True, slots=True, eq=False)
class Lifetime:
    """A tensor that needs memory of its own: field `index` of `var`, `nbytes` over the graph's symbols, from the position of the
    step that makes it to that of the last one that reads it. index None: a workspace of the call that makes `var`."""

    var: GVar
    index: int | None
    nbytes: Expr
    first: int
    last: int


def lifetimes(
    module: IRModule, name: str = "main", workspaces: Mapping[GVar, Sequence[Expr]] | None = None
) -> tuple[Lifetime, ...]:
    """Every tensor a plan of the graph function `name` places, in the order they are made: neither views nor what is returned;
    after those a call makes, its workspaces.

    Raises BuildError, naming the value, for one whose dims or dtype are not known."""
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
    """Sizes of places that hold any one group of arrays at a time, and for each group the places of its arrays."""
    sizes, places = pack([LiveRange(at, at, size) for at, group in enumerate(groups) for size in group], env)
    left = iter(places)
    return sizes, tuple(tuple(next(left) for _ in group) for group in groups)
