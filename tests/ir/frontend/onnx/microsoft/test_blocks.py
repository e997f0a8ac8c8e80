"""Weights in blocks, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.ir.frontend.onnx.microsoft.ort_models import Array, Input, check, f, whole

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.onnx.microsoft.blocks import unpacked


def bytes_of(*shape: int) -> Array:
    return whole(0, 256, *shape, dtype=np.uint8)


@pytest.mark.pairwise
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


@pytest.mark.parametrize("order", ["places", "shuffled", "uneven"])
@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("dims", ["64", "b 64"])
def test_matmul_n_bits_of_rows_in_any_group(order: str, floats: bool, dims: str) -> None:
    groups = np.arange(64) // 16
    groups = {"places": groups, "shuffled": np.roll(groups, 5)[::-1], "uneven": groups // 2 + np.arange(64) % 2}[order]
    z = f(5, 4) + np.float32(8) if floats else None
    x = Input(f(*((3, 64) if "b" in dims else (64,))), dims)
    inputs = [x, bytes_of(5, 4, 8), f(5, 4), z, groups.astype(np.int32)]
    check("MatMulNBits", inputs, K=64, N=5, bits=4, block_size=16, rtol=1e-3, atol=1e-3)


def test_matmul_n_bits_of_groups_has_packed_zero_points() -> None:
    """ONNX Runtime's kernel for processors leaves them out: NumPy."""
    groups = np.roll(np.arange(64) // 16, 7)
    x, packed, scales, zeros = f(3, 64), bytes_of(5, 4, 8), f(5, 4), bytes_of(5, 2)
    numbers, z = unpacked(packed.reshape(5, -1), 4, 64), unpacked(zeros, 4, 4)

    def reference() -> list[Array]:
        dense = (numbers.astype(float) - z[:, groups]) * scales[:, groups]
        return [(x @ dense.T).astype(np.float32)]

    inputs = [Input(x, "b 64"), packed, scales, zeros, groups.astype(np.int32)]
    check("MatMulNBits", inputs, K=64, N=5, bits=4, block_size=16, reference=reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("k", [16, 24])
def test_matmul_bnb4(kind: int, block: int, k: int) -> None:
    inputs = [Input(f(3, k), f"b {k}"), bytes_of(5 * k // 2), np.abs(f(-(-5 * k // block)))]
    check("MatMulBnb4", inputs, K=k, N=5, block_size=block, quant_type=kind, rtol=1e-4, atol=1e-4)


def test_matmul_bnb4_in_training_raises() -> None:
    inputs = [Input(f(3, 16), "b 16"), bytes_of(40), f(5)]
    with pytest.raises(ParseError, match="training_mode"):
        check("MatMulBnb4", inputs, K=16, N=5, block_size=16, quant_type=1, training_mode=1, reference=lambda: [])


def test_matmul_n_bits_of_weights_from_outside_raises() -> None:
    inputs = [Input(f(3, 32), "m 32"), Input(bytes_of(5, 1, 16), "5 1 16"), f(5, 1)]
    with pytest.raises(ParseError, match="expected constant weights"):
        check("MatMulNBits", inputs, K=32, N=5, block_size=32, reference=lambda: [])


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["uint4", "int4"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("axes", [(0, 1), (1, 0), (0, 2), (0, 0), (2, 2)])
@pytest.mark.parametrize("dims", ["", "n", "b n"])
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
    indices = whole(-n, n, *(2, 4)[: len(dims.split())])
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
