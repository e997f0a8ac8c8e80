"""Weights in blocks, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.ir.frontend.onnx.microsoft.ort_models import Array, Input, check, f, whole

from relax_tune.errors import ParseError


def bytes_of(*shape: int) -> Array:
    return whole(0, 256, *shape, dtype=np.uint8)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("k, block", [(32, 16), (64, 32), (40, 16), (16, 16)])
@pytest.mark.parametrize("zeros", [None, "packed", "floats"])
@pytest.mark.parametrize("bias", [None, f(5)], ids=["none", "bias"])
def test_matmul_n_bits(bits: int, k: int, block: int, zeros: str | None, bias: Array | None) -> None:
    n, count = 5, -(-k // block)
    if bits != 4 and (zeros == "floats" or (bits == 2 and k == 40)):
        pytest.skip("ONNX Runtime has no kernel for it on processors")
    z = {None: None, "packed": bytes_of(n, -(-count * bits // 8)), "floats": f(n, count) + np.float32(8)}[zeros]
    weights = bytes_of(n, count, block * bits // 8)
    inputs = [Input(f(2, 3, k), f"b m {k}"), weights, f(n, count), z, None, bias]
    check("MatMulNBits", inputs, K=k, N=n, bits=bits, block_size=block, rtol=1e-3, atol=1e-2)


def test_matmul_n_bits_of_weights_from_outside_raises() -> None:
    inputs = [Input(f(3, 32), "m 32"), Input(bytes_of(5, 1, 16), "5 1 16"), f(5, 1)]
    with pytest.raises(ParseError, match="expected constant weights"):
        check("MatMulNBits", inputs, K=32, N=5, block_size=32, reference=lambda: [])


@pytest.mark.parametrize("kind", ["uint4", "int4"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("axes", [(0, 1), (1, 0), (0, 2)])
@pytest.mark.parametrize("dims", ["n", "b n"])
def test_gather_block_quantized(kind: str, zeros: bool, axes: tuple[int, int], dims: str) -> None:
    element = getattr(ml_dtypes, kind)
    shape = [3, 5, 7]
    shape[axes[1]] = 32
    blocks = [*shape]
    blocks[axes[1]] = 2
    low = -8 if kind == "int4" else 0
    table, by = whole(low, low + 16, *shape).astype(element), f(*blocks)
    z = whole(low, low + 16, *blocks).astype(element) if zeros else None
    n = shape[axes[0]]
    indices = whole(-n, n, *((4,) if dims == "n" else (2, 4)))
    check(
        "GatherBlockQuantized",
        [table, Input(indices, dims), by, z],
        gather_axis=axes[0],
        quantize_axis=axes[1],
        block_size=16,
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_gather_block_quantized_of_bytes(bits: int, zeros: bool) -> None:
    z = bytes_of(11, -(-2 * bits // 8)) if zeros else None
    inputs: list[Any] = [bytes_of(11, 32 * bits // 8), Input(whole(0, 11, 2, 3), "b n"), f(11, 2), z]
    check("GatherBlockQuantized", inputs, bits=bits, gather_axis=0, quantize_axis=1, block_size=16)


def test_gather_block_quantized_of_indices_out_of_range_is_zero() -> None:
    indices = Input(np.array([0, 99, -12, -1]), "n")
    check("GatherBlockQuantized", [bytes_of(11, 16), indices, f(11, 2)], gather_axis=0, quantize_axis=1, block_size=16)
