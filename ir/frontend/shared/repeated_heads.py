"""Rules for grouped-query attention (Ainslie et al. 2023), whose exporters repeat key and value heads before they are read.

The repetition is `reshape(broadcast(heads))`: heads (..., h, 1, i, j) become (..., h, g, i, j), then (..., h * g, i, j).

Tests: `tests/ir/frontend/onnx/test_onnx_bert.py`.
"""

from __future__ import annotations

from relax_tune.ir.core.expr import Expr, as_int
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.decomposed_ops import attention_of, by_number, weights_of
from relax_tune.ir.op.indexing.movement import BroadcastTo, Permute, Reshape
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.rewrite.pattern import Pattern, op
from relax_tune.ir.rewrite.rules import Rule, Site


def repeated(name: str) -> Pattern:
    """Match repeated heads `name`: the broadcast is captured as `name_wide`, the result as `name_whole`."""
    return op(Reshape, op(BroadcastTo, name).named(f"{name}_wide")).named(f"{name}_whole")


def _repeats_heads(site: Site, name: str) -> bool:
    """Return whether the view and the broadcast only repeat each head."""
    narrow, wide, whole = (site.shape(n) for n in (name, f"{name}_wide", f"{name}_whole"))
    same = site.deduction.same
    return (
        len(narrow) == len(wide) == 5 and len(whole) == 4 and as_int(narrow[2]) == 1
        and all(p == 2 or same(narrow[p], wide[p]) for p in range(5)) and same(wide[0], whole[0])
        and same(wide[3], whole[2]) and same(wide[4], whole[3])
    )  # fmt: skip


PRODUCT = (
    op(Matmul, "a", op(Permute, repeated("b"), axes=(0, 1, 3, 2)).named("permuted"), transpose_b=False)
    | op(Matmul, "a", repeated("b"))
).named("product")


def _grouped_product(site: Site) -> Value | None:
    a, wide, whole, same = site.shape("a"), site.shape("b_wide"), site.shape("b_whole"), site.deduction.same
    if not _repeats_heads(site, "b") or len(a) != 4 or not (same(a[0], whole[0]) and same(a[1], whole[1])):
        return None
    transposed = "permuted" in site or site.operator("product", Matmul).transpose_b
    grouped = site.call(Reshape((*wide[:3], *a[2:])), "a")
    return site.call(Reshape((*a[:3], wide[3 if transposed else 4])), site.call(Matmul(transposed), grouped, "b"))


REPEATED_ATTENTION = op(Attention, "q", repeated("k"), repeated("v"))
MASKED_ATTENTION = op(Attention, "q", repeated("k"), repeated("v"), "mask")


def _grouped_attention(site: Site) -> Value | None:
    q, k, v = (site.shape(name) for name in ("q", "k", "v"))
    if not (_repeats_heads(site, "k") and _repeats_heads(site, "v")) or k[1] != v[1] or len(q) != 4:
        return None
    if not all(site.deduction.same(site.shape(f"{name}_whole")[1], q[1]) for name in "kv"):
        return None
    once = [site.call(Reshape(_without_group(site.shape(name))), name) for name in "kv"]
    return site.call(site.root.op, "q", *once, *(["mask"] if "mask" in site else []))


# products over repeated heads are matched before the attention that contains them
GROUPED_SCORES = by_number(op(Reshape, op(Matmul, op(Reshape, "q").named("grouped"), "k", transpose_b=True))).named(
    "scores"
)
GROUPED_ATTENTION = op(Matmul, weights_of(GROUPED_SCORES), repeated("v"), transpose_b=False)


def _attention_of_groups(site: Site) -> Value | None:
    q, k, v, grouped, same = *(site.shape(name) for name in ("q", "k", "v", "grouped")), site.deduction.same
    if not _repeats_heads(site, "v") or len(q) != 4 or len(k) != 5 or as_int(k[2]) != 1 or len(grouped) != 5:
        return None
    whole = (*q[:3], k[3])
    fits = same(k[0], v[0]) and k[1] == v[1] == grouped[1] and same(k[3], v[3]) and same(grouped[3], q[2])
    if not fits or not same(site.shape("v_whole")[1], q[1]) or site.shape("scores") != whole:
        return None
    keys, values = (site.call(Reshape(_without_group(site.shape(name))), name) for name in "kv")
    return attention_of(site, whole, keys, values)


def _without_group(dims: tuple[Expr, ...]) -> tuple[Expr, ...]:
    return (*dims[:2], *dims[3:])


RULES = (
    Rule(
        GROUPED_ATTENTION, _attention_of_groups, "attention over groups of heads", level="import",
        equation="softmax(q @ repeat(k, g).T * scale + mask) @ repeat(v, g) = attention(q, k, v, mask)",
    ),
    Rule(
        PRODUCT, _grouped_product, "product over repeated heads", level="import",
        equation="a @ repeat(b, g) = reshape(reshape(a, (..., h, g, i, j)) @ b)",
    ),
    Rule(
        REPEATED_ATTENTION | MASKED_ATTENTION, _grouped_attention, "attention over repeated heads", level="import",
        equation="attention(q, repeat(k, g), repeat(v, g), mask) = attention(q, k, v, mask)",
    ),
)  # fmt: skip
