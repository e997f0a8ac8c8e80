"""Scatters: each result reduces the terms whose index, read from memory, is its position.

Tests: `tests/schedules/primitives/reduction/test_scatters.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relax_tune.ir.core.expr import Expr, Var, conjuncts, free_vars, loads
from relax_tune.ir.core.stmt import Block, IterVar
from relax_tune.ir.deduce.pattern_kinds import accumulated, starts_neutral


@dataclass(frozen=True, slots=True)
class ScatterPattern:
    """A reduction `Y[i, r] = op_m select(index(m, r) == i, term(m, r), neutral)`, the index read from memory.

    Attributes:
        targets: the index of each iterator i.
        step: the iterator of m.
        rows: the iterators r.
    """

    operation: str
    targets: Mapping[Var, Expr]
    step: IterVar
    term: Expr
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
    targets = dict[Var, Expr]()
    for c in conjuncts(condition):
        for target, index in (c.args, c.args[::-1]) if c.op == "eq" else ():
            if isinstance(target, Var) and target in where and target not in targets and _is_read(index, step.var):
                targets[target] = index
                break
        else:
            return None  # a further condition may protect the read of an index
    # A scatter loops over the updates, so neither their terms nor their indices may depend on the position of the
    # result.
    if not targets or set(targets) & set(free_vars(term, *targets.values())):
        return None
    rows = tuple(i for i in spatial if i.var not in targets)
    return ScatterPattern(block.body.value.op, targets, step, term, neutral, rows)


def _is_read(index: Expr, step: Var) -> bool:
    """Return whether an index is read from memory at the step."""
    return any(step in free_vars(*x.indices) for x in loads(index))
