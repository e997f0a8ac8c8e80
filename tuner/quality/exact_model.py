"""The model with its declared types: its results on samples, and their loss when weights are stored in fewer bits.

Tests: `tests/tuner/quality/test_choose.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import dtype
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.passes.graph.quantize import QuantizeWeights
from relax_tune.ir.passes.graph.round_weights import round_array
from relax_tune.ir.passes.pipeline import WEIGHT_BITS
from relax_tune.runtime.artifact import Artifact
from relax_tune.tuner.job.lowered_model import WeightType
from relax_tune.tuner.quality.bound import Quality, QualityBound
from relax_tune.tuner.quality.samples import Sample, SplitSamples

Array = NDArray[Any]
Stored = Mapping[str, WeightType]


@dataclass(slots=True)
class ExactModel:
    """The model with its declared types, built for a device of this machine.

    Attributes:
        choosing, validation: Its float results on the samples, by sample and position.

    Raises:
        UserError: The model's results cannot be compared.
    """

    module: IRModule
    artifact: Artifact
    device: str
    bound: QualityBound
    samples: SplitSamples
    choosing: list[list[Array]] = field(init=False)
    validation: list[list[Array]] = field(init=False)
    _read: dict[tuple[str, WeightType], Array | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.choosing = self._outputs(self.artifact, self.samples.choosing)
        self.validation = self._outputs(self.artifact, self.samples.validation)
        _check_outputs([*self.choosing, *self.validation])

    def can_store(self, name: str, kind: WeightType) -> bool:
        """Return True if a weight can be stored as `kind`, and rounding it predicts the results."""
        return name in self.artifact.constants and self.as_read(name, kind) is not None

    def as_read(self, name: str, kind: WeightType) -> Array | None:
        """Return a weight as kernels read it after it was stored as `kind`; None if it cannot be stored so."""
        array = self.module.constants[name]
        if kind in WEIGHT_BITS:
            return QuantizeWeights(WEIGHT_BITS[kind]).as_read(self.module, name)
        rounded = round_array(array, dtype(kind))
        return None if rounded is None else rounded.astype(array.dtype)

    def predict_choosing(self, stored: Stored) -> Quality:
        """Measure the exact kernels over rounded weights on the choosing samples.

        Kernels compute in float32 for every stored type, so the results agree up to the order of sums.
        """
        return self.bound.judge(self.choosing, self._outputs(self._rounded(stored), self.samples.choosing))

    def predict_validation(self, stored: Stored) -> Quality:
        """Measure the exact kernels over rounded weights on the validation samples."""
        return self.bound.judge(self.validation, self._outputs(self._rounded(stored), self.samples.validation))

    def validate(self, artifact: Artifact) -> Quality:
        """Measure another build of the model on the validation samples."""
        return self.bound.judge(self.validation, self._outputs(artifact, self.samples.validation))

    def _rounded(self, stored: Stored) -> Artifact:
        last = self._read  # of the last call, which mostly had the same weights but one
        self._read = {k: last[k] if k in last else self.as_read(*k) for k in sorted(stored.items())}
        read = {name: a for (name, _), a in self._read.items() if a is not None}
        return replace(self.artifact, constants={**self.artifact.constants, **read})

    def _outputs(self, artifact: Artifact, samples: Sequence[Sample]) -> list[list[Array]]:
        with artifact.open(self.device) as model:
            results = [model.run(sample, self.samples.function) for sample in samples]
        return [[r for r in row if isinstance(r, np.ndarray) and _is_float(r)] for row in results]


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def _check_outputs(outputs: Sequence[Sequence[Array]]) -> None:
    """Check that the exact results contain floats, all finite.

    Raises:
        UserError: They do not.
    """
    if not all(outputs):
        raise UserError("--quality compares results that are floats, got a model without any; leave it out")
    for sample in outputs:
        for position, a in enumerate(sample):
            if not np.isfinite(a.astype(np.float64)).all():
                raise UserError(
                    f"--quality expects samples with finite results, got infinity or NaN in result {position} of the model as it is; "
                    "leave such samples out"
                )
