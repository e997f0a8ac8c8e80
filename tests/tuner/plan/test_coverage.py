"""Untuned task_variants where a prior has seen no such kernel, and where it has."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.support import schedule_functions as make
from tests.support.processors import PROCESSORS
from tests.support.tuner_models import task_variants_of

from relax_tune.database.records import VariantRecord
from relax_tune.ir.core.dtype import bf16
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import loops
from relax_tune.tuner.learn.prior import Prior, packaged_prior
from relax_tune.tuner.plan import predicted
from relax_tune.tuner.plan.predicted import Predictor
from relax_tune.tuner.search.space import FeatureArray
from relax_tune.tuner.task.domain import Domain
from relax_tune.tuner.task.variants import TaskVariants

ROWS = {
    "1 row": Domain(((1,),), (1.0,)),
    "33 rows": Domain(((33,),), (1.0,)),
    "1 to 512 rows": Domain(((1,), (16,), (128,), (512,)), (0.25,) * 4),
}
BYTES = [
    ("128x768x768", 768, 768, Domain(((128,),), (1.0,))),
    ("33x768x3072", 3072, 768, ROWS["33 rows"]),
    ("33x3072x768", 768, 3072, ROWS["33 rows"]),
    ("1x768x768", 768, 768, ROWS["1 row"]),
    ("1 to 512x768x768", 768, 768, ROWS["1 to 512 rows"]),
]


def prior() -> Prior:
    found = packaged_prior("processor")
    assert found is not None
    return found


def chosen(task_variants: TaskVariants) -> list[VariantRecord]:
    """The variants that the packaged prior plans without records."""
    planned = Predictor(prior()).plan(task_variants)
    assert planned is not None
    plan, variants = planned
    return [variants[key] for key in plan.variants]


def intrinsics(task_variants: TaskVariants, sketch: str) -> set[str]:
    (one,) = [s for s in task_variants.sketch_set.sketches if s.name == sketch]
    return {x.marks.intrinsic for x in loops(one.func.body) if x.marks.intrinsic}


def of(func: PrimFunc, domain: Domain, processor: str) -> TaskVariants:
    return task_variants_of(func, domain, PROCESSORS[processor].machine, ())


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["avx512-vnni", "avx512-vnni-bf16", "amx"])
@pytest.mark.parametrize(("n", "k", "domain"), [b[1:] for b in BYTES], ids=[b[0] for b in BYTES])
def test_plan_of_bytes_without_records_is_the_rules_guess(processor: str, n: int, k: int, domain: Domain) -> None:
    task_variants = of(make.quantised(n, k, 8, activations="int8"), domain, processor)
    (variant,) = chosen(task_variants)
    assert variant.key == task_variants.sketch_set.best_guess().key
    (used,) = intrinsics(task_variants, variant.sketch)
    assert used.startswith("amx_u8i8" if processor == "amx" else "dot4_u8i8")


@pytest.mark.slow
@pytest.mark.parametrize(("processor", "used"), [("avx512-vnni-bf16", "dot2_bf16_x16"), ("amx", "amx_bf16_16x16")])
def test_plan_of_bf16_without_records_is_the_rules_guess(processor: str, used: str) -> None:
    task_variants = of(make.dense(768, 768, stored=bf16), ROWS["33 rows"], processor)
    (variant,) = chosen(task_variants)
    assert variant.key == task_variants.sketch_set.best_guess().key and intrinsics(task_variants, variant.sketch) == {
        used
    }


@pytest.mark.slow
@pytest.mark.parametrize("processor", [p for p in PROCESSORS if PROCESSORS[p].machine.lanes > 8])
def test_plan_for_wider_vectors_than_recorded_is_the_rules_guess(processor: str) -> None:
    task_variants = of(make.matmul(768, 768), ROWS["33 rows"], processor)
    (variant,) = chosen(task_variants)
    assert variant.key == task_variants.sketch_set.best_guess().key


FLOATS: dict[str, tuple[Callable[[], PrimFunc], Domain]] = {
    "product 768x768": (lambda: make.matmul(768, 768), ROWS["1 to 512 rows"]),
    "product 3072x768": (lambda: make.matmul(3072, 768), ROWS["33 rows"]),
    "product 768x3072": (lambda: make.matmul(768, 3072, epilogue=False), ROWS["33 rows"]),
    "transposed 384x384": (lambda: make.dense(384, 384), ROWS["1 to 512 rows"]),
    "one row": (lambda: make.dense(768, 768, rows=1), Domain(((),), (1.0,))),
    "softmax of 17": (make.short_softmax, ROWS["1 to 512 rows"]),
    "pointwise": (lambda: make.pointwise(1), ROWS["1 to 512 rows"]),
    "convolution": (lambda: make.convolution((16, 32), (3, 3), (28, 28)), Domain(((1,),), (1.0,))),
}


def last_digits_changed(features: FeatureArray, most: int) -> FeatureArray:
    """Return features as of a processor with other logarithms: each value up to `most` digits off, equal ones alike."""
    bits = features.view(np.int32)
    digits = (bits.astype(np.int64) * 2654435761 >> 7) % (2 * most + 1) - most
    with np.errstate(all="ignore"):
        exact = ~np.isfinite(features) | (features <= 0) | (np.log2(features) % 1 == 0)
    return (bits + np.where(exact, 0, digits).astype(np.int32)).view(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("most", [0, 1, 3])
def test_f32_choices_on_avx2_are_the_priors(
    most: int, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On vectors as wide as the recorded ones, whatever processor computes the choices."""
    if most:
        plain = predicted.with_machine
        monkeypatch.setattr(predicted, "with_machine", lambda f, h: plain(last_digits_changed(f, most), h))
    lines = []
    for name, (func, domain) in FLOATS.items():
        found = chosen(of(func(), domain, "avx2"))
        lines += [f"{name}: {v.sketch} {v.parameters}" for v in found]
    golden("predicted_f32_avx2.txt", "\n".join(lines))
