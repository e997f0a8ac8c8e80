"""ATen determinants of matrices whose number of rows is known."""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.frontend.shared.algorithms.elimination import determinant, pivots
from relax_tune.ir.frontend.shared.compositions import sign
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import Handler, TorchNode
from relax_tune.ir.op.math.elementwise import Add, Mul
from relax_tune.ir.op.math.numeric import Abs, Log


def _det(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
    x = n.item(0)
    return [w.of(determinant(w, w.tensor(x), x.dtype)), None, None]


def _slogdet(w: Writer, n: TorchNode) -> list[ImportedValue | None]:
    """Import the sign of determinants and the logarithm of their magnitude, a sum over the pivots."""
    x = n.item(0)
    found, signs = pivots(w, w.tensor(x), x.dtype)
    if not found:
        return [w.uniform(x.shape[:-2], 1, x.dtype), w.uniform(x.shape[:-2], 0, x.dtype), None, None]
    total = w.emit(Log(), w.emit(Abs(), found[0]))
    for p in found[1:]:
        total = w.emit(Add(), total, w.emit(Log(), w.emit(Abs(), p)))
    for p in found:
        signs = w.emit(Mul(), signs, sign(w, p, x.dtype))
    return [w.of(signs), w.of(total), None, None]


HANDLERS: Mapping[str, Handler] = {"aten._linalg_det.default": _det, "aten._linalg_slogdet.default": _slogdet}
