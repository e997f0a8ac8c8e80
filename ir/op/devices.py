"""Operators that say where a value lives: `to_device` and `hint_on_device` (Relax's VDevice; HPVM's target hints)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from relax_tune.errors import BuildError
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo, on_device
from relax_tune.ir.op.base import Array, Deduction, Halves, OperatorSpec


@dataclass(frozen=True, slots=True)
class DeviceOperator(OperatorSpec):
    """Operator that changes where a value lives and nothing else. It is never lowered to loops.

    A build for one device drops it; one for several keeps it until the placement is chosen.

    device: kind of the device, such as `c` or `opencl`
    """

    halves: ClassVar[Halves] = "moved"

    device: str

    def legalize(
        self, name: str, infos: Sequence[TensorInfo], consts: Sequence[bool] = (), ctx: Deduction | None = None
    ) -> PrimFunc:
        raise BuildError(f"{self.name}: wanted an operator that is a loop nest, found one that the runtime does itself")

    def evaluate(self, arrays: Sequence[Array]) -> Array:
        return arrays[0]


@dataclass(frozen=True, slots=True)
class ToDevice(DeviceOperator):
    """The same value in the memory of a device. All that is computed from it without another transfer runs there."""

    name: ClassVar[str] = "to_device"

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        return on_device(x, self.device)


@dataclass(frozen=True, slots=True)
class HintOnDevice(DeviceOperator):
    """The same value, with the wish that it is made on a device. A build without that device ignores the wish."""

    name: ClassVar[str] = "hint_on_device"

    def infer(self, infos: Sequence[StructInfo], ctx: Deduction) -> StructInfo:
        (x,) = self.tensors(infos)
        return x
