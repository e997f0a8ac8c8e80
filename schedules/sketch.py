"""Sketches: schedules with free tunables (as in Ansor and MetaSchedule), and their instances."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from relax_tune.errors import ScheduleError, left_out, warn
from relax_tune.ir.arith.bounds import Env, interval
from relax_tune.ir.arith.linear import linear
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import (
    TRUE,
    Expr,
    Load,
    Tunable,
    Var,
    and_,
    conjuncts,
    const,
    free_vars,
    loads,
    substitute,
    transform,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import (
    Block,
    BufferStore,
    For,
    IfThenElse,
    Seq,
    Stmt,
    blocks,
    replace_buffers,
    seq,
    statements,
    substitute_stmt,
)
from relax_tune.plugins import PluginWarning, extended
from relax_tune.schedules.loop_tree import surely_runs
from relax_tune.schedules.occupancy import launch_limits
from relax_tune.schedules.rules.cpu import (
    convolution,
    descents,
    fallback,
    flash_attention,
    flash_decoding,
    gates,
    gathered_reductions,
    gemv,
    injective,
    matmul,
    reductions,
    rowwise,
    scan,
    scatter,
    selection,
    two_pass_reductions,
    windows,
)
from relax_tune.schedules.rules.gpu import convolution as gpu_convolution
from relax_tune.schedules.rules.gpu import fallback as gpu_fallback
from relax_tune.schedules.rules.gpu import flash_attention as gpu_flash_attention
from relax_tune.schedules.rules.gpu import flash_attention_mma as gpu_flash_attention_mma
from relax_tune.schedules.rules.gpu import flash_decoding as gpu_flash_decoding
from relax_tune.schedules.rules.gpu import gates as gpu_gates
from relax_tune.schedules.rules.gpu import gemv as gpu_gemv
from relax_tune.schedules.rules.gpu import injective as gpu_injective
from relax_tune.schedules.rules.gpu import matmul as gpu_matmul
from relax_tune.schedules.rules.gpu import mma as gpu_mma
from relax_tune.schedules.rules.gpu import reductions as gpu_reductions
from relax_tune.schedules.rules.gpu import rowwise as gpu_rowwise
from relax_tune.schedules.rules.gpu import sorting as gpu_sorting
from relax_tune.schedules.rules.gpu import wgmma as gpu_wgmma
from relax_tune.schedules.schedule import Schedule, holds, replay
from relax_tune.schedules.target import HardwareInfo
from relax_tune.schedules.trace import Trace

Rule = Callable[[PrimFunc, HardwareInfo], Iterator[tuple[str, Schedule]]]

# The rules for processors and for GPUs, in the order of their sketches, the fallback last. A new rule of this package is listed here and
# nowhere else. Rules of other packages are entry points (`plugin_rules`).
PROCESSOR_RULES: Mapping[str, Rule] = {
    "gates": gates.sketches,
    "matmul": matmul.sketches,
    "gemv": gemv.sketches,
    "flash_attention": flash_attention.sketches,
    "flash_decoding": flash_decoding.sketches,
    "convolution": convolution.sketches,
    "rowwise": rowwise.sketches,
    "scan": scan.sketches,
    "scatter": scatter.sketches,
    "selection": selection.sketches,
    "descents": descents.sketches,
    "windows": windows.sketches,
    "reductions": reductions.sketches,
    "gathered_reductions": gathered_reductions.sketches,
    "two_pass_reductions": two_pass_reductions.sketches,
    "injective": injective.sketches,
    "fallback": fallback.sketches,
}
GPU_RULES: Mapping[str, Rule] = {
    "gpu_gates": gpu_gates.sketches,
    "gpu_mma": gpu_mma.sketches,
    "gpu_wgmma": gpu_wgmma.sketches,
    "gpu_matmul": gpu_matmul.sketches,
    "gpu_gemv": gpu_gemv.sketches,
    "gpu_flash_attention_mma": gpu_flash_attention_mma.sketches,
    "gpu_flash_attention": gpu_flash_attention.sketches,
    "gpu_flash_decoding": gpu_flash_decoding.sketches,
    "gpu_convolution": gpu_convolution.sketches,
    "gpu_sorting": gpu_sorting.sketches,
    "gpu_rowwise": gpu_rowwise.sketches,
    "gpu_reductions": gpu_reductions.sketches,
    "gpu_injective": gpu_injective.sketches,
    "gpu_fallback": gpu_fallback.sketches,
}
RULES: Mapping[str, Rule] = {**PROCESSOR_RULES, **GPU_RULES}
ENTRY_POINTS = "relax_tune.rules"
"""The group of entry points by which other packages provide rules."""


def rules_for(hardware: HardwareInfo) -> Mapping[str, Rule]:
    """Return the rules that apply to the hardware: the built-in ones, then rules of other packages, the fallback last.

    Raises:
        BuildError: As `plugin_rules`.
    """
    rules = {name: rule for name, rule in RULES.items() if (name in GPU_RULES) == hardware.is_gpu}
    last, fallback_rule = rules.popitem()
    return {**rules, **plugin_rules(), last: fallback_rule}


@cache
def plugin_rules() -> Mapping[str, Rule]:
    """Return the rules of other packages, by the names of their entry points in the group `relax_tune.rules`.

    Such a rule sees every device, and names its sketches `NAME` or `NAME.FORM`, after its entry point. The entry points are read once per
    process.

    Raises:
        BuildError: For a name that is in use, and for an entry point that is not a function.
    """
    # sketches of GPU rules are named without the prefix, and records find their rule by the name of the sketch
    used = {**RULES, **{name.removeprefix("gpu_"): rule for name, rule in GPU_RULES.items()}}
    rules = extended(used, ENTRY_POINTS, callable, "a function of a PrimFunc and a HardwareInfo")
    return {name: _checked(name, rule) for name, rule in rules.items() if name not in used}


def _checked(name: str, rule: Rule) -> Rule:
    """Return a rule of another package whose errors and malformed sketches end its sketches with a warning."""

    def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
        try:
            for sketch in rule(func, hardware):
                sketch_name, s = sketch
                if sketch_name.partition(".")[0] != name or not isinstance(s, Schedule):
                    raise TypeError(f"expected a Schedule under a name such as {name}.form, got {sketch!r:.80}")
                if missing := [n for n in s.tunables if any(n not in guess for guess in s.guesses)]:
                    raise ValueError(
                        f"expected guesses of all tunables of {sketch_name}, got one without {', '.join(missing)}"
                    )
                yield sketch
        except Exception as error:  # the package's code may raise anything
            warn(
                f"entry point {ENTRY_POINTS} {name!r} failed for function {func.name!r}, and has no further sketches for it: "
                f"{type(error).__name__}: {error}. Report it to the authors of the package, or remove the package",
                PluginWarning,
            )

    return sketches


def generic_schedule(func: PrimFunc, hardware: HardwareInfo) -> Schedule:
    """Return the schedule without tunables that fits every function, for hardware of this kind.

    If the fallback rule for processors fails, it is the unchanged function, which runs on one thread.
    """
    if hardware.is_gpu:
        ((_, schedule),) = gpu_fallback.sketches(func, hardware)
        return schedule
    with left_out("the schedule fallback", func.name):
        ((_, schedule),) = fallback.sketches(func, hardware)
        return schedule
    return Schedule(func)


@dataclass(frozen=True, slots=True)
class Sketch:
    """A scheduled function with free tunables.

    Attributes:
        trace: The primitives that were applied.
        constraints: Facts that its tunables must satisfy.
        guesses: Values to try first.
    """

    name: str
    func: PrimFunc
    trace: Trace
    constraints: tuple[Expr, ...]
    guesses: tuple[Mapping[str, int], ...] = ()

    @property
    def tunables(self) -> tuple[Tunable, ...]:
        return self.trace.tunables

    @property
    def layout_tunables(self) -> tuple[str, ...]:
        """The names of the tunables that the layouts of its packed weights depend on."""
        packed = [b.body.buffer for b in blocks(self.func.body) if b.role == "prepack"]
        named = {v.name for buffer in packed for v in free_vars(*buffer.shape)}
        return tuple(t.name for t in self.tunables if t.name in named)


def generate_sketches(
    func: PrimFunc, hardware: HardwareInfo, rules: Mapping[str, Rule] | None = None
) -> tuple[Sketch, ...]:
    """Return all sketches of a function, by the rules for the hardware or the given ones.

    The last sketch is always the fallback, which fits every function.
    """
    return tuple(iter_sketches(func, hardware, rules))


def iter_sketches(func: PrimFunc, hardware: HardwareInfo, rules: Mapping[str, Rule] | None = None) -> Iterator[Sketch]:
    """Yield the sketches of `generate_sketches`, each generated on demand.

    A rule that raises an error has no further sketches, and a sketch whose limits cannot be stated is left out, with a warning.
    """
    for rule_name, rule in (rules_for(hardware) if rules is None else rules).items():
        schedules = rule(func, hardware)
        for name, s in _until_error(schedules, rule_name, func):
            sketch = None
            with left_out(f"the schedule {name}", func.name):
                # Added as constraints over tunables, so that the search never proposes what the driver would refuse.
                for fact in launch_limits(s.func, hardware) if hardware.is_gpu else ():
                    s.require(fact)
                sketch = Sketch(name, s.func, s.trace, tuple(s.constraints), _legal_guesses(s))
            if sketch is not None:
                yield sketch


def _until_error(
    schedules: Iterator[tuple[str, Schedule]], rule: str, func: PrimFunc
) -> Iterator[tuple[str, Schedule]]:
    """Yield the schedules of a rule until it ends or raises an error, which becomes a warning."""
    while True:
        schedule = None
        with left_out(f"the rule {rule or 'for epilogues'}", func.name):
            schedule = next(schedules, None)
        if schedule is None:
            return
        yield schedule


def epilogues(func: PrimFunc, hardware: HardwareInfo) -> tuple[Sketch, ...]:
    """Return the sketches for the epilogue kernel of a library call; none if it has reductions."""
    return generate_sketches(func, hardware, {"": (gpu_injective if hardware.is_gpu else injective).epilogues})


def _legal_guesses(s: Schedule) -> tuple[Mapping[str, int], ...]:
    declared = s.tunables.values()
    return tuple(g for g in s.guesses if all(holds(c, {t: g[t.name] for t in declared}) for c in s.constraints))


def instantiate(sketch: Sketch, values: Mapping[str, int]) -> PrimFunc:
    """Replace the sketch's tunables by values and simplify.

    Raises:
        ScheduleError: For a missing tunable or a value outside its domain.
    """
    mapping: dict[Var, Expr] = {}
    for t in sketch.tunables:
        value = values.get(t.name)
        if value not in t.domain:
            raise ScheduleError(f"{sketch.name}: tunable {t.name!r} expects one of {list(t.domain)}, got {value!r}")
        mapping[t] = const(value)
    return simplify_func(_substitute(sketch.func, mapping))


def replay_with(trace: Trace, func: PrimFunc, values: Mapping[str, int]) -> PrimFunc:
    """Replay the trace with numbers in place of tunables; means the same as `instantiate` of its sketch."""
    return simplify_func(replay(trace.with_values(values), func).func)


def _substitute(func: PrimFunc, mapping: Mapping[Var, Expr]) -> PrimFunc:
    body = substitute_stmt(func.body, mapping)
    swaps = {}
    for a in func.allocs:
        shape = tuple(substitute(d, mapping) for d in a.shape)
        row = a.row_alignment and (substitute(a.row_alignment[0], mapping), a.row_alignment[1])
        if shape != a.shape or row != a.row_alignment:
            swaps[a] = replace(a, shape=shape, row_alignment=row)
    return replace(func, body=replace_buffers(body, swaps), allocs=tuple(swaps.get(a, a) for a in func.allocs))


def simplify_func(func: PrimFunc) -> PrimFunc:
    """Simplify extents, bindings and predicates under the loops' bounds, and remove loops of one iteration.

    Loops of asynchronous copies stay, since they mark how their one iteration copies.
    """
    shapes = {a: replace(a, shape=tuple(simplify(d) for d in a.shape)) for a in func.allocs}
    shapes = {a: b for a, b in shapes.items() if a.shape != b.shape}
    parts = statements(func.body)
    body = replace_buffers(seq(*map(_simplify_part, parts)), shapes)
    return replace(func, body=body, allocs=tuple(shapes.get(a, a) for a in func.allocs))


def _simplify_part(s: Stmt) -> Stmt:
    """Simplify a top-level statement and keep it one statement: consecutive top-level statements are separated by a barrier."""
    new = _simplify_stmt(s, Env(), {})
    if isinstance(s, For) and isinstance(new, Seq) and new.stmts:
        return For(s.var, const(1), new)
    return new


def _simplify_stmt(s: Stmt, env: Env, known: Mapping[Var, Expr]) -> Stmt:
    def fix(e: Expr) -> Expr:
        return simplify(substitute(e, known), env)

    if isinstance(s, For):
        extent = substitute(s.extent, known)
        # extents are also evaluated outside of the loops, for a grid: a fact that holds only inside an outer loop must not
        # introduce a division by an expression that is zero outside
        extent = simplify(extent, env if any(v in env.bounds for v in free_vars(extent)) else None)
        if extent is const(1) and not s.marks.async_copy:
            return _simplify_stmt(s.body, env, {**known, s.var: const(0)})
        return replace(
            s, extent=extent, body=_simplify_stmt(s.body, env.with_loop(s.var, extent, surely_runs(s)), known)
        )
    if isinstance(s, Seq):
        return seq(*(_simplify_stmt(c, env, known) for c in s.stmts))
    if isinstance(s, IfThenElse):
        orelse = None if s.orelse is None else _simplify_stmt(s.orelse, env, known)
        return IfThenElse(fix(s.cond), _simplify_stmt(s.then, env, known), orelse)
    if isinstance(s, Block):
        # Extents of iterators do not depend on the loops around, so they are simplified without their bounds.
        iters = tuple(replace(i, extent=simplify(i.extent)) for i in s.iters)
        conditions = conjuncts(fix(s.predicate))
        left = [c for c in conditions if not _in_range(c, env)]
        # conditions on the steps of a reduction do not hold for its initial value
        pairs = () if s.init is None else zip(s.iters, s.bindings)
        steps = {v for i, b in pairs if i.kind == "reduce" for v in free_vars(b)}
        of_steps = [c for c in left if not steps.isdisjoint(free_vars(c))]
        for c in tuple(left):
            # A condition may be dropped if the others imply it. One on spatial iterators must follow from such ones
            # only.
            rest = [d for d in left if d is not c and (c in of_steps or d not in of_steps)]
            if rest and simplify(c, _where(rest, env)) is TRUE:
                left = [d for d in left if d is not c]
        iterators = {i.var for i in s.iters}
        body = BufferStore(
            s.body.buffer, tuple(_shaped(e, iterators) for e in s.body.indices), _shaped(s.body.value, iterators)
        )
        return replace(s, iters=iters, bindings=tuple(fix(b) for b in s.bindings), body=body, predicate=and_(*left))
    assert isinstance(s, BufferStore)
    return BufferStore(s.buffer, tuple(fix(i) for i in s.indices), fix(s.value))


def _shaped(e: Expr, iters: Collection[Var]) -> Expr:
    """Simplify the integer subexpressions of `e` that only shape symbols determine."""
    simplified: dict[Expr, Expr] = {}
    stack, visited = [e], set[Expr]()
    while stack:
        n = stack.pop()
        if n in visited:
            continue
        visited.add(n)
        if isinstance(n, Load):
            stack.extend(n.indices)
        elif not n.op or (n.dtype.is_int and not loads(n) and not any(v in iters for v in free_vars(n))):
            simplified[n] = simplify(n)
        else:
            stack.extend(n.children)
    return transform(e, simplified.get) if any(a is not b for a, b in simplified.items()) else e


def _where(conditions: Sequence[Expr], env: Env) -> Env:
    """Tighten the bounds of loop variables by conditions of the form `v + x < y`."""
    for c in conditions:
        if c.op != "lt" or not c.args[0].dtype.is_int:
            continue
        for v in free_vars(c.args[0]):
            parts = linear(c.args[0], (v,)) if v in env.bounds else None
            if parts is not None and parts[0].get(v) is const(1) and not set(free_vars(parts[1])) & env.bounds.keys():
                env = env.with_loop(v, simplify(c.args[1] - parts[1]))
    return env


def _in_range(condition: Expr, env: Env) -> bool:
    """Return whether the ranges of both sides settle a comparison.

    Digits of fused loops have ranges that `simplify` does not see.
    """
    if condition.op not in ("lt", "le") or not condition.args[0].dtype.is_int:
        return False
    high, low = interval(condition.args[0], env)[1], interval(condition.args[1], env)[0]
    return high is not None and low is not None and (high < low if condition.op == "lt" else high <= low)
