"""Quantisation of the weights of matmuls to 8 or 4 bits, and of embedding tables to 8 bits.

Tests: `tests/ir/passes/graph/test_quantize.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import i8
from relax_tune.ir.core.expr import as_int, const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, Call, Constant, Function, If, Value
from relax_tune.ir.core.graph_walk import nested_values, operator_of
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.op.indexing.movement import Take
from relax_tune.ir.op.math.quantize import Dequantize, Pack4, Quantize, Unpack4
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.passes.graph.cleanup import DeadCode
from relax_tune.ir.passes.graph.constant_fold import add_constant
from relax_tune.ir.rewrite.emitter import Emitter, map_graphs, rewrite_function, tensor_info

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A quantised weight.

    Attributes:
        number: The integers.
        scale: The scales.
        back: The operator that dequantises them.
        packed: The dim along which two integers share a byte, if any.
    """

    number: Constant
    scale: Constant
    back: Dequantize
    packed: int | None


@dataclass(frozen=True, slots=True)
class QuantizeWeights:
    """Store 2-d weights that only matmuls read, as second operands, and tables whose rows are looked up, as integers with scales.

    The matmul reads them through `dequantize`, which fuses into its kernel. A scale is the largest magnitude of its weights over 127, or
    over 7 with 4 bits, so each weight changes by at most half its scale. Two 4-bit numbers share a byte, along the rows. Activations are
    not changed, and neither are other weights.

    Tables of embeddings have 8 bits and a scale per row for any `bits`. The rows that a lookup reads are dequantised after it, and
    a transposed product that shares the table reads the same integers.

    Attributes:
        bits: Bits of a number, 4 or 8.
        group: Rows that share a scale in each column; None for all rows, or for 32 rows with 4 bits.
        only: Names of the weights to quantise; None for all that qualify.

    Raises:
        UserError: `bits` is not 4 or 8, `group` is below 1, or a weight is not finite.
    """

    bits: int = 8
    group: int | None = None
    only: frozenset[str] | None = None

    def __call__(self, module: IRModule) -> IRModule:
        if self.bits not in (4, 8) or (self.group is not None and self.group < 1):
            raise UserError(
                f"QuantizeWeights: expected 4 or 8 bits and groups of at least 1 row, got {self.bits} and {self.group}"
            )
        products, tables = _quantizable(module)
        chosen = (products.keys() | tables) & (self.only if self.only is not None else products.keys() | tables)
        constants: dict[str, Array] = dict(module.constants)
        done: dict[tuple[str, bool], _Stored] = {}

        def stored(weight: Constant, transposed: bool) -> _Stored:
            key = weight.name, transposed
            if key not in done:
                form = replace(self, bits=8, group=None) if weight.name in tables else self
                done[key] = form._weight(weight, transposed, constants)
            return done[key]

        def visit(out: Emitter, binding: AnyBinding) -> None:
            value = out.value(binding.value)
            matmul, take = operator_of(value, Matmul), operator_of(value, Take)
            weight = value.operands[0 if matmul is None else 1] if matmul is not None or take is not None else None
            if not isinstance(binding, Binding) or not isinstance(weight, Constant) or weight.name not in chosen:
                out.keep(binding)
                return
            if matmul is None:
                new = _looked_up(out, binding, weight, value.operands[1], stored(weight, True))
            else:
                # Scales belong to columns of the product, which are rows of the stored weight if it is transposed.
                opened = _opened(out, binding, weight, stored(weight, matmul.transpose_b))
                new = value.with_operands((value.operands[0], opened))
            out.bindings.append(replace(binding, value=new))

        new = map_graphs(module, lambda f, _: rewrite_function(f, visit))
        return module if new is module else DeadCode()(replace(new, constants=constants))

    def _weight(self, weight: Constant, transposed: bool, constants: dict[str, Array]) -> _Stored:
        """Quantise a weight, and add its integers and scales to the constants."""
        array = constants[weight.name]
        # An infinite weight would make the scale infinite, and every other weight of its column 0.
        if not np.isfinite(array.astype(np.float32)).all():
            raise UserError(f"weight {weight.name!r}: expected finite numbers to quantise, got infinity or NaN")
        number, scale, back = self._numbers(array, transposed)
        axis = 1 if transposed else 0
        if self.bits == 4:
            number = Pack4(axis).evaluate([number])
        return _Stored(
            add_constant(constants, f"{weight.name}.int{self.bits}", np.ascontiguousarray(number)),
            add_constant(constants, f"{weight.name}.scale", scale), back, axis if self.bits == 4 else None,
        )  # fmt: skip

    def _numbers(self, array: Array, transposed: bool) -> tuple[Array, Array, Dequantize]:
        """Return the integers of an array, one per byte, its scales, and the operator that dequantises them."""
        rows = 1 if transposed else 0
        group = self.group or (32 if self.bits == 4 else None)
        dequantize = Dequantize(1 - rows) if group is None else Dequantize(rows, group)
        wide = np.abs(array.astype(np.float32))
        if group is None:
            largest = wide.max(axis=rows, initial=0)
        else:
            # The last group may have fewer rows, which `reduceat` allows and a reshape does not.
            starts = np.arange(0, array.shape[rows], group)
            largest = np.maximum.reduceat(wide, starts, axis=rows) if len(starts) else wide
        # Symmetric: the most negative code is not used. Rows of zeros are divided by their scale too, so it is not 0.
        scale = (np.where(largest == 0, 1, largest) / (2 ** (self.bits - 1) - 1)).astype(array.dtype)
        return Quantize(dequantize.axis, dequantize.group, i8, self.bits).evaluate([array, scale]), scale, dequantize

    def as_read(self, module: IRModule, name: str) -> Array | None:
        """Return the values of a weight after quantisation, as its products read them.

        Return None for a weight that other operators read too, and for one that products read in both orders.
        """
        orders = _quantizable(module)[0].get(name, set())
        array = module.constants[name]
        if len(orders) != 1 or not np.isfinite(array.astype(np.float32)).all():
            return None
        number, scale, back = self._numbers(array, next(iter(orders)))
        return np.asarray(back.evaluate([number, scale])).astype(array.dtype, copy=False)


def _opened(out: Emitter, binding: Binding, weight: Constant, stored: _Stored) -> Value:
    """Emit the dequantisation of a whole weight, which fuses into the product that reads it."""
    number: Value = stored.number
    if stored.packed is not None:
        dims = weight.info.shape or ()
        number = out.bind(
            Call(Unpack4(stored.packed, dims[stored.packed]), (number,)),
            TensorInfo(dims, i8),
            f"{binding.var.name}_bits",
        )
    return out.bind(Call(stored.back, (number, stored.scale)), weight.info, f"{binding.var.name}_weight")


def _looked_up(out: Emitter, binding: Binding, weight: Constant, indices: Value, stored: _Stored) -> Value:
    """Emit the lookup of integers and of scales; return the dequantised rows."""
    where, width = tensor_info(indices).shape, (weight.info.shape or ())[1]
    info, dims = tensor_info(binding.var), (*(where or ()), width)
    numbers = out.bind(Call(Take(), (stored.number, indices)), TensorInfo(dims, i8), f"{binding.var.name}_numbers")
    scales = out.bind(
        Call(Take(), (stored.scale, indices)), TensorInfo(where, info.dtype), f"{binding.var.name}_scales"
    )
    wide = out.view(scales, TensorInfo((*(where or ()), const(1)), info.dtype))
    return Call(Dequantize(len(dims) - 1, as_int(width)), (numbers, wide))


def _quantizable(module: IRModule) -> tuple[dict[str, set[bool]], frozenset[str]]:
    """Return the 2-d float weights that only products read, as second operands, with the values of `transpose_b` of these products;
    and weights that are looked up by row and that no operator but transposed products reads otherwise.
    """
    orders_of, tables, others = dict[str, set[bool]](), set[str](), set[str]()
    for f in module.functions.values():
        if not isinstance(f, Function):
            continue
        # A weight that any other operator reads has to be stored as it is, too; quantising it would add bytes instead
        # of saving them.
        others.update(v.name for v in (f.ret,) if isinstance(v, Constant))
        for value in nested_values(f):
            matmul, take = operator_of(value, Matmul), operator_of(value, Take)
            for position, arg in enumerate((value.cond,) if isinstance(value, If) else value.operands):
                if not isinstance(arg, Constant):
                    continue
                dtype = arg.info.dtype
                fits = len(arg.info.shape or ()) == 2 and dtype is not None and dtype.is_float
                if fits and matmul is not None and position == 1:
                    orders_of.setdefault(arg.name, set()).add(matmul.transpose_b)
                elif fits and take is not None and position == 0 and tensor_info(value.operands[1]).shape is not None:
                    tables.add(arg.name)
                else:
                    others.add(arg.name)
    products = {n: orders for n, orders in orders_of.items() if n not in tables | others}
    return products, frozenset(n for n in tables - others if orders_of.get(n, {True}) == {True})
