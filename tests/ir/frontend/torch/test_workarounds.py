"""What a refusal of a torch program says to do is done here: the program then imports, and gives torch's own results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.interp.interp_graph import run_function

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
from tests.ir.frontend.torch.test_exported_programs import Module, between, compare, real  # noqa: E402

pytestmark = pytest.mark.torch


def exported(function: Callable[..., Any], *args: Any, dims: Any = None, **buffers: Any) -> Any:
    shapes = None if dims is None else (tuple(dims),)
    return torch.export.export(Module(function, buffers), args, dynamic_shapes=shapes, strict=False)


def refusal(program: Any, *parts: str) -> None:
    with pytest.raises(ParseError) as caught:
        load_model(program)
    message = str(caught.value)
    assert all(p in message for p in parts), message


def check_decomposed(program: Any, op: str, function: Callable[..., Any], *args: Any) -> None:
    """Refuse a program, give torch the decomposition that the message asks for, and compare."""
    refusal(program, f"operator aten.{op}", "from test_exported_programs.py:", f"table[torch.ops.aten.{op}] = FUNCTION")
    expected = program.module()(*args)
    table = torch.export.default_decompositions()
    packet, _, overload = op.partition(".")
    table[getattr(getattr(torch.ops.aten, packet), overload)] = function
    got = run_function(load_model(program.run_decompositions(table)), "main", [a.numpy() for a in args])
    got = got[0] if isinstance(got, tuple) else got
    expected = expected[0] if isinstance(expected, tuple) else expected
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_operator_with_a_decomposition_imports() -> None:
    def chebyshev(x: Any, n: int) -> Any:
        before, value = torch.ones_like(x), x
        for _ in range(n - 1):
            before, value = value, 2 * x * value - before
        return value

    program = exported(
        lambda m, x: torch.special.chebyshev_polynomial_t(x, 3) * 2, real(4, 3), dims=[{0: between("n", 1)}]
    )
    check_decomposed(program, "special_chebyshev_polynomial_t.n_scalar", chebyshev, real(6, 3))


def test_inner_operator_of_a_decomposition_is_replaced_too() -> None:
    """torch decomposes linalg.svdvals into `_linalg_svd` first."""

    def two_columns(a: Any, full_matrices: bool = False, compute_uv: bool = True, driver: Any = None) -> Any:
        g = a.mT @ a
        half, det = (g[..., 0, 0] + g[..., 1, 1]) / 2, g[..., 0, 0] * g[..., 1, 1] - g[..., 0, 1] ** 2
        root = torch.sqrt(half**2 - det)
        return a, torch.sqrt(torch.stack([half + root, half - root], -1)), a

    check_decomposed(
        exported(lambda m, x: torch.linalg.svdvals(x), real(5, 3, 2)), "_linalg_svd.default", two_columns, real(5, 3, 2)
    )


def test_factorisation_of_a_weight_is_computed_before_the_export() -> None:
    a = real(3, 3)
    symmetric = a @ a.mT + torch.eye(3)
    refusal(
        exported(lambda m, x: x @ torch.linalg.eigh(m.a)[1], real(2, 3), a=symmetric),
        "aten._linalg_eigh.default",
        "register_buffer",
    )
    compare(lambda m, x: x @ m.a, [real(2, 3)], a=torch.linalg.eigh(symmetric)[1])


def test_check_of_values_is_left_out_by_the_form_without_it() -> None:
    a = real(3, 3) + 3 * torch.eye(3)
    refusal(
        exported(lambda m, x: x @ torch.linalg.inv(m.a), real(2, 3), a=a),
        "_linalg_check_errors",
        "inv_ex(x)[0]",
        "register_buffer",
    )
    compare(lambda m, x: x @ m.a, [real(2, 3)], a=torch.linalg.inv(a))

    def inverse(m: Any, *, check_errors: bool = False) -> Any:
        det = m[..., 0, 0] * m[..., 1, 1] - m[..., 0, 1] * m[..., 1, 0]
        rows = [torch.stack([m[..., 1, 1], -m[..., 0, 1]], -1), torch.stack([-m[..., 1, 0], m[..., 0, 0]], -1)]
        return torch.stack(rows, -2) / det[..., None, None], torch.zeros(m.shape[:-2], dtype=torch.int32)

    program = exported(lambda m, x: torch.linalg.inv_ex(x)[0], real(4, 2, 2))
    check_decomposed(program, "linalg_inv_ex.default", inverse, real(4, 2, 2))


def test_sums_of_segments_are_scattered() -> None:
    lengths = torch.tensor([2, 1, 3])
    refusal(
        exported(lambda m, x: torch.segment_reduce(x, "sum", lengths=lengths, axis=0, unsafe=True), real(6, 4)),
        "aten.segment_reduce", "torch.scatter_reduce",
    )  # fmt: skip
    index = torch.repeat_interleave(torch.arange(3), lengths)[:, None].expand(6, 4)
    x = real(6, 4)
    (got,) = compare(lambda m, x: torch.zeros(3, 4).scatter_reduce(0, index, x, "sum"), [x])
    np.testing.assert_allclose(got, torch.segment_reduce(x, "sum", lengths=lengths, axis=0).numpy(), rtol=1e-5)


def test_windows_are_written_by_a_slice_or_a_scatter() -> None:
    refusal(exported(lambda m, x, y: torch.as_strided_scatter(x, y, (2,), (1,), 1), real(6), real(2)), "slice_scatter")
    compare(lambda m, x, y: torch.slice_scatter(x, y, 0, 1, 3), [real(6), real(2)])


def test_fraction_of_a_dim_is_a_quotient_of_whole_numbers() -> None:
    dims = [{2: between("n", 2, 40)}]
    resize = torch.nn.functional.interpolate
    refusal(exported(lambda m, x: resize(x, scale_factor=1.23456), real(1, 2, 5), dims=dims), "n * 17 // 10")
    compare(lambda m, x: resize(x, size=x.shape[2] * 17 // 10), [real(1, 2, 5)], [real(1, 2, 9)], dims=dims)


def test_complex_input_and_result_are_pairs_of_reals() -> None:
    refusal(exported(lambda m, x: x.abs(), torch.complex(real(3), real(3))), "torch.view_as_complex")
    refusal(exported(lambda m, x: torch.fft.fft(x), real(3)), "torch.view_as_real")
    compare(lambda m, x: torch.view_as_real(torch.fft.fft(torch.view_as_complex(x))), [real(3, 2)])


def test_complex_operator_is_computed_of_real_parts() -> None:
    refusal(exported(lambda m, x: torch.fft.rfft(x).tan().abs(), real(4)), "aten.tan.default", "of the real parts")

    def of_parts(m: Any, x: Any) -> Any:
        z = torch.view_as_real(torch.fft.rfft(x))
        a, b = 2 * z[..., 0], 2 * z[..., 1]
        return torch.hypot(a.sin(), b.sinh()) / (a.cos() + b.cosh())

    x = real(4)
    (got,) = compare(of_parts, [x])
    np.testing.assert_allclose(got, torch.fft.rfft(x).tan().abs().numpy(), rtol=1e-4)
