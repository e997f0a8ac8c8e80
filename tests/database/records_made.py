"""Small well-formed records for the database tests."""

from __future__ import annotations

from relax_tune.database.records import Measurement, Stage, Target, VariantKind, VariantRecord, Workload, canonical_json
from relax_tune.database.store import Store

ZEN = Target("c", "zen4", (("isa", "avx512"), ("compiler", "gcc 12")))
ZEN_OLD = Target("c", "zen4", (("isa", "avx512"), ("compiler", "gcc 11")))
MATMUL = Workload("w-matmul", "def matmul(): ...", 1, "matmul")
SOFTMAX = Workload("w-softmax", "def softmax(): ...", 1, "softmax")


def variant(tile: int, kind: VariantKind = "tuned") -> VariantRecord:
    return VariantRecord(kind, "rows", '[["split",0,"t"]]', canonical_json({"t": tile}))


def timing(
    id: str,
    secs: float,
    *,
    tile: int = 1,
    n: int = 8,
    target: Target = ZEN,
    workload: Workload = MATMUL,
    **more: object,
) -> Measurement:
    """A checked ok measurement whose median is `secs`."""
    values: dict[str, object] = {"samples_secs": (secs, secs / 2, secs * 2), "checked": True, **more}
    kind = values.pop("kind", "tuned")
    made = variant(tile, kind)  # type: ignore[arg-type]
    return Measurement(id, workload.key, target.key, made, {"n": n}, **values)  # type: ignore[arg-type]


def failure(
    id: str, stage: Stage, message: str = "it broke", *, tile: int = 1, target: Target = ZEN, measured_at: float = 0.0
) -> Measurement:
    made = variant(tile)
    return Measurement(
        id, MATMUL.key, target.key, made, status="failed", stage=stage, message=message, measured_at=measured_at
    )


def filled(store: Store) -> Store:
    """With the two targets and the two workloads."""
    for target in (ZEN, ZEN_OLD):
        store.add_target(target)
    for workload in (MATMUL, SOFTMAX):
        store.add_workload(workload)
    return store
