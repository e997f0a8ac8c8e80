"""Annotations: static facts about a value (paper section 3.1, "structural information").

Tests: `tests/ir/deduce/test_relations.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Union

from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import Expr, Var, free_vars


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Any value."""

    def __repr__(self) -> str:
        return "Object"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor. `shape` is a tuple of scalar expressions, or None when only `ndim` (or nothing: None) is known.

    Attributes:
        device: kind of the device whose memory holds it (VDevice in Relax); None until placed.
    """

    shape: tuple[Expr, ...] | None
    dtype: DType | None
    ndim: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.shape is not None:
            object.__setattr__(self, "ndim", len(self.shape))

    def __repr__(self) -> str:
        where = "" if self.device is None else f', device="{self.device}"'
        if self.shape is not None:
            dims = ", ".join(map(repr, self.shape)) + ("," if len(self.shape) == 1 else "")
            return f"Tensor(({dims}), {self.dtype or 'unknown'}{where})"
        return f"Tensor(ndim={'unknown' if self.ndim is None else self.ndim}, {self.dtype or 'unknown'}{where})"


@dataclass(frozen=True, slots=True)
class ShapeInfo:
    """A first-class shape value: its dims, or only how many."""

    values: tuple[Expr, ...] | None
    ndim: int | None = None

    def __post_init__(self) -> None:
        if self.values is not None:
            object.__setattr__(self, "ndim", len(self.values))

    def __repr__(self) -> str:
        if self.values is not None:
            return f"Shape([{', '.join(map(repr, self.values))}])"
        return f"Shape(ndim={'unknown' if self.ndim is None else self.ndim})"


@dataclass(frozen=True, slots=True)
class PrimInfo:
    """A scalar, with its value when that is known symbolically."""

    dtype: DType
    value: Expr | None = None

    def __repr__(self) -> str:
        return f"Prim({self.dtype})" if self.value is None else f"Prim({self.dtype}, {self.value!r})"


@dataclass(frozen=True, slots=True)
class TupleInfo:
    fields: tuple[StructInfo, ...]

    def __repr__(self) -> str:
        return f"Tuple({', '.join(map(repr, self.fields))})"


@dataclass(frozen=True, slots=True)
class CallableInfo:
    """A function's signature: symbols are bound by the arguments of each call, and are instantiated in the result.

    Attributes:
        params: None if unknown.
        pure: a call has no side effects.
        names: names of the parameters, for messages only.
    """

    params: tuple[StructInfo, ...] | None
    ret: StructInfo
    pure: bool = True
    names: tuple[str, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        params = "None" if self.params is None else "(" + "".join(f"{p!r}, " for p in self.params).rstrip(" ") + ")"
        return f"Callable({params}, {self.ret!r}{'' if self.pure else ', pure=False'})"


StructInfo = Union[ObjectInfo, TensorInfo, ShapeInfo, PrimInfo, TupleInfo, CallableInfo]
INFOS = (ObjectInfo, TensorInfo, ShapeInfo, PrimInfo, TupleInfo, CallableInfo)


def info_parts(info: StructInfo) -> tuple[StructInfo, ...]:
    """Return the annotations of a tuple's fields; of any other value its annotation."""
    return info.fields if isinstance(info, TupleInfo) else (info,)


def on_device(info: StructInfo, device: str | None) -> StructInfo:
    """Return an annotation whose tensors live on a device; None removes the devices."""
    if isinstance(info, TensorInfo):
        return info if info.device == device else replace(info, device=device)
    if isinstance(info, TupleInfo):
        fields = tuple(on_device(f, device) for f in info.fields)
        return info if all(a is b for a, b in zip(fields, info.fields, strict=True)) else TupleInfo(fields)
    if isinstance(info, CallableInfo):
        params = None if info.params is None else tuple(on_device(p, device) for p in info.params)
        return replace(info, params=params, ret=on_device(info.ret, device))
    return info


def devices_of(info: StructInfo) -> tuple[str, ...]:
    """Return the distinct devices that an annotation states for its tensors, in order."""
    if isinstance(info, TupleInfo):
        return tuple(dict.fromkeys(d for f in info.fields for d in devices_of(f)))
    return (info.device,) if isinstance(info, TensorInfo) and info.device is not None else ()


def info_dims(info: StructInfo) -> tuple[Expr, ...] | None:
    """Return the scalars an annotation states itself: dims of a tensor or shape, the value of a scalar. None when
    unknown.
    """
    if isinstance(info, TensorInfo):
        return info.shape
    if isinstance(info, ShapeInfo):
        return info.values
    return (info.value,) if isinstance(info, PrimInfo) and info.value is not None else None


def tensor_dims(info: StructInfo) -> tuple[Expr, ...]:
    """Return the dims of a tensor; () if it is no tensor or they are not known."""
    return (info.shape or ()) if isinstance(info, TensorInfo) else ()


def all_tensors(infos: Sequence[StructInfo]) -> tuple[TensorInfo, ...]:
    """Return the annotations if all are of tensors; () otherwise."""
    tensors = tuple(i for i in infos if isinstance(i, TensorInfo))
    return tensors if len(tensors) == len(infos) else ()


def info_symbols(info: StructInfo) -> tuple[Var, ...]:
    """Return the symbols in an annotation, in order, without the symbols that a signature binds in its parameters."""
    if isinstance(info, TupleInfo):
        return tuple(dict.fromkeys(v for f in info.fields for v in info_symbols(f)))
    if isinstance(info, CallableInfo):
        bound = own_symbols(info)
        return tuple(v for v in info_symbols(info.ret) if v not in bound)
    return free_vars(*(info_dims(info) or ()))


def own_symbols(signature: CallableInfo) -> dict[Var, None]:
    """Return the symbols that each call of a signature binds, in order."""
    return dict.fromkeys(v for p in signature.params or () for v in info_symbols(p))
