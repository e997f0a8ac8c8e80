"""Names of schedule primitives and sketches in records of schemas 1 and 2, and their present names.

The tables are fixed, since they describe stored data. No present name is an earlier name with another meaning, so renaming twice
equals renaming once.

Tests: `tests/tools/test_convert_database.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from relax_tune.database.records import VariantRecord, canonical_json
from relax_tune.errors import DatabaseError
from relax_tune.json_shapes import has_shape

PRIMITIVES: Mapping[str, str] = {
    "share_evenly": "stream_k",
    "pad_keys": "pad_softmax_axis",
    "ask_ahead": "prefetch",
    "stream_stores": "nontemporal_stores",
    "join_iters": "fuse_block_iters",
    "join_rows": "flatten_rows",
    "merge_loops": "fuse_sibling_loops",
    "mark_prepare": "mark_prepack",
}
"""Earlier name of a schedule primitive -> present name."""

SKIPS: Mapping[str, str] = {"hidden": "masked", "late": "after_last", "nothing": "none"}
"""Earlier value of the argument `skip` of `rolling_update` -> present value."""

_ORDERS = ("parallel", "serial")
_DECOMPOSITIONS = {"tiles": "data_parallel", "split": "split_k", "stream": "stream_k"}
_GPU_SKETCHES = {
    **{f"matmul.{old}": f"matmul.{new}" for old, new in _DECOMPOSITIONS.items()},
    **{f"tensor.{old}": f"mma.{new}" for old, new in _DECOMPOSITIONS.items()},
    "tensor.warpgroup": "wgmma",
    "matvec.dots": "gemv.dots",
    "matvec.dots.split": "gemv.dots.split_k",
    "matvec.columns": "gemv.columns",
    "matvec.columns.split": "gemv.columns.split_k",
    "attention.queries": "flash_attention.queries",
    "attention.keys": "flash_attention.keys",
    "attention.tensor": "flash_attention.mma",
    "attention.splits": "flash_decoding",
    "convolution.tiles": "convolution.implicit_gemm",
    "convolution.split": "convolution.implicit_gemm_split_k",
    "rows.few": "rowwise.warp_per_row",
    "rows.many": "rowwise.block_per_row",
    "rows.few.kept": "rowwise.warp_per_row.in_registers",
    "rows.many.kept": "rowwise.block_per_row.in_registers",
    "reductions.split": "reductions.two_pass",
    "injective.turned": "injective.transposed",
}
_CPU_SKETCHES = {
    "attention.rolling": "flash_attention",
    "attention.splits": "flash_decoding",
    "injective.stream": "injective.nontemporal",
    **{
        f"matvec.{form}{grouped}{ahead}.{order}": f"gemv.{form}{grouped}{prefetch}.{order}"
        for form in ("columns", "dots")
        for grouped in ("", ".grouped")
        for ahead, prefetch in (("", ""), (".ahead", ".prefetch"))
        for order in _ORDERS
    },
    **{
        f"rows.{order}.{kept}": f"rowwise.{order}.{kept}"
        for order in _ORDERS
        for kept in ("registers", "keep_expensive", "keep_all", "keep_none")
    },
    **{f"columns.{order}": f"reductions.columns.{order}" for order in _ORDERS},
    **{f"split.{order}": f"reductions.two_pass.{order}" for order in _ORDERS},
    **{
        f"injective.turned.{old}.{inside}": f"injective.transposed.{new}.{inside}"
        for old, new in (("parallel", "parallel"), ("serial", "serial"), ("stream", "nontemporal"))
        for inside in ("column", "row")
    },
}
SKETCHES: Mapping[str, str] = {**_GPU_SKETCHES, **_CPU_SKETCHES}
"""Earlier name of a sketch -> present name. `attention.splits` is a sketch of processors and GPUs with one present name."""


def rename_sketch(name: str) -> str:
    """Return the present name of a sketch.

    The name of a library variant includes the sketch of its epilogue (`ROUTINE+SKETCH`). An unfused variant joins names by ` | `.
    """
    parts = (part.split("+") for part in name.split(" | "))
    return " | ".join("+".join(SKETCHES.get(word, word) for word in words) for words in parts)


def rename_trace(text: str) -> str:
    """Return the JSON text of a trace with present names of primitives, and of the sketches of an unfused variant.

    Text of another form, such as a configuration of another autotuner, is returned unchanged.
    """
    if not any(f'"{word}"' in text for word in (*PRIMITIVES, *SKIPS)) and '"parts"' not in text:
        return text
    try:
        trace = json.loads(text)
        renamed = _trace(trace)
    except (ValueError, RecursionError):
        return text
    return text if renamed == trace else json.dumps(renamed, separators=(",", ":"))


def _trace(trace: Any) -> Any:
    """Rename a decoded trace. The order of its fields stays, since keys hash the text."""
    if has_shape(trace, {"parts": list}):
        return {**trace, "parts": list(map(_part, trace["parts"]))}
    if has_shape(trace, {"steps": list}):
        return {**trace, "steps": list(map(_step, trace["steps"]))}
    return trace


def _part(part: Any) -> Any:
    """Rename `[kind, sketch, trace]` of one function of an unfused variant."""
    if not has_shape(part, (object, str, object)):
        return part
    return [part[0], rename_sketch(part[1]), _trace(part[2])]


def _step(step: Any) -> Any:
    """Rename `[primitive, arguments]`."""
    if not has_shape(step, (str, object)):
        return step
    name, arguments = step
    if name == "rolling_update" and has_shape(arguments, {"skip": str}):
        arguments = {**arguments, "skip": SKIPS.get(arguments["skip"], arguments["skip"])}
    return [PRIMITIVES.get(name, name), arguments]


def rename_variant(variant: VariantRecord) -> VariantRecord:
    """Return the variant with present names; the same object if nothing changes."""
    sketch, trace = rename_sketch(variant.sketch), rename_trace(variant.trace)
    if (sketch, trace) == (variant.sketch, variant.trace):
        return variant
    return VariantRecord(variant.kind, sketch, trace, variant.parameters)


def rename_plans(plans: Sequence[tuple[str, str]]) -> list[str]:
    """Return the texts of the plans of one set, given as (workload, text), with present names.

    Text that is not a plan is returned unchanged. The name of a set hashes its plans. It is computed again if `plans` are the whole
    set, and stays otherwise.
    """
    documents = [_document(text) for _, text in plans]
    renamed = [None if d is None else _plan(d) for d in documents]
    old, new = _by_workload(plans, documents), _by_workload(plans, renamed)
    if old and new:
        first = next(iter(old.values()))
        model = first.get("model")
        whole = all((d.get("model"), d.get("set")) == (model, first.get("set")) for d in old.values())
        if whole and name_of_set(model, old) == first.get("set"):
            name = name_of_set(model, new)
            renamed = [None if d is None else {**d, "set": name} for d in renamed]
    return [
        text if after is None or after == before else canonical_json(after)
        for (_, text), before, after in zip(plans, documents, renamed, strict=True)
    ]


def _by_workload(
    plans: Sequence[tuple[str, str]], documents: Sequence[dict[str, Any] | None]
) -> dict[str, dict[str, Any]] | None:
    """Return the documents by workload; None if one is not a plan, or if a workload has two different ones."""
    by_workload: dict[str, dict[str, Any]] = {}
    for (workload, _), document in zip(plans, documents, strict=True):
        if document is None or by_workload.setdefault(workload, document) != document:
            return None
    return by_workload


def name_of_set(model: Any, plans: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of a set of plans: a hash of the model's key, and of entries and variants by workload."""
    bodies = {w: {"entries": p.get("entries"), "variants": p.get("variants")} for w, p in plans.items()}
    return hashlib.blake2b(canonical_json([model, bodies]).encode(), digest_size=6).hexdigest()


def set_of_plan(text: str) -> tuple[str, str]:
    """Return the model and the set's name in a plan's text; empty where the text lacks them."""
    document = _document(text)
    return ("", "") if document is None else (str(document.get("model", "")), str(document.get("set", "")))


def _document(text: str) -> dict[str, Any] | None:
    """Return the document of a plan; None unless the text is an object with entries and variants."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if has_shape(document, {"variants": dict, "entries": list}) else None


def _plan(document: dict[str, Any]) -> dict[str, Any]:
    """Return a plan with renamed variants, and entries with the new keys."""
    variants: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, data in document["variants"].items():
        try:
            variant = VariantRecord(**data)
        except (TypeError, DatabaseError):
            variant = None
        if variant is None or variant.key != key:  # altered: the reader of the plan reports it
            variants[key] = data
            continue
        new = rename_variant(variant)
        keys[key] = new.key
        variants[new.key] = {
            "kind": new.kind,
            "sketch": new.sketch,
            "trace": new.trace,
            "parameters": new.parameters,
        }
    entries = [
        {**e, "variant": keys.get(str(e.get("variant")), e.get("variant"))} if has_shape(e, {}) else e
        for e in document["entries"]
    ]
    return {**document, "entries": entries, "variants": variants}
