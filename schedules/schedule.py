"""A schedule: a tensor function under transformation, with the trace of the applied primitives.

Tests: `tests/schedules/test_trace.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import lru_cache, partial, reduce
from types import MethodType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload
from weakref import WeakKeyDictionary

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import (
    TRUE,
    Expr,
    ExprLike,
    Tunable,
    Var,
    as_int,
    const,
    eq,
    floormod,
    free_vars,
    mul,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, For, LoopKind, Stmt, blocks, loops, walk
from relax_tune.ir.text.printer import Printer, print_text
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
from relax_tune.schedules.primitives.loops import partition as partitions
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

P = ParamSpec("P")
R = TypeVar("R")


class Method(Generic[P, R]):
    """A method of `Schedule` that applies a primitive and records it.

    Attributes:
        primitive: The function that edits the tensor function.
    """

    def __init__(self, primitive: Callable[..., PrimFunc], call: Callable[Concatenate[Schedule, P], R]) -> None:
        self.primitive = primitive
        self.__doc__ = call.__doc__
        self._call = call

    @overload
    def __get__(self, schedule: None, owner: type[Schedule]) -> Method[P, R]: ...
    @overload
    def __get__(self, schedule: Schedule, owner: type[Schedule]) -> Callable[P, R]: ...
    def __get__(self, schedule: Schedule | None, owner: type[Schedule]) -> Method[P, R] | Callable[P, R]:
        return self if schedule is None else MethodType(self._call, schedule)


def _method(primitive: Callable[Concatenate[PrimFunc, P], PrimFunc]) -> Method[P, tuple[str, ...]]:
    """Return a primitive as a method with the same arguments that returns the names of the new blocks."""
    parameters = [n for n in primitive.__annotations__ if n not in ("func", "return")]

    def call(s: Schedule, /, *args: P.args, **kwargs: P.kwargs) -> tuple[str, ...]:
        if len(args) > len(parameters):
            raise ScheduleError(
                f"{primitive.__name__} expects the arguments {', '.join(parameters)}, got {len(args)} by position"
            )
        return s.apply(primitive.__name__, **dict(zip(parameters, args)), **kwargs)

    call.__doc__ = primitive.__doc__
    return Method(primitive, call)


def _returning(
    primitive: Callable[..., PrimFunc],
) -> Callable[[Callable[Concatenate[Schedule, P], R]], Method[P, R]]:
    """Decorate a method that applies a primitive and returns something other than the names of the new blocks."""
    return partial(Method, primitive)


# The forms of a rule begin with the same primitives, whose proofs are most of the cost of sketches. Functions do not change, so that a
# result holds as long as its function is in use.
_RESULTS: WeakKeyDictionary[PrimFunc, dict[Hashable, PrimFunc | ScheduleError]] = WeakKeyDictionary()


@lru_cache(maxsize=4096)
def _tunable(name: str, domain: tuple[int, ...]) -> Tunable:
    return Tunable(name, domain)


def _applied(primitive: Callable[..., PrimFunc], func: PrimFunc, args: Mapping[str, Any]) -> PrimFunc:
    """Apply a primitive, or return what it gave for the same function and arguments. Raises ScheduleError where it refuses."""
    results = _RESULTS.setdefault(func, {})
    key = (primitive, tuple((name, _hashable(value)) for name, value in args.items()))
    if key not in results:
        try:
            result = primitive(func, **args)
        except ScheduleError as error:
            # without its traceback, whose frames hold the function
            results[key] = type(error)(*error.args)
            raise
        if result is func:  # stored, it would keep itself in use
            return result
        results[key] = result
    # The stored error is copied, since each raise adds to the traceback of its object.
    known = results[key]
    if isinstance(known, ScheduleError):
        raise type(known)(*known.args)
    return known


def _hashable(value: Any) -> Hashable:
    """Return a value in which lists are tuples; 1 and True differ."""
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else (type(value), value)


class Schedule:
    """A tensor function under transformation that records every applied primitive.

    Loops and blocks are known by their names. A primitive checks that the function keeps its meaning, or raises a ScheduleError that
    names the loops and blocks there are, and leaves the schedule as it was. `print(schedule)` shows the function as it is now.

    Attributes:
        original: The function before the first primitive.
        func: The function as it is now.
        constraints: Facts over tunables that a candidate must satisfy.
        guesses: Values of all tunables worth trying first, best first.

    Raises:
        ScheduleError: The argument is no tensor function.

    Example:
        ```python
        schedule = rt.Schedule(matmul)
        rows, row = schedule.split("i", [None, 4])
        columns, column = schedule.split("j", [None, 16])
        schedule.reorder([rows, columns, "k", row, column])
        schedule.parallel(rows)
        schedule.unroll(row)
        print(schedule)
        ```
    """

    def __init__(self, func: PrimFunc) -> None:
        if not isinstance(func, PrimFunc):
            raise ScheduleError(
                f"expected a tensor function to schedule, as parse_prim_func returns it, got a {type(func).__name__}"
            )
        self.original = self.func = func
        self.steps: list[Step] = []
        self.tunables: dict[str, Tunable] = {}
        self.constraints: list[Expr] = []
        self.guesses: tuple[Mapping[str, int], ...] = ()

    def __str__(self) -> str:
        return print_text(self.func)

    def __repr__(self) -> str:
        return (
            f"<schedule of {self.func.name} after {len(self.steps)} steps; loops {', '.join(self._names()) or 'none'}>"
        )

    @property
    def trace(self) -> Trace:
        """The primitives so far, as data: JSON, or a program in Python."""
        return Trace(tuple(self.steps), tuple(self.tunables.values()))

    def tunable(self, name: str, domain: Sequence[int]) -> Tunable:
        """Declare a tunable. Raises ScheduleError for a name declared before, or where no value is left."""
        if name in self.tunables:
            raise ScheduleError(f"{self.func.name}: tunable {name!r} is declared twice")
        if not domain or min(domain) < 1:
            raise ScheduleError(f"{self.func.name}: tunable {name!r} expects positive integers, got {list(domain)}")
        self.tunables[name] = _tunable(require_name(name), tuple(domain))
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
        """Apply a primitive by name, record it, and return the names of the new blocks, in program order.

        Args:
            args: The primitive's arguments. A number may be an expression over tunables and the function's shape symbols; the trace records
                each symbol as its slot (`relax_tune.schedules.symbols`).

        Raises:
            ScheduleError: When the primitive refuses, or for arguments it does not take.
        """
        known = PRIMITIVES.get(primitive)
        if known is None:
            raise ScheduleError(f"expected a primitive, one of {', '.join(PRIMITIVES)}; got {primitive!r}")
        _check_arguments(primitive, known, args)
        # the trace records slots of symbols, so that it replays on a function whose symbols have other names
        recorded = {k: _mapped(v, lambda e: scalar_value(with_slots(e, self.func))) for k, v in args.items()}
        actual = {k: _mapped(v, lambda e: with_symbols(e, self.func)) for k, v in recorded.items()}
        tunables = dict(self.tunables)
        for t in (t for v in recorded.values() for e in each(v) if isinstance(e, Expr) for t in free_vars(e)):
            if isinstance(t, Tunable) and tunables.setdefault(require_name(t.name), t) is not t:
                raise ScheduleError(f"{self.func.name}: the name {t.name!r} belongs to another tunable")
        # Nothing above has changed the schedule, so a refused step leaves it as it was.
        old = {b.name for b in blocks(self.func.body)}
        self.func = _applied(known, self.func, actual)
        self.tunables = tunables
        self.steps.append(Step(primitive, tuple(recorded.items())))
        return tuple(b.name for b in blocks(self.func.body) if b.name not in old)

    # -- primitives: methods apply and record them; unless they say otherwise, they return the names of the new blocks ------
    # `PRIMITIVES` derives from these methods. Add a new primitive here, and nowhere else.

    @_returning(loop_primitives.split)
    def split(self, loop: str, factors: Sequence[ExprLike | None], divides: bool = False) -> list[str]:
        """Split a loop into a nest and return the new loops, outermost first.

        Args:
            loop: Name of a serial loop.
            factors: Extent of each new loop; None for the one that takes the rest.
            divides: The factors divide the extent, so that no bound check is needed; proved, or a constraint where it depends on tunables.

        Raises:
            ScheduleError: There is no such loop, it is not serial, or the factors do not fit.

        Example:
            ```python
            tiles, inside = schedule.split("i", [None, 16])
            ```
        """
        before, extent = self._names(), find_loop(self.func, loop).extent
        self.apply("split", loop=loop, factors=_listed(factors), divides=divides)
        if divides:
            one: Expr = const(1)
            fact = simplify(eq(floormod(extent, reduce(mul, (f for f in factors if f is not None), one)), 0))
            # a fact that depends on shapes was proved by the primitive
            if only_tunables(fact):
                self.require(fact)
        return self._new_loops(before)

    @_returning(loop_primitives.fuse)
    def fuse(self, names: Sequence[str]) -> str:
        """Fuse directly nested serial loops, given outermost first, and return the one loop: `fused = schedule.fuse(["i", "j"])`."""
        # Not recorded, so that rules need no case for one loop.
        if len(names) == 1:
            return names[0]
        before = self._names()
        self.apply("fuse", names=_listed(names))
        return self._new_loops(before)[0]

    reorder = _method(loop_primitives.reorder)

    @_returning(loop_primitives.set_kind)
    def set_kind(self, loop: str, kind: LoopKind, axis: int = 0) -> None:
        """Set the kind of a loop; `parallel`, `vectorize`, `unroll` and `bind` are shorthands."""
        self.apply("set_kind", loop=loop, kind=kind, axis=axis)

    set_tail = _method(loop_primitives.set_tail)
    nontemporal_stores = _method(loop_primitives.nontemporal_stores)
    prefetch = _method(loop_primitives.prefetch)
    hold_vectors = _method(loop_primitives.hold_vectors)
    copy_async = _method(loop_primitives.copy_async)
    fuse_sibling_loops = _method(loop_primitives.fuse_sibling_loops)
    fuse_block_iters = _method(block_iters.fuse_block_iters)
    flatten_rows = _method(block_iters.flatten_rows)
    partition = _method(partitions.partition)
    fission = _method(partitions.fission)

    @_returning(compute_location.compute_at)
    def compute_at(self, block: str, loop: str) -> list[str]:
        """Move a producer into `loop` and return the loops of its new nest."""
        self.apply("compute_at", block=block, loop=loop)
        return self.inner_loops(block, loop)

    @_returning(compute_location.reverse_compute_at)
    def reverse_compute_at(self, block: str, loop: str) -> list[str]:
        """Move a consumer into `loop` and return the loops of its new nest."""
        self.apply("reverse_compute_at", block=block, loop=loop)
        return self.inner_loops(block, loop)

    compute_inline = _method(inline.compute_inline)
    reverse_compute_inline = _method(inline.reverse_compute_inline)
    multiply_by_reciprocal = _method(arithmetic.multiply_by_reciprocal)
    decompose_reduction = _method(reductions.decompose_reduction)
    rfactor = _method(reductions.rfactor)
    tree_reduce = _method(reductions.tree_reduce)
    separable_reduce = _method(windows.separable_reduce)
    chunk_scan = _method(scans.chunk_scan)
    serial_scan = _method(scans.serial_scan)
    serial_scatter = _method(scatters.serial_scatter)
    quadratic_select = _method(selection.quadratic_select)
    radix_sort = _method(radix_sorts.radix_sort)
    bitonic_sort = _method(bitonic_sorts.bitonic_sort)
    stream_k = _method(stream_k.stream_k)
    hoist_factors = _method(loop_invariant.hoist_factors)
    sum_as = _method(whole_sums.sum_as)
    split_k_update = _method(online_softmax.split_k_update)
    rolling_update = _method(online_softmax.rolling_update)
    cache_read = _method(buffers.cache_read)
    reindex = _method(block_iters.reindex)
    cache_write = _method(buffers.cache_write)
    set_scope = _method(buffers.set_scope)
    store_as = _method(buffers.store_as)
    tile_layout = _method(layouts.tile_layout)
    permute_layout = _method(layouts.permute_layout)
    transform_layout = _method(layouts.transform_layout)
    storage_align = _method(layouts.storage_align)
    swizzle = _method(layouts.swizzle)
    pad = _method(padding.pad)
    pad_spatial = _method(padding.pad_spatial)
    pad_softmax_axis = _method(pad_softmax.pad_softmax_axis)
    software_pipeline = _method(pipeline.software_pipeline)
    tensorize = _method(tensorize.tensorize)
    reuse_output = _method(buffers.reuse_output)
    mark_prepack = _method(buffers.mark_prepack)

    # shorthands; a trace holds `set_kind`

    def parallel(self, *loops: str) -> None:
        """Run the iterations of loops in parallel: on threads of a processor, or as groups of a grid.

        Raises:
            ScheduleError: Iterations may depend on each other, or two parallel loops would nest.
        """
        for loop in loops:
            self.set_kind(loop, "parallel")

    def vectorize(self, *loops: str) -> None:
        """Compute the iterations of loops as lanes of vectors. Extents are constant; split longer loops first."""
        for loop in loops:
            self.set_kind(loop, "vectorized")

    def unroll(self, *loops: str) -> None:
        """Write loops out, one copy of the body for each iteration. Extents are constant and at most 64."""
        for loop in loops:
            self.set_kind(loop, "unrolled")

    def bind(self, loop: str, thread: Literal["group", "item"], axis: int = 0) -> None:
        """Bind the loop to a grid axis: of work-groups (thread blocks) or of work-items (threads).

        Args:
            axis: 0, 1 or 2 for x, y or z.
        """
        self.set_kind(loop, thread, axis)

    def _new_loops(self, before: Collection[str]) -> list[str]:
        return [x.var.name for x in loops(self.func.body) if x.var.name not in before]

    def _names(self) -> dict[str, None]:
        return dict.fromkeys(x.var.name for x in loops(self.func.body))

    # -- queries ----------------------------------------------------------------------------------------------------

    def loops_of(self, block: str) -> list[str]:
        """Return the loops around a block, outermost first."""
        return [x.var.name for x in self.nest_of(block)]

    def nest_of(self, block: str) -> tuple[For, ...]:
        return enclosing(self.func, find_block(self.func, block))

    def iter_loops(self, block: str) -> dict[Var, str]:
        """Return the loop of each iterator of a block that has one loop for each, in order."""
        return dict(zip((i.var for i in find_block(self.func, block).iters), self.loops_of(block), strict=True))

    def buffer_of(self, block: str) -> Buffer:
        """Return the buffer that a block writes."""
        return find_block(self.func, block).body.buffer

    def inner_loops(self, block: str, loop: str) -> list[str]:
        """Return the loops around a block that are inside `loop`."""
        names = self.loops_of(block)
        if loop not in names:
            raise ScheduleError(
                f"{self.func.name}: expected a loop around block {block!r}, {', '.join(names)}; got {loop!r}"
            )
        return names[names.index(loop) + 1 :]

    def extent(self, loop: str) -> Expr:
        return find_loop(self.func, loop).extent


PRIMITIVES: Mapping[str, Callable[..., PrimFunc]] = {
    name: method.primitive for name, method in vars(Schedule).items() if isinstance(method, Method)
}
"""Every primitive by its name in traces."""


def _mapped(value: Any, change: Callable[[Expr], Expr | int]) -> Any:
    """Apply `change` to the expressions of an argument; lists become tuples."""
    changed = tuple(change(v) if isinstance(v, Expr) else v for v in each(value))
    return changed if isinstance(value, (list, tuple)) else changed[0]


def _listed(value: Any) -> Any:
    """Return a tuple as a list, and anything else as it is, for the check of arguments."""
    return list(value) if isinstance(value, tuple) else value


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
_WORDS_OF: Mapping[str, str] = {
    "str": "a text",
    "bool": "True or False",
    "int": "a whole number",
    "ExprLike": "a whole number or an expression",
    "ExprLike | None": "a whole number, an expression or None",
    "Sequence[str]": "a list of names",
    "Sequence[int]": "a list of whole numbers",
    "Sequence[ExprLike]": "a list of whole numbers or expressions",
    "Sequence[ExprLike | None]": "a list of whole numbers, expressions or None",
}


def _check_arguments(primitive: str, function: Callable[..., PrimFunc], args: Mapping[str, Any]) -> None:
    parameters = _parameters(function)
    optional = len(function.__defaults__ or ())
    missing = [n for n in list(parameters)[: len(parameters) - optional] if n not in args]
    unknown = [n for n in args if n not in parameters]
    if missing or unknown:
        raise ScheduleError(
            f"{primitive} expects the arguments {', '.join(parameters)}; missing {missing}, not among them {unknown}"
        )
    for name, value in args.items():
        if not _fits(parameters, name, value):
            kind = _WORDS_OF.get(parameters[name], _WORDS_OF["str"])
            raise ScheduleError(f"{primitive} expects {name} as {kind}, got {value!r:.80}")


def _parameters(function: Callable[..., PrimFunc]) -> dict[str, str]:
    """Return the annotation of each parameter after the function."""
    return {n: str(a) for n, a in function.__annotations__.items() if n not in ("func", "return")}


def _fits(parameters: Mapping[str, str], name: str, value: Any) -> bool:
    # other annotations are Literals, which the primitives check
    return name in parameters and _FITS.get(parameters[name], _FITS["str"])(value)


# Bound on a replayed function's statements: a step can double them, and traces are untrusted.
MAX_STATEMENTS = 1000
# Limits of a replay, since records are untrusted: steps, nested loops, and the sum of statements after each step. The sketches of the
# built-in rules need at most a quarter of them.
MAX_STEPS, MAX_DEPTH, MAX_WORK = 400, 40, 100_000


def replay(trace: Trace, func: PrimFunc) -> Schedule:
    """Apply a trace to a function.

    Raises:
        ScheduleError: For a step that does not apply. It gives the step's number and reason, the step as Python, and the loop nest; carets
            mark unknown names and the nodes that the step names.
    """
    if len(trace.steps) > MAX_STEPS:
        raise ScheduleError(f"{func.name}: expected a trace of at most {MAX_STEPS} steps, got {len(trace.steps)}")
    schedule, work = Schedule(func), 0
    for t in trace.tunables:
        schedule.tunables[t.name] = t
    for number, step in enumerate(trace.steps, 1):
        try:
            before = schedule.func
            schedule.apply(step.primitive, **dict(step.args))
            # Measured after each step: a step at most multiplies a function by its arguments, so the limits hold
            # before the next.
            count, depth = _size(schedule.func.body)
            work += count
            if count > MAX_STATEMENTS or depth > MAX_DEPTH or work > MAX_WORK:
                schedule.func = before
                raise ScheduleError(
                    f"{func.name}: expected at most {MAX_STATEMENTS} loops and blocks after a step, {MAX_DEPTH} of them nested, and "
                    f"{MAX_WORK} after all steps together, got {count}, {depth} and {work}"
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
    known_names, parameters = _names_in(func), {} if known is None else _parameters(known)
    for part, (key, value) in zip(args, step.args, strict=True):
        marks = " " * len(part)
        if known is not None and not _fits(parameters, key, value):
            marks = "^" * len(part)
        elif key not in _WORDS:
            for missing in (repr(v) for v in each(value) if isinstance(v, str) and v not in known_names):
                at = part.find(missing)
                marks = marks[:at] + "^" * len(missing) + marks[at + len(missing) :]
        line, under = f"{line}, {part}", f"{under}  {marks}"
    nest = _loop_nest(func, step.names)
    if "^" not in under and "^" not in nest:
        under = "^" * len(line)
    return "\n".join([f"{line})", *([under.rstrip()] if "^" in under else []), nest])


def _names_in(func: PrimFunc) -> set[str]:
    """Return the names that a step can mention: loops, blocks and buffers."""
    return {name for name, _ in _named_nodes(func)}


def _loop_nest(func: PrimFunc, names: Collection[str]) -> str:
    """Print the loops and blocks of `func`, and the buffers among `names`, with a caret line below each named one."""
    printer = Printer(False)
    text = printer.run(func).splitlines()
    header = len(printer.header)
    shown = {printer.line_of[id(s)] + header for s in walk(func.body) if id(s) in printer.line_of}
    marked = {printer.line_of[id(node)] + header for name, node in _named_nodes(func) if name in names}
    lines = []
    for at in sorted(shown | marked):
        lines.append(f"{at + 1:5} | {text[at]}")
        if at in marked:
            start = len(text[at]) - len(text[at].lstrip())
            lines.append(f"      | {' ' * start}{'^' * (len(text[at]) - start)}")
    return "\n".join(lines)


def _named_nodes(func: PrimFunc) -> list[tuple[str, object]]:
    """Pair each name with the node that the printer prints for it."""
    named: list[tuple[str, object]] = [(b.name, b) for b in (*func.buffers, *func.allocs)]
    for s in walk(func.body):
        if isinstance(s, For):
            named.append((s.var.name, s))
        elif isinstance(s, Block):
            named.append((s.name, s))
    return named


def holds(constraint: Expr, values: Mapping[Tunable, int]) -> bool:
    """Return whether a constraint over only tunables is true for these values."""
    result = simplify(substitute(constraint, {t: const(v) for t, v in values.items()}))
    return result is TRUE or as_int(result) == 1
