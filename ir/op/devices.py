"""Operators that place values on devices: `to_device` and `hint_on_device` (Relax's VDevice; HPVM's target hints).

Tests: `tests/ir/passes/placement/test_transfers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from relax_tune.errors import BuildError
from relax_tune.ir.core.struct_info import StructInfo, on_device
from relax_tune.ir.op.base import Array, Deduction, HalfPolicy, OperatorBuilder, OperatorSpec


@dataclass(frozen=True, slots=True)
class DeviceOperator(OperatorSpec):
    """Operator that only changes the device of a value. It is never lowered to loops.

    A build for one device drops it; one for several keeps it until the placement is chosen.

    Attributes:
        device: kind of the device, such as `c` or `opencl`.
    """

    half_policy: ClassVar[HalfPolicy] = "pass_through"

    device: str

    def build(self, b: OperatorBuilder) -> None:
        raise BuildError(f"{self.name}: this operator has no loops; the runtime executes it")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        return arrays[0]


@dataclass(frozen=True, slots=True)
class ToDevice(DeviceOperator):
    """The same value in the memory of a device. Computations on it run there, up to another transfer."""

    name: ClassVar[str] = "to_device"

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        return on_device(x, self.device)


@dataclass(frozen=True, slots=True)
class HintOnDevice(DeviceOperator):
    """Hint that a value should be computed on a device. A build without that device ignores the hint."""

    name: ClassVar[str] = "hint_on_device"

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        return x
