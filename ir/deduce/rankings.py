"""Rankings: reductions that count the elements ahead of each element; `top_k` sorts by them.

Tests: `tests/schedules/primitives/reduction/test_radix_sorts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax_tune.ir.core.expr import Const, Expr, Load, Var, const, free_vars, postorder, substitute
from relax_tune.ir.core.stmt import Block, IterVar
from relax_tune.ir.deduce.pattern_kinds import accumulated
from relax_tune.ir.op.reduction.scan import counts_ahead


@dataclass(frozen=True, slots=True)
class RankingPattern:
    """A reduction `R[i] = sum over k of [x(k) is ahead of x(i)]`, a permutation of the positions.

    Attributes:
        position: iterator of i.
        step: iterator of k.
        term: x(i).
        largest: whether larger elements come first; equal ones keep their order, and NaN is the largest.
    """

    position: IterVar
    step: IterVar
    term: Expr
    largest: bool


@dataclass(frozen=True, slots=True)
class PickPattern:
    """A reduction `Y[j] = sum over k of select(R[k] == j, k, 0)`: the place of the element with rank j.

    Attributes:
        slot: iterator of j.
        step: iterator of k.
        ranks: load of R.
    """

    slot: IterVar
    step: IterVar
    ranks: Load


def _counted(block: Block) -> tuple[IterVar, Expr] | None:
    """Return the only reduction iterator and the term of a sum that begins at 0."""
    term, steps = accumulated(block), [i for i in block.iters if i.kind == "reduce"]
    starts = block.init is not None and isinstance(block.init.value, Const) and block.init.value.value == 0
    if term is None or not starts or len(steps) != 1 or block.body.value.op != "add" or term.op != "select":
        return None
    return steps[0], term


def ranking(block: Block) -> RankingPattern | None:
    """Return the pattern of a ranking; None for any other block."""
    counted = _counted(block)
    if counted is None or counted[1].args[1:] != (const(1), const(0)):
        return None
    step, condition = counted[0], counted[1].args[0]
    for position in block.iters:
        if position.kind != "spatial" or position.var not in block.body.indices:
            continue
        for e in postorder([condition]):
            for index in e.args if e.op == "eq" else ():
                variables, other = free_vars(index), substitute(index, {position.var: step.var})
                # The compared element must be the one at i; the same expression at k then follows by substitution.
                if position.var not in variables or step.var in variables:
                    continue
                # The condition is built for both orders and compared as a whole (interned nodes: `is`), so the
                # pattern cannot differ from what `counts_ahead` writes.
                for largest in (True, False):
                    if counts_ahead(index, other, position.var, step.var, largest) is condition:
                        return RankingPattern(position, step, index, largest)
    return None


def pick(block: Block) -> PickPattern | None:
    """Return the pattern of a pick by ranks; None for any other block."""
    counted = _counted(block)
    if counted is None or counted[1].args[2] is not const(0) or counted[1].args[0].op != "eq":
        return None
    step, (condition, place, _) = counted[0], counted[1].args
    for ranks, slot in (condition.args, condition.args[::-1]):
        iterator = next((i for i in block.iters if i.kind == "spatial" and i.var is slot), None)
        if (
            iterator is not None
            and isinstance(ranks, Load)
            and place is step.var
            and iterator.var in block.body.indices
        ):
            return PickPattern(iterator, step, ranks)
    return None


def same_rows(
    ranked: Block, pattern: RankingPattern, picked: PickPattern, slot_indices: tuple[Expr, ...]
) -> dict[Var, Var] | None:
    """Map the row iterators of a ranking to the iterators of a pick that index alike; None if some do not.

    Args:
        pattern: ranking that `ranked` computes.
        slot_indices: the indices that the pick stores at.
    """
    pairs, stored = dict[Var, Var](), ranked.body.indices
    if not len(stored) == len(slot_indices) == len(picked.ranks.indices):
        return None
    for at, read, pick_index in zip(stored, picked.ranks.indices, slot_indices, strict=True):
        if not isinstance(at, Var):
            return None
        if at is pattern.position.var:
            if read is not picked.step.var or pick_index is not picked.slot.var:
                return None
        elif read is not pick_index or not isinstance(pick_index, Var) or pick_index is picked.slot.var:
            return None
        else:
            pairs[at] = pick_index
    return pairs
