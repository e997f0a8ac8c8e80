"""Well-formedness of programs. A broken rule is a VerifyError that shows the statement.

Rules of tensor functions:

* every name used is in scope; ranks and dtypes fit;
* block iterators are bound once, by enclosing loops;
* only spatial iterators choose the stored element, inside the buffer if both are numbers; reductions have an
  initial value;
* inputs are never written, and outputs are.

`relax_tune.ir.check.verify_graph` has the rules of graph functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn, Union

from relax_tune.errors import VerifyError
from relax_tune.ir.check.verify_graph import verify_function
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.core.expr import (
    TRUE,
    Const,
    Expr,
    Tunable,
    Var,
    as_int,
    const,
    free_vars,
    loads,
    postorder,
)
from relax_tune.ir.core.function import ExternFunc, IRModule, PrimFunc
from relax_tune.ir.core.graph import Function
from relax_tune.ir.core.scalar_ops import SCALAR_OPS
from relax_tune.ir.core.stmt import AXES, Block, BufferStore, For, IfThenElse, Seq, Stmt, blocks, loops, unknown, walk
from relax_tune.ir.hardware.swizzle import may_swizzle
from relax_tune.ir.text.printer import excerpt


def verify(x: Union[IRModule, PrimFunc, Function]) -> None:
    """Check every rule of the IR. A graph function that calls others needs its module.

    Raises:
        VerifyError: the first broken rule: what was expected, what was given, and the line.
    """
    match x:
        case PrimFunc():
            _Prim(x).run()
        case Function():
            verify_function(x, IRModule({x.name: x}))
        case IRModule():
            _verify_module(x)


def _verify_module(x: IRModule) -> None:
    declared = [b.var for b in x.bounds]
    for b in x.bounds:
        if b.lower < 0 or (b.upper is not None and b.upper < b.lower) or declared.count(b.var) > 1:
            raise VerifyError(f"bound of {b.var.name}: expected 0 <= lower <= upper, once; got {b.lower} and {b.upper}")
    for key, f in x.functions.items():
        if f.name != key and not isinstance(f, ExternFunc):
            raise VerifyError(f"expected the name of function {key!r} to equal its key, got {f.name!r}")
        match f:
            case PrimFunc():
                _Prim(f).run()
            case Function():
                verify_function(f, x)


class _Prim:
    def __init__(self, func: PrimFunc) -> None:
        self.func = func
        self.known = {*func.buffers, *func.allocs}
        self.symbols = {d for b in func.buffers for d in b.shape if isinstance(d, Var)} | set(func.scalar_params)
        self.written: set[Buffer] = set()
        self.prepared = set(func.consts)

    def fail(self, message: str, node: object) -> NoReturn:
        raise VerifyError(f"{self.func.name}: {message}\n{excerpt(self.func, node)}")

    def run(self) -> None:
        self.signature()
        self.names()
        self.stmt(self.func.body, self.symbols)
        self.data_flow()

    def signature(self) -> None:
        f = self.func
        everything = [*f.params, *f.allocs]
        for i, p in enumerate(everything):
            if p in everything[:i]:
                self.fail(f"expected every parameter and buffer once, got {p.name} twice", p)
        if not 0 < f.outputs <= len(f.buffers):
            self.fail(f"expected 1 to {len(f.buffers)} outputs, got {f.outputs}", f)
        for b in f.consts:
            if b not in f.input_buffers:
                self.fail(f"constant {b.name} is not an input", b)
        for b in (*f.buffers, *f.allocs):
            if b.row_alignment is not None:
                factor = as_int(b.row_alignment[0])
                # The caller lays out global buffers, so their rows cannot be padded.
                if b.scope == "global" or b.row_alignment[1] < 0 or (1 if factor is None else factor) < 1:
                    self.fail(
                        f"buffer {b.name}: expected rows of a local or shared buffer, by a positive factor, got {b.row_alignment}",
                        b,
                    )
                self.scope((b.row_alignment[0],), set(), b, f"the rows of {b.name}")
            if b.swizzle and (
                b.scope != "shared" or b.row_alignment != (const(b.swizzle), 0) or not may_swizzle(b, b.swizzle)
            ):
                self.fail(
                    f"buffer {b.name}: expected rows of whole vectors of 4 to 16 bytes in shared memory to swizzle, got "
                    f"vectors of {b.swizzle} elements, rows {b.row_alignment}",
                    b,
                )
            for d in b.shape:
                self.types((d,), b)
                if not d.dtype.is_int:
                    self.fail(f"buffer {b.name}: expected integer dims, got {d!r} of type {d.dtype}", b)
                self.scope((d,), self.symbols, b, f"the shape of {b.name}")
                if loads(d):
                    self.fail(f"the shape of {b.name} reads a buffer", b)

    def names(self) -> None:
        """Require unique names of blocks, loops and buffers, unless lowered: schedules refer to names."""
        f = self.func
        self.unique("buffer", [(b.name, b) for b in (*f.buffers, *f.allocs)])
        blocks_of = blocks(f.body)
        self.unique("block", [(b.name, b) for b in blocks_of])
        if blocks_of:
            self.unique("loop", [(x.var.name, x) for x in loops(f.body)])

    def unique(self, what: str, named: Sequence[tuple[str, object]]) -> None:
        names: set[str] = set()
        for name, node in named:
            if name in names:
                self.fail(f"expected distinct {what} names, got {name!r} twice", node)
            names.add(name)

    def data_flow(self) -> None:
        f = self.func
        for b in f.output_buffers:
            if b not in self.written:
                self.fail(f"output {b.name} is never written", b)
        for s in walk(f.body):
            for e in _exprs(s):
                for x in loads(e):
                    if x.buffer in f.allocs and x.buffer not in self.written:
                        self.fail(f"{x.buffer.name} is read, but nothing writes it", s)

    # statements

    def stmt(self, s: Stmt, scope: set[Var]) -> None:
        match s:
            case For():
                self.loop(s, scope)
                # A new set: the variable must be unknown again after the loop.
                scope = scope | {s.var}
            case IfThenElse(cond):
                self.uses((cond,), scope, s)
                if cond.dtype is not bool_:
                    self.fail(f"expected a condition, got {cond!r} of type {cond.dtype}", s)
            case BufferStore():
                self.store(s, scope, s)
            case Block():
                self.block(s, scope)
            case Seq():
                pass
            case _:
                raise unknown(s, "the verifier")
        for c in s.children:
            self.stmt(c, scope)

    def loop(self, s: For, scope: set[Var]) -> None:
        self.uses((s.extent,), scope, s)
        if s.var in scope:
            self.fail(f"loop variable {s.var.name} is already a symbol or an enclosing loop's variable", s)
        if not s.extent.dtype.is_int or not s.var.dtype.is_int:
            self.fail(f"expected an integer extent and variable, got {s.extent.dtype} and {s.var.dtype}", s)
        if isinstance(s.var, Tunable):
            self.fail(f"loop variable {s.var.name} is a tunable", s)
        # Code for such loops is written out per iteration. An extent with tunables becomes a number before that.
        if s.kind in ("vectorized", "unrolled") and not isinstance(s.extent, Const) and not _open(s.extent):
            self.fail(f"expected a constant extent for a {s.kind} loop, got {s.extent!r}", s)
        if s.axis not in range(AXES.get(s.kind, 1)):
            self.fail(f"expected a grid axis of a {s.kind} loop below {AXES.get(s.kind, 1)}, got {s.axis}", s)

    def store(self, s: BufferStore, scope: set[Var], at: Stmt) -> None:
        self.uses((*s.indices, s.value), scope, at)
        self.access(s.buffer, s.indices, at)
        if s.value.dtype is not s.buffer.dtype:
            self.fail(f"expected a value of type {s.buffer.dtype} for {s.buffer.name}, got {s.value.dtype}", at)
        if s.buffer in self.func.consts:
            self.fail(f"constant {s.buffer.name} is written", at)
        if s.buffer in self.func.input_buffers:
            self.fail(f"input {s.buffer.name} is written; only outputs and allocated buffers may be", at)
        self.written.add(s.buffer)

    def block(self, b: Block, scope: set[Var]) -> None:
        variables = [i.var for i in b.iters]
        if len(b.iters) != len(b.bindings):
            self.fail(
                f"block {b.name!r}: expected one binding for each of {len(variables)} iterators, got {len(b.bindings)}",
                b,
            )
        for i, v in enumerate(variables):
            if v in variables[:i] or v in scope:
                self.fail(f"block {b.name!r}: iterator {v.name} is bound already", b)
        extents = tuple(i.extent for i in b.iters)
        self.types((*extents, *b.bindings, b.predicate), b)
        self.scope(extents, scope, b, f"the domains of block {b.name!r}")
        self.scope((*b.bindings, b.predicate), scope, b, f"bindings and predicate of block {b.name!r}")
        for e in (*extents, *b.bindings):
            # Bindings that depend on data would make every proof about a block (its footprint, which instances are
            # distinct) impossible.
            if loads(e) or not e.dtype.is_int:
                self.fail(f"block {b.name!r}: expected integer domains and bindings that read no buffer, got {e!r}", b)
        if b.predicate.dtype is not bool_:
            self.fail(f"block {b.name!r}: expected a condition as predicate, got {b.predicate!r}", b)
        inner = scope | set(variables)
        self.store(b.body, inner, b)
        reduced = {i.var for i in b.iters if i.kind == "reduce"}
        # If a reduce iterator chose the element, the number of terms of each result would be unknown, and `init`
        # would run in the middle of a sum.
        chosen = set(free_vars(*b.body.indices)) & reduced
        if chosen:
            name = min(v.name for v in chosen)
            self.fail(f"block {b.name!r}: reduce iterator {name} chooses what is stored; make it spatial", b)
        numbers = {i.var: as_int(i.extent) or 0 for i in b.iters}
        for index, dim in zip(b.body.indices, b.body.buffer.shape) if b.predicate is TRUE else ():
            limit = as_int(dim)
            if isinstance(index, Var) and limit is not None and numbers.get(index, 0) > limit:
                self.fail(
                    f"block {b.name!r}: expected to store in {b.body.buffer.name} below {limit}, got {index.name} below {numbers[index]}",
                    b,
                )
        if b.init is not None:
            self.init(b, b.init, inner, reduced)
        # A body that does not read its own buffer would keep only the last term.
        elif reduced and all(x.buffer is not b.body.buffer for x in loads(b.body.value)):
            self.fail(f"block {b.name!r}: a reduction needs init() or must read {b.body.buffer.name}", b)
        if b.role == "prepack":
            for x in loads(b.body.value, *b.body.indices):
                if x.buffer not in self.prepared | {b.body.buffer}:
                    self.fail(f"block {b.name!r} prepacks constants, but reads {x.buffer.name}", b)
            self.prepared.add(b.body.buffer)

    def init(self, b: Block, init: BufferStore, scope: set[Var], reduced: set[Var]) -> None:
        self.store(init, scope, b)
        if not reduced:
            self.fail(f"block {b.name!r}: init() without a reduce iterator", b)
        if init.buffer is not b.body.buffer or init.indices != b.body.indices:
            self.fail(f"block {b.name!r}: expected init() to store where the block does", b)
        if set(free_vars(init.value)) & reduced or any(x.buffer is b.body.buffer for x in loads(init.value)):
            self.fail(f"block {b.name!r}: the initial value depends on the reduction", b)

    # expressions

    def uses(self, exprs: Sequence[Expr], scope: set[Var], at: Stmt) -> None:
        self.types(exprs, at)
        self.scope(exprs, scope, at, "this statement")
        for x in loads(*exprs):
            self.access(x.buffer, x.indices, at)

    def access(self, buffer: Buffer, indices: Sequence[Expr], at: Stmt) -> None:
        if buffer not in self.known:
            self.fail(f"buffer {buffer.name} is neither a parameter nor allocated", at)
        if len(indices) != len(buffer.shape):
            self.fail(f"buffer {buffer.name} has {len(buffer.shape)} dims, got {len(indices)} indices", at)
        for i in indices:
            if not i.dtype.is_int:
                self.fail(f"expected integer indices of {buffer.name}, got {i!r} of type {i.dtype}", at)

    def scope(self, exprs: Iterable[Expr], scope: set[Var], at: object, what: str) -> None:
        for v in free_vars(*exprs):
            if v not in scope and not isinstance(v, Tunable):
                known = ", ".join(sorted(x.name for x in scope)) or "nothing"
                self.fail(f"{v.name} is not in scope in {what}; in scope: {known}", at)

    def types(self, exprs: Iterable[Expr], at: object) -> None:
        for n in postorder(exprs):
            problem = _type_problem(n) if n.op else None
            if problem:
                self.fail(f"{problem} in {n!r}", at)


def _open(e: Expr) -> bool:
    return any(isinstance(v, Tunable) for v in free_vars(e))


def _exprs(s: Stmt) -> tuple[Expr, ...]:
    if isinstance(s, BufferStore):
        return (*s.indices, s.value)
    if isinstance(s, Block):
        return (*s.body.indices, s.body.value, *(() if s.init is None else (s.init.value,)))
    return (s.cond,) if isinstance(s, IfThenElse) else ()


def _type_problem(n: Expr) -> str | None:
    """Return the type error of an operation, or None."""
    kind, types = SCALAR_OPS[n.op].kind, [a.dtype for a in n.args]
    if n.op == "cast":
        return None
    if n.op == "bitcast":
        fits = n.dtype.bits == types[0].bits and bool_ not in (n.dtype, types[0])
        return None if fits else f"expected types of as many bits for bitcast, got {types[0]} and {n.dtype}"
    if n.op == "select":
        if types[0] is not bool_:
            return f"expected a condition for select, got {types[0]}"
        types = types[1:]
    if any(t is not types[0] for t in types):
        return f"expected operands of one type, got {' and '.join(map(str, types))}"
    if types[0].is_small and n.op != "select":
        return f"expected a type with arithmetic for {n.op}, got {types[0]}; cast it first"
    if kind == "logic" and types[0] is not bool_:
        return f"expected conditions, got {types[0]}"
    if (kind == "float" or (kind == "function" and n.op != "abs")) and not types[0].is_float:
        return f"expected floats for {n.op}, got {types[0]}"
    if kind in ("integer", "bits") and not types[0].is_int:
        return f"expected integers for {n.op}, got {types[0]}"
    if n.dtype is not (bool_ if SCALAR_OPS[n.op].gives_bool else types[0]):
        return f"expected the result type {types[0]}, got {n.dtype}"
    return None
