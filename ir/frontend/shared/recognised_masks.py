"""Rules that give the masks of attention one form: booleans, and none where every row sees every column.

Tests: `tests/ir/frontend/onnx/test_onnx_bert.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.core.graph import Value
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.indexing.movement import BroadcastTo, ExpandDims, Reshape
from relax_tune.ir.op.math.logic import Where
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.rewrite.pattern import Pattern, op, value, weight
from relax_tune.ir.rewrite.rules import Rule, Site

VIEWS: Mapping[str, type[OperatorSpec]] = {"expanded": ExpandDims, "reshaped": Reshape, "widened": BroadcastTo}
HIDDEN = op(Where, value("visible").of(dtype=bool_), weight(number=0), weight(number=float("-inf"))).named("hidden")


def viewed(p: Pattern) -> Pattern:
    """Match `p` or one view of it, captured under its name in `VIEWS`."""
    pattern = p
    for name, kind in VIEWS.items():
        pattern = pattern | op(kind, p).named(name)
    return pattern


def _boolean_mask(site: Site) -> Value | None:
    if site.shape("hidden") != site.shape("visible"):  # a mask may get dims from the numbers
        return None
    name = next((n for n in VIEWS if n in site), None)
    mask: Value = site["visible"] if name is None else site.call(site.operator(name, VIEWS[name]), "visible")
    return site.call(site.root.op, "q", "k", "v", mask)


def _unmasked(site: Site) -> Value | None:
    array = site.match.array("mask")
    # A mask of numbers is added to the scores, so that zeros hide nothing.
    plain = array.all() if array.dtype == bool else not array.any()
    return site.call(site.root.op, "q", "k", "v") if plain else None


def _always(site: Site) -> Value | None:
    same = site.shape("a") == site.shape("chosen")
    return site["a"] if same and bool(site.match.array("condition").all()) else None


CHOICES = (
    Rule(
        op(Where, weight("condition").of(dtype=bool_), "a", "b").named("chosen"),
        _always,
        "choice that is always the first",
        level="import",
        equation="where(true, a, b) = a",
    ),
)

RULES = (
    Rule(
        op(Attention, "q", "k", "v", viewed(HIDDEN)), _boolean_mask, "attention with a mask of infinities", level="import",
        equation="attention(q, k, v, where(visible, 0, -inf)) = attention(q, k, v, visible)",
    ),
    Rule(
        op(Attention, "q", "k", "v", weight("mask")), _unmasked, "attention with a mask that hides nothing", level="import",
        equation="attention(q, k, v, true) = attention(q, k, v)",
    ),
)  # fmt: skip
