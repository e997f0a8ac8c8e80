"""A schedule: a tensor function under transformation, with the trace of the applied primitives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Literal

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import (
    TRUE,
    Expr,
    ExprLike,
    Tunable,
    as_int,
    const,
    eq,
    floormod,
    free_vars,
    mul,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import For, LoopKind, Stmt, Tail, blocks, loops
from relax_tune.schedules.excerpt import loop_nest, names_in
from relax_tune.schedules.loop_tree import enclosing, find_block, find_loop
from relax_tune.schedules.primitives.blocks import (
    arithmetic,
    block_iters,
    compute_location,
    inline,
    pad_softmax,
    padding,
    tensorize,
)
from relax_tune.schedules.primitives.loops import loops as loop_primitives
from relax_tune.schedules.primitives.loops import partition
from relax_tune.schedules.primitives.memory import buffers, layouts, pipeline
from relax_tune.schedules.primitives.reduction import (
    bitonic_sorts,
    loop_invariant,
    online_softmax,
    radix_sorts,
    reductions,
    scans,
    scatters,
    selection,
    stream_k,
    whole_sums,
    windows,
)
from relax_tune.schedules.symbols import only_tunables, require_name, with_slots, with_symbols
from relax_tune.schedules.trace import Step, Trace, each, scalar_value

# Every primitive by its name in traces. Add a new primitive here, and nowhere else.
PRIMITIVES: Mapping[str, Callable[..., PrimFunc]] = {
    f.__name__: f
    for f in (
        loop_primitives.split,
        loop_primitives.fuse,
        loop_primitives.reorder,
        loop_primitives.set_kind,
        loop_primitives.set_tail,
        loop_primitives.nontemporal_stores,
        loop_primitives.prefetch,
        loop_primitives.copy_async,
        loop_primitives.fuse_sibling_loops,
        block_iters.fuse_block_iters,
        block_iters.flatten_rows,
        partition.partition,
        partition.fission,
        compute_location.compute_at,
        compute_location.reverse_compute_at,
        inline.compute_inline,
        inline.reverse_compute_inline,
        arithmetic.multiply_by_reciprocal,
        reductions.decompose_reduction,
        reductions.rfactor,
        reductions.tree_reduce,
        windows.separable_reduce,
        scans.chunk_scan,
        scans.serial_scan,
        scatters.serial_scatter,
        selection.quadratic_select,
        radix_sorts.radix_sort,
        bitonic_sorts.bitonic_sort,
        stream_k.stream_k,
        loop_invariant.hoist_factors,
        whole_sums.sum_as,
        online_softmax.split_k_update,
        online_softmax.rolling_update,
        buffers.cache_read,
        block_iters.reindex,
        buffers.cache_write,
        buffers.set_scope,
        buffers.store_as,
        layouts.tile_layout,
        layouts.permute_layout,
        layouts.transform_layout,
        layouts.storage_align,
        layouts.swizzle,
        padding.pad,
        padding.pad_spatial,
        pad_softmax.pad_softmax_axis,
        pipeline.software_pipeline,
        tensorize.tensorize,
        buffers.reuse_output,
        buffers.mark_prepack,
    )
}


class Schedule:
    """A function under transformation that records every applied primitive.

    constraints: facts over tunables that a candidate must satisfy
    guesses: values of all tunables worth trying first, best first
    """

    def __init__(self, func: PrimFunc) -> None:
        self.func = func
        self.steps: list[Step] = []
        self.tunables: dict[str, Tunable] = {}
        self.constraints: list[Expr] = []
        self.guesses: tuple[Mapping[str, int], ...] = ()

    @property
    def trace(self) -> Trace:
        return Trace(tuple(self.steps), tuple(self.tunables.values()))

    def tunable(self, name: str, domain: Sequence[int]) -> Tunable:
        """Declare a tunable. Raises ScheduleError for a name declared before, or where no value is left."""
        if name in self.tunables:
            raise ScheduleError(f"{self.func.name}: tunable {name!r} is declared twice")
        if not domain or min(domain) < 1:
            raise ScheduleError(f"{self.func.name}: tunable {name!r} wants positive integers, found {list(domain)}")
        self.tunables[name] = Tunable(require_name(name), domain)
        return self.tunables[name]

    def require(self, fact: Expr) -> None:
        """Add a fact that candidates must satisfy."""
        fact = simplify(fact)
        if fact is not TRUE and fact not in self.constraints:
            self.constraints.append(fact)

    def guess(self, *values: Mapping[str, int]) -> None:
        """Set the values of all tunables that are tried first, best first."""
        self.guesses = values

    def apply(self, primitive: str, **args: Any) -> tuple[str, ...]:
        """Apply a primitive by name, record it, and return the names of the blocks it made, in program order.

        args: the primitive's arguments. A number may be an expression over tunables and the function's shape symbols; the trace
            records each symbol as its slot (`relax_tune.schedules.symbols`).
        Raises: ScheduleError when the primitive refuses, or for arguments it does not take.
        """
        known = PRIMITIVES.get(primitive)
        if known is None:
            raise ScheduleError(f"wanted a primitive, one of {', '.join(PRIMITIVES)}; found {primitive!r}")
        _check_arguments(primitive, known, args)
        recorded = {k: _mapped(v, lambda e: scalar_value(with_slots(e, self.func))) for k, v in args.items()}
        actual = {k: _mapped(v, lambda e: with_symbols(e, self.func)) for k, v in recorded.items()}
        found = dict(self.tunables)
        for t in (t for v in recorded.values() for e in each(v) if isinstance(e, Expr) for t in free_vars(e)):
            if isinstance(t, Tunable) and found.setdefault(require_name(t.name), t) is not t:
                raise ScheduleError(f"{self.func.name}: tunable {t.name!r} is already another one's name")
        old = {b.name for b in blocks(self.func.body)}
        self.func = known(self.func, **actual)
        self.tunables = found
        self.steps.append(Step(primitive, tuple(recorded.items())))
        return tuple(b.name for b in blocks(self.func.body) if b.name not in old)

    # -- the primitives that name new loops return those names -------------------------------------------------------

    def _new_loops(self, before: set[str]) -> list[str]:
        return [x.var.name for x in loops(self.func.body) if x.var.name not in before]

    def _names(self) -> set[str]:
        return {x.var.name for x in loops(self.func.body)}

    def split(self, loop: str, factors: Sequence[ExprLike | None], divides: bool = False) -> list[str]:
        """Split a loop as `primitives.loops.split` does and return the new loops; `divides` adds the divisibility as a constraint."""
        before, extent = self._names(), find_loop(self.func, loop).extent
        self.apply("split", loop=loop, factors=list(factors), divides=divides)
        if divides:
            one: Expr = const(1)
            fact = simplify(eq(floormod(extent, reduce(mul, (f for f in factors if f is not None), one)), 0))
            # a fact that depends on shapes was proved by the primitive
            if only_tunables(fact):
                self.require(fact)
        return self._new_loops(before)

    def fuse(self, names: Sequence[str]) -> str:
        """Fuse nested loops as `primitives.loops.fuse` does and return the one loop."""
        if len(names) == 1:
            return names[0]
        before = self._names()
        self.apply("fuse", names=list(names))
        return self._new_loops(before)[0]

    def reorder(self, names: Sequence[str]) -> None:
        self.apply("reorder", names=list(names))

    def set_kind(self, loop: str, kind: LoopKind, axis: int = 0) -> None:
        self.apply("set_kind", loop=loop, kind=kind, axis=axis)

    # shorthands; a trace holds `set_kind`

    def parallel(self, loop: str) -> None:
        """Distribute the loop over CPU threads."""
        self.set_kind(loop, "parallel")

    def vectorize(self, loop: str) -> None:
        self.set_kind(loop, "vectorized")

    def unroll(self, loop: str) -> None:
        self.set_kind(loop, "unrolled")

    def bind(self, loop: str, thread: Literal["group", "item"], axis: int = 0) -> None:
        """Bind the loop to a grid axis: of work-groups (thread blocks) or of work-items (threads)."""
        self.set_kind(loop, thread, axis)

    def set_tail(self, loop: str, tail: Tail) -> None:
        self.apply("set_tail", loop=loop, tail=tail)

    def fuse_sibling_loops(self, first: str, second: str) -> None:
        self.apply("fuse_sibling_loops", first=first, second=second)

    def compute_at(self, block: str, loop: str) -> list[str]:
        """Move a producer into `loop` and return the loops of its new nest."""
        self.apply("compute_at", block=block, loop=loop)
        return self.inner_loops(block, loop)

    def reverse_compute_at(self, block: str, loop: str) -> list[str]:
        """Move a consumer into `loop` and return the loops of its new nest."""
        self.apply("reverse_compute_at", block=block, loop=loop)
        return self.inner_loops(block, loop)

    def compute_inline(self, block: str) -> None:
        self.apply("compute_inline", block=block)

    # -- queries ----------------------------------------------------------------------------------------------------

    def loops_of(self, block: str) -> list[str]:
        """Return the loops around a block, outermost first."""
        return [x.var.name for x in self.nest_of(block)]

    def nest_of(self, block: str) -> tuple[For, ...]:
        return enclosing(self.func, find_block(self.func, block))

    def inner_loops(self, block: str, loop: str) -> list[str]:
        """Return the loops around a block that are inside `loop`."""
        names = self.loops_of(block)
        return names[names.index(loop) + 1 :]

    def extent(self, loop: str) -> Expr:
        return find_loop(self.func, loop).extent


def _mapped(value: Any, change: Callable[[Expr], Expr | int]) -> Any:
    """Apply `change` to the expressions of an argument; lists become tuples."""
    made = tuple(change(v) if isinstance(v, Expr) else v for v in each(value))
    return made if isinstance(value, (list, tuple)) else made[0]


def _is_factor(v: Any) -> bool:
    return isinstance(v, Expr) or type(v) is int


# Argument checks by the annotation of the parameter: traces are untrusted.
_FITS: Mapping[str, Callable[[Any], bool]] = {
    "str": lambda v: isinstance(v, str),
    "bool": lambda v: isinstance(v, bool),
    "int": lambda v: type(v) is int,
    "ExprLike": _is_factor,
    "ExprLike | None": lambda v: v is None or _is_factor(v),
    "Sequence[str]": lambda v: isinstance(v, (list, tuple)) and all(isinstance(x, str) for x in v),
    "Sequence[int]": lambda v: isinstance(v, (list, tuple)) and all(type(x) is int for x in v),
    "Sequence[ExprLike]": lambda v: isinstance(v, (list, tuple)) and all(map(_is_factor, v)),
    "Sequence[ExprLike | None]": lambda v: isinstance(v, (list, tuple)) and all(x is None or _is_factor(x) for x in v),
}


def _check_arguments(primitive: str, function: Callable[..., PrimFunc], args: Mapping[str, Any]) -> None:
    wanted = _parameters(function)
    optional = len(function.__defaults__ or ())
    missing = [n for n in list(wanted)[: len(wanted) - optional] if n not in args]
    strange = [n for n in args if n not in wanted]
    if missing or strange:
        raise ScheduleError(
            f"{primitive} wants the arguments {', '.join(wanted)}; missing {missing}, not among them {strange}"
        )
    for name, value in args.items():
        if not _fits(wanted, name, value):
            raise ScheduleError(f"{primitive} wants {name} to be of kind {wanted[name]}, found {value!r}")


def _parameters(function: Callable[..., PrimFunc]) -> dict[str, str]:
    """Return the annotation of each parameter after the function."""
    return {n: str(a) for n, a in function.__annotations__.items() if n not in ("func", "return")}


def _fits(wanted: Mapping[str, str], name: str, value: Any) -> bool:
    # other annotations are Literals, which the primitives check
    return name in wanted and _FITS.get(wanted[name], _FITS["str"])(value)


# Bound on a replayed function's statements: a step can double them, and traces are untrusted.
MAX_STATEMENTS = 1000
# Limits of a replay, which anybody's record may ask for: steps, nested loops, and the sum of statements after each step. The sketches
# of our rules need a quarter of them at most.
MAX_STEPS, MAX_DEPTH, MAX_WORK = 400, 40, 100_000


def replay(trace: Trace, func: PrimFunc) -> Schedule:
    """Apply a trace to a function.

    Raises: ScheduleError for a step that does not apply. It gives the step's number and reason, the step as Python, and the
        loop nest; carets mark unknown names and the nodes that the step names.
    """
    if len(trace.steps) > MAX_STEPS:
        raise ScheduleError(f"{func.name}: wanted a trace of at most {MAX_STEPS} steps, found {len(trace.steps)}")
    schedule, work = Schedule(func), 0
    for t in trace.tunables:
        schedule.tunables[t.name] = t
    for number, step in enumerate(trace.steps, 1):
        try:
            before = schedule.func
            schedule.apply(step.primitive, **dict(step.args))
            count, depth = _size(schedule.func.body)
            work += count
            if count > MAX_STATEMENTS or depth > MAX_DEPTH or work > MAX_WORK:
                schedule.func = before
                raise ScheduleError(
                    f"{func.name}: wanted at most {MAX_STATEMENTS} loops and blocks after a step, {MAX_DEPTH} of them nested, and "
                    f"{MAX_WORK} after all steps together, found {count}, {depth} and {work}"
                )
        except ScheduleError as error:
            raise ScheduleError(
                f"step {number} of the trace does not apply: {error}\n{_located(step, schedule.func)}"
            ) from None
    return schedule


def _size(body: Stmt) -> tuple[int, int]:
    """Return the number of statements, and how deep they are nested."""
    count, depth, level = 0, 0, [body]
    while level:
        count, depth = count + len(level), depth + 1
        level = [child for s in level for child in s.children]
    return count, depth


# Arguments that are keywords; all other strings are names of the function.
_WORDS = frozenset({"kind", "tail", "scope", "index_map", "intrinsic", "skip"})


def _located(step: Step, func: PrimFunc) -> str:
    """Print the step with carets under its wrong arguments, and the loop nest with carets under the named nodes.

    Without any such place, carets stand under the whole step.
    """
    name, *args = step.parts
    known = PRIMITIVES.get(step.primitive)
    line, under = f"s.apply({name}", " " * len("s.apply(") + ("^" if known is None else " ") * len(name)
    there, wanted = names_in(func), {} if known is None else _parameters(known)
    for part, (key, value) in zip(args, step.args, strict=True):
        marks = " " * len(part)
        if known is not None and not _fits(wanted, key, value):
            marks = "^" * len(part)
        elif key not in _WORDS:
            for missing in (repr(v) for v in each(value) if isinstance(v, str) and v not in there):
                at = part.find(missing)
                marks = marks[:at] + "^" * len(missing) + marks[at + len(missing) :]
        line, under = f"{line}, {part}", f"{under}  {marks}"
    nest = loop_nest(func, step.names)
    if "^" not in under and "^" not in nest:
        under = "^" * len(line)
    return "\n".join([f"{line})", *([under.rstrip()] if "^" in under else []), nest])


def holds(constraint: Expr, values: Mapping[Tunable, int]) -> bool:
    """Return whether a constraint over only tunables is true for these values."""
    result = simplify(substitute(constraint, {t: const(v) for t, v in values.items()}))
    return result is TRUE or as_int(result) == 1
