"""Scatters: reductions of the terms whose index, read from memory, is the position of a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relax_tune.ir.core.expr import Expr, Var, conjuncts, free_vars
from relax_tune.ir.core.stmt import Block, IterVar
from relax_tune.ir.deduce.pattern_kinds import accumulated, starts_neutral


@dataclass(frozen=True, slots=True)
class ScatterPattern:
    """A reduction `Y[i, r] = op_m select(index(m, r) == i and guard(m, r), term(m, r), neutral)`.

    targets: the index of each iterator i; step: the iterator of m; term, guard: conditions; rows: the iterators r
    """

    operation: str
    targets: Mapping[Var, Expr]
    step: IterVar
    term: Expr
    guard: tuple[Expr, ...]
    neutral: Expr
    rows: tuple[IterVar, ...]


def scatter(block: Block) -> ScatterPattern | None:
    """Return the pattern of a scatter; None for any other block."""
    value, steps = accumulated(block), [i for i in block.iters if i.kind == "reduce"]
    if value is None or block.init is None or not starts_neutral(block) or len(steps) != 1 or value.op != "select":
        return None
    (condition, term, neutral), (step,) = value.args, steps
    spatial = [i for i in block.iters if i.kind == "spatial"]
    where = block.body.indices
    if neutral is not block.init.value or len(set(where)) != len(where) or set(where) != {i.var for i in spatial}:
        return None
    targets, guard = dict[Var, Expr](), list[Expr]()
    for c in conjuncts(condition):
        for own, index in (c.args, c.args[::-1]) if c.op == "eq" else ():
            if isinstance(own, Var) and own in where and own not in targets and step.var in free_vars(index):
                targets[own] = index
                break
        else:
            guard.append(c)
    if not targets or set(targets) & set(free_vars(term, *targets.values(), *guard)):
        return None
    rows = tuple(i for i in spatial if i.var not in targets)
    return ScatterPattern(block.body.value.op, targets, step, term, tuple(guard), neutral, rows)
