"""Static memory planning over symbolic sizes (paper section 4.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_tune.errors import BuildError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.expr import Expr, Var, as_int, const, free_vars, le, mul, substitute
from relax_tune.ir.function import IRModule
from relax_tune.ir.graph import Call, CallDPSLibrary, CallTIR, Function, GVar, TupleItem, TupleValue, Value
from relax_tune.ir.op.base import env_of, product
from relax_tune.ir.op.movement import VIEWS
from relax_tune.ir.passes.rewriter import used_vars
from relax_tune.ir.struct_info import StructInfo, TensorInfo, TupleInfo


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPlan:
    """Where intermediate values live.

    storages: bytes of each, over the graph's symbols. assignment: for a variable, the storage of each tensor it holds (one,
    or one per field of a tuple). Parameters, constants and returned values are not in it; views share what they view.
    """

    storages: tuple[Expr, ...]
    assignment: Mapping[GVar, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Assign storages by liveness: a storage that is free again is reused when the wanted size is provably at most its own.

    constant: replace sizes by their values at the declared upper bounds, so that memory can be taken once for all calls."""

    constant: bool = False

    def plan(self, module: IRModule, name: str = "main") -> MemoryPlan:
        """The plan of one graph function. Raises BuildError when `constant` and a symbol has no upper bound."""
        func = module.functions[name]
        assert isinstance(func, Function)
        env = env_of(module.bounds)
        upper: dict[Var, Expr] = {b.var: const(b.upper) for b in module.bounds if b.upper is not None}
        roots = _Roots()
        last: dict[tuple[GVar, int], int] = {}
        made: list[list[tuple[GVar, int, TensorInfo]]] = []
        for position, binding in enumerate(func.bindings):
            outs = _made(binding.value, binding.var.info)
            made.append([(binding.var, i, t) for i, t in enumerate(outs)])
            if not outs:
                roots.alias(binding.var, binding.value)
            for read in roots.of_all(binding.value):
                last[read] = position
        kept = roots.of_all(func.ret)
        pool = _Pool(env)
        assignment: dict[GVar, list[int]] = {}
        live: list[tuple[tuple[GVar, int], int]] = []
        for position, produced in enumerate(made):
            for var, index, info in produced:
                key = (var, index)
                if key in kept:
                    continue
                slot = pool.take(self._bytes(var, info, env, upper))
                assignment.setdefault(var, []).append(slot)
                live.append((key, slot))
            for key, slot in [x for x in live if last.get(x[0], -1) <= position]:
                pool.free.append(slot)
                live.remove((key, slot))
        return MemoryPlan(tuple(pool.sizes), {v: tuple(s) for v, s in assignment.items()})

    def _bytes(self, var: GVar, info: TensorInfo, env: Env, upper: Mapping[Var, Expr]) -> Expr:
        if info.shape is None or info.dtype is None:
            raise BuildError(
                f"{var.name}: wanted known dims and dtype to plan memory, found {info!r}; add a match_cast"
            )
        size = simplify(mul(product(info.shape), info.dtype.bytes), env)
        if not self.constant:
            return size
        missing = [v.name for v in free_vars(size) if v not in upper]
        if missing:
            raise BuildError(
                f"{var.name}: wanted an upper bound of {', '.join(missing)} for a constant memory plan, found none; "
                "declare one or plan symbolically"
            )
        # dims grow with their symbols, so sizes are largest at the upper bounds
        return simplify(substitute(size, {v: upper[v] for v in free_vars(size)}))


class _Pool:
    """Storages and which are free."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self.sizes: list[Expr] = []
        self.free: list[int] = []

    def take(self, size: Expr) -> int:
        """The smallest free storage that provably holds `size` bytes, or a new one."""
        best: int | None = None
        for slot in sorted(self.free):
            if self._fits(size, self.sizes[slot]) and (
                best is None
                or (self.sizes[slot] is not self.sizes[best] and self._fits(self.sizes[slot], self.sizes[best]))
            ):
                best = slot
        if best is not None:
            self.free.remove(best)
            return best
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _fits(self, size: Expr, room: Expr) -> bool:
        if size is room:
            return True
        a, b = as_int(size), as_int(room)
        return a <= b if a is not None and b is not None else prove(le(size, room), self.env) is Proof.YES


class _Roots:
    """Which made tensors a variable stands for: itself, or through views and tuples others."""

    def __init__(self) -> None:
        self._of: dict[GVar, tuple[tuple[GVar, int], ...]] = {}

    def alias(self, var: GVar, value: Value) -> None:
        self._of[var] = self.fields(value)

    def fields(self, value: Value) -> tuple[tuple[GVar, int], ...]:
        if isinstance(value, GVar):
            if value in self._of:
                return self._of[value]
            count = len(value.info.fields) if isinstance(value.info, TupleInfo) else 1
            return tuple((value, i) for i in range(count))
        if isinstance(value, TupleItem):
            owner = self.fields(value.value)
            whole = value.value.info if isinstance(value.value, GVar) else None
            flat = isinstance(whole, TupleInfo) and len(whole.fields) == len(owner)
            return (owner[value.index],) if flat else owner
        if isinstance(value, TupleValue):
            return tuple(k for f in value.fields for k in self.fields(f))
        if isinstance(value, Call):
            return tuple(k for v in used_vars(value) for k in self.fields(v))
        return ()

    def of_all(self, value: Value) -> set[tuple[GVar, int]]:
        """Every made tensor a value reads."""
        if isinstance(value, TupleItem):
            return set(self.fields(value))
        return {k for v in used_vars(value) for k in self.fields(v)}


def _made(value: Value, info: StructInfo) -> Sequence[TensorInfo]:
    """The tensors a binding makes in new memory; none for views, tuples and casts."""
    if isinstance(value, (CallTIR, CallDPSLibrary)):
        return value.out
    if isinstance(value, Call) and not isinstance(value.op, VIEWS):
        fields = info.fields if isinstance(info, TupleInfo) else (info,)
        return [f for f in fields if isinstance(f, TensorInfo)]
    return ()
