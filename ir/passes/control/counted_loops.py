"""Counted loops: functions that call themselves a known number of times, with one subgraph for an iteration.

A loop over `index` is written as a recursion (`ir/frontend/shared/handlers/control`). It counts if its condition compares the index with
a limit that no iteration changes, its states keep their annotations, and its rows only grow by one row an iteration:

    if index < limit: loop(index + 1, new states, concat(rows, row), other arguments unchanged) else: (states, rows)

The machine then repeats the subgraph without a call, a check and a concatenation for each iteration.

Tests: `tests/ir/passes/control/test_counted_loops.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.check.aliasing import is_view
from relax_tune.ir.core import graph as g
from relax_tune.ir.core.expr import Expr, Op, Var, const, free_vars
from relax_tune.ir.core.graph_walk import is_impure, operator_of, used_vars
from relax_tune.ir.core.struct_info import PrimInfo, info_parts, info_symbols
from relax_tune.ir.deduce.relations import differences, is_known
from relax_tune.ir.op.indexing.movement import Concat
from relax_tune.ir.op.shapes import ShapeOperator
from relax_tune.ir.rewrite.dead_code import without_dead_code


@dataclass(frozen=True, slots=True, eq=False)
class LoopForm:
    """A function that is a counted loop.

    Attributes:
        index: The symbol that counts.
        limit: The index at which the loop ends.
        states: The value that each parameter has in the next iteration, by position: a parameter or a result of `steps`.
        rows: The value of the row that is appended to each parameter, by position.
        steps: Tensor operations of an iteration.
        appends: The concatenations, and views of rows that only they read.
        again: The call of the next iteration.
    """

    index: Var
    limit: Expr
    states: Mapping[int, g.GVar]
    rows: Mapping[int, g.GVar]
    steps: Sequence[g.AnyBinding]
    appends: Sequence[g.AnyBinding]
    again: g.AnyBinding


@dataclass(frozen=True, slots=True)
class CountedLoop:
    """The parts of a counted loop after outlining. Parameters are given by position.

    Attributes:
        part: Name of the subgraph of an iteration.
        appending: Name of the subgraph that appends the rows, which only the recursion calls; None without rows.
        index: The symbol that counts.
        limit: The index at which the loop ends.
        states, rows: As of `LoopForm`; a value is the number of a result of `part`, or the number of a parameter behind all results.
        results: Number of results of `part`.
    """

    part: str
    appending: str | None
    index: Var
    limit: Expr
    states: Mapping[int, int]
    rows: Mapping[int, int]
    results: int


def loop_form(f: g.Function) -> LoopForm | None:
    """Return the parts of a function that is a counted loop; None for another function."""
    branch = f.bindings[0] if len(f.bindings) == 1 else None
    if branch is None or f.ret is not branch.var or not isinstance(branch.value, g.If) or not f.pure:
        return None
    then, orelse = branch.value.then, branch.value.orelse
    counter = _counter(f, branch.value.cond)
    bindings = [b for block in without_dead_code(then.blocks, then.ret) for b in block.bindings]
    ends = isinstance(orelse.ret, g.TupleValue) and all(v in f.params for v in orelse.ret.fields)
    if counter is None or not bindings or then.ret is not bindings[-1].var or orelse.bindings or not ends:
        return None
    *body, again = bindings
    if not isinstance(again.value, g.CallFunction) or not _calls(again.value, f.name):
        return None
    return _Reader(f, body, again, *counter).form(again.value.args)


def _counter(f: g.Function, cond: g.Value) -> tuple[Var, Expr, int] | None:
    """Return index and limit of a condition `index < limit`, and the position of the index among the parameters."""
    test = cond.value if isinstance(cond, g.PrimValue) else None
    if not isinstance(test, Op) or test.op != "lt":
        return None
    index, limit = test.args
    at = next((n for n, p in enumerate(f.params) if isinstance(p.info, PrimInfo) and p.info.value is index), None)
    if at is None or not isinstance(index, Var) or index in free_vars(limit):
        return None
    return index, limit, at


def _calls(value: g.CallFunction, name: str) -> bool:
    return isinstance(value.callee, g.FunctionRef) and value.callee.name == name


class _Reader:
    """Reads the arguments of the next iteration."""

    def __init__(
        self, f: g.Function, body: Sequence[g.AnyBinding], again: g.AnyBinding, index: Var, limit: Expr, at: int
    ) -> None:
        self.f, self.body, self.again, self.index, self.limit, self.at = f, body, again, index, limit, at
        self.values = {b.var: b.value for b in body}
        self.readers: dict[g.GVar, list[g.AnyBinding]] = {}
        for b in (*body, again):
            for v in used_vars(b.value):
                self.readers.setdefault(v, []).append(b)
        self.appends: dict[g.GVar, None] = {}

    def form(self, args: Sequence[g.Value]) -> LoopForm | None:
        states: dict[int, g.GVar] = {}
        rows: dict[int, g.GVar] = {}
        for n, (p, arg) in enumerate(zip(self.f.params, args, strict=True)):
            if isinstance(p.info, PrimInfo):
                if not self.counts(n, p.info, arg):
                    return None
            elif (row := self.row(p, arg)) is not None:
                rows[n] = row
            elif arg is not p:
                if not isinstance(arg, g.GVar) or not self.is_state(p, arg):
                    return None
                states[n] = arg
        steps = [b for b in self.body if b.var not in self.appends]
        tensors = [p for p in self.f.params if not isinstance(p.info, PrimInfo)]
        computed = any(v in self.values for v in (*states.values(), *rows.values()))
        grown = [self.f.params[n] for n in rows]
        if not computed or not all(map(_is_step, steps)) or not all(self.is_fixed(p, p in grown) for p in tensors):
            return None
        appends = [b for b in self.body if b.var in self.appends]
        return LoopForm(self.index, self.limit, states, rows, steps, appends, self.again)

    def counts(self, n: int, info: PrimInfo, arg: g.Value) -> bool:
        """Return whether a number is the index plus 1, or stays as it is."""
        if not isinstance(arg, g.PrimValue) or info.value is None:
            return False
        return simplify(arg.value - info.value) is const(1 if n == self.at else 0)

    def row(self, p: g.GVar, arg: g.Value) -> g.GVar | None:
        """Return the row that an iteration appends to the parameter `p`; None if it does something else with it."""
        if not isinstance(arg, g.GVar) or not isinstance(value := self.values.get(arg), g.Call):
            return None
        concat = operator_of(value, Concat)
        if concat is None or concat.axis != 0 or len(value.args) != 2:
            return None
        old, row = value.args
        if old is not p or not isinstance(row, g.GVar) or not is_known(p.info) or not is_known(row.info):
            return None
        # Any other reader would see the rows so far.
        only = len(self.readers[p]) == len(self.readers[arg]) == 1 and self.again.value.operands.count(arg) == 1
        if not only:
            return None
        (first, *dims), (_, *old_dims) = row.info.shape or (None,), p.info.shape or (None,)
        if first is not const(1) or any(x is not y for x, y in zip(dims, old_dims, strict=True)):
            return None
        self.appends[arg] = None
        # Memory under other dims is the same row.
        while (inner := self.values.get(row)) is not None and is_view(inner) and len(self.readers[row]) == 1:
            (operand,) = inner.operands
            if not isinstance(operand, g.GVar):
                break
            self.appends[row] = None
            row = operand
        return row

    def is_state(self, p: g.GVar, new: g.GVar) -> bool:
        """Return whether a value of the next iteration has the annotation of its parameter."""
        return is_known(p.info) and is_known(new.info) and next(differences(p.info, new.info), None) is None

    def is_fixed(self, p: g.GVar, grows: bool) -> bool:
        """Return whether no iteration changes the dims of a tensor, but for the first one of rows."""
        if not is_known(p.info):
            return False
        if not grows:
            return self.index not in info_symbols(p.info)
        first, *rest = p.info.shape or ()
        return first is self.index and self.index not in free_vars(*rest)


def _is_step(b: g.AnyBinding) -> bool:
    """Return whether a binding is a tensor operation of known dims, without effects."""
    value = b.value
    if not isinstance(b, g.Binding) or is_impure(value) or operator_of(value, ShapeOperator) is not None:
        return False
    if not isinstance(value, (g.Call, g.CallTIR, g.CallDPSLibrary, g.TupleItem)):
        return False
    return all(is_known(part) for x in (b.var, *value.operands) for part in info_parts(x.info))
