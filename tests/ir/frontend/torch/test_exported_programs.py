"""Programs exported by torch in this Python, against torch itself: the interpreter's results at several sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.interp.interp_graph import run_function

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
functional = torch.nn.functional
Array = np.ndarray[Any, Any]
SEED = torch.Generator().manual_seed(5)


def real(*shape: int) -> Any:
    return torch.randn(*shape, generator=SEED)


def whole(high: int, *shape: int) -> Any:
    return torch.randint(0, high, shape, generator=SEED)


def between(name: str, low: int, high: int = 64) -> Any:
    return torch.export.Dim(name, min=low, max=high)


class Module(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A module of a function of itself and its inputs, with buffers."""

    def __init__(self, function: Callable[..., Any], buffers: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        for name, value in buffers.items():
            self.register_buffer(name, value.clone())

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def compare(
    function: Callable[..., Any],
    *calls: Sequence[Any],
    dims: Sequence[Any] | None = None,
    state: Sequence[str] = (),
    **buffers: Any,
) -> list[Array]:
    """Compare a program with torch at several inputs, of which the first is exported. Return the last results.

    Args:
        dims: Dynamic dims of each input.
        state: Buffers that the program writes to, which are inputs behind the others, and whose new values are results.
    """
    shapes = None if dims is None else (tuple(dims),)
    exported = torch.export.export(Module(function, buffers), tuple(calls[0]), dynamic_shapes=shapes, strict=False)
    module, results = load_model(exported), []
    for args in calls:
        eager, inputs = Module(function, buffers), [t.numpy().copy() for t in args]
        given = [t.clone() for t in args]
        wanted = eager(*given)
        listed = list(wanted) if isinstance(wanted, (tuple, list)) else [wanted]
        got = run_function(module, "main", [*inputs, *(buffers[name].numpy() for name in state)])
        results = list(got) if isinstance(got, tuple) else [got]
        listed += [new for old, new in zip(args, given) if not torch.equal(old, new)]
        listed += [getattr(eager, name) for name in state]
        assert len(results) == len(listed)
        for a, b in zip(results, listed, strict=True):
            assert a.shape == tuple(b.shape)
            np.testing.assert_allclose(a, b.numpy(), rtol=1e-4, atol=1e-5)
    return results


def test_relu_in_place_of_a_value_and_of_an_input() -> None:
    compare(lambda m, x: functional.relu(x + 1, inplace=True), [real(3, 4)], dims=[{0: between("n", 2)}])
    compare(lambda m, x: functional.relu(x, inplace=True) * 2, [real(3, 4)], dims=[{0: between("n", 2)}])


def test_written_inputs_and_buffers_are_results() -> None:
    def adds(m: Any, x: Any) -> Any:
        x.add_(1)
        return x * 2

    def counts(m: Any, x: Any) -> Any:
        m.count.add_(1)
        return x + m.count

    def fills(m: Any, x: Any) -> Any:
        m.cache[:, : x.shape[1]] = x
        return m.cache.sum(1)

    compare(adds, [real(3, 4)], [real(5, 4)], dims=[{0: between("n", 2)}])
    _, count = compare(counts, [real(3, 4)], dims=[{0: between("n", 2)}], state=["count"], count=torch.zeros(4))
    assert count.tolist() == [1] * 4
    compare(
        fills, [real(2, 3)], [real(2, 9)], dims=[{1: between("n", 2, 15)}], state=["cache"], cache=torch.zeros(2, 16)
    )


def test_buffers_are_the_last_inputs_and_results_in_one_order() -> None:
    def writes(m: Any, x: Any) -> Any:
        m.b.mul_(2)
        x.add_(1)
        m.a.add_(x)
        return x * m.b

    compare(writes, [real(3, 4)], state=["a", "b"], a=torch.zeros(3, 4), b=torch.ones(4))
    model = torch.export.export(Module(writes, {"a": torch.zeros(3, 4), "b": torch.ones(4)}), (real(3, 4),))
    a, b = run_function(load_model(model), "initial_state", [])
    assert a.shape == (3, 4) and b.tolist() == [1] * 4


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_batch_norm_in_training_moves_the_statistics(train: bool, half: bool) -> None:
    def normalised(m: Any, x: Any) -> Any:
        y = functional.batch_norm(x.half() if half else x, m.mean, m.var, m.weight, None, train, 0.3, 1e-3)
        return y.float()

    tensors = {"mean": real(3), "var": real(3) ** 2 + 0.1, "weight": real(3)}
    compare(
        normalised, [real(4, 3, 5)], [real(2, 3, 1)], dims=[{0: between("n", 2), 2: between("m", 1)}],
        state=["mean", "var"] if train else [], **tensors,
    )  # fmt: skip


def test_attention_over_float64_heads_of_a_dynamic_size_has_full_precision() -> None:
    """The root of a size that is a symbol was computed in float32."""
    x, y = real(1, 2, 4, 11).double(), real(1, 2, 4, 6).double()
    sizes = [{3: between("size", 2)}]
    (got,) = compare(lambda m, x: functional.scaled_dot_product_attention(x, x, x), [x], [y], dims=sizes)
    expected = functional.scaled_dot_product_attention(y, y, y).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-14)


def test_count_of_largest_elements_may_be_a_dim() -> None:
    sizes = [{1: between("n", 2)}]
    compare(lambda m, x: torch.topk(x, x.shape[1], 1)[0], [real(3, 5)], [real(3, 9)], dims=sizes)


def test_sign_of_a_number_is_copied() -> None:
    for sign in (1, -2.5, -0.0):
        (got,) = compare(lambda m, x: torch.copysign(x, sign), [torch.tensor([1.0, -2.0, 0.0, -0.0])])  # noqa: B023
        assert np.array_equal(np.signbit(got), [np.signbit(sign)] * 4)


def test_classes_as_vectors_of_one_bit() -> None:
    """The exported program checks that no class is too large."""
    sizes = [{0: between("n", 2)}]
    compare(lambda m, x: functional.one_hot(x, 5), [whole(5, 4)], [whole(5, 9)], dims=sizes)


@pytest.mark.parametrize("source", ["float32", "int32", "float64", "int16"])
@pytest.mark.parametrize("target", ["float32", "int16", "int64", "uint8"])
def test_view_as_another_type(source: str, target: str) -> None:
    x = whole(9999, 3, 8).to(getattr(torch, source))
    compare(lambda m, x: x.view(getattr(torch, target)), [x], dims=[{0: between("n", 2)}])


def test_roll_and_logsumexp_of_no_elements() -> None:
    calls, dims = ([real(3, 4)], [real(0, 4)]), [{0: between("n", 0)}]
    compare(lambda m, x: torch.roll(x, 3, 0), *calls, dims=dims)
    compare(lambda m, x: torch.logsumexp(x, 0), *calls, dims=dims)
    compare(lambda m, x: torch.logsumexp(x, (0, 1), keepdim=True), *calls, dims=dims)


def test_logsumexp_of_infinities() -> None:
    x = torch.tensor([[float("inf"), 1], [-float("inf"), -float("inf")], [2, -float("inf")]])
    compare(lambda m, x: torch.logsumexp(x, 1), [x], dims=[{0: between("n", 2)}])


def test_embedding_bag_maximum() -> None:
    table = real(10, 3)
    bags = [torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 4, 4])]
    compare(lambda m, i, o: functional.embedding_bag(i, m.table, o, mode="max"), bags, table=table)
    rows = [whole(10, 4, 3)]
    compare(
        lambda m, i: functional.embedding_bag(i, m.table, mode="max"), rows, dims=[{0: between("n", 2)}], table=table
    )


@pytest.mark.parametrize("mode, scale", [("bilinear", 1.5), ("bicubic", (1.3, 2.7)), ("nearest", 1.3)])
def test_interpolate_by_a_fraction(mode: str, scale: Any) -> None:
    dims = [{2: between("h", 4), 3: between("w", 4)}]
    calls = [[real(1, 2, *size)] for size in ((6, 8), (7, 9), (10, 5))]
    compare(lambda m, x: functional.interpolate(x, scale_factor=scale, mode=mode), *calls, dims=dims)


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_distances_of_many_rows(p: float) -> None:
    dims = [{0: between("a", 26)}, {0: between("b", 26)}]
    compare(lambda m, x, y: torch.cdist(x, y, p=p), [real(30, 5), real(40, 5)], [real(26, 5), real(31, 5)], dims=dims)


def test_mode() -> None:
    calls = [[whole(4, 5, 9)], [whole(3, 2, 9)]]
    compare(lambda m, x: torch.mode(x, 1), *calls, dims=[{0: between("n", 2)}])
    compare(lambda m, x: torch.mode(x.float(), 0, keepdim=True)[0], *calls, dims=[{0: between("n", 2)}])


def test_layer_norm_with_mean_and_inverse_deviation() -> None:
    dims = [{0: between("n", 2)}]
    compare(lambda m, x: torch.native_layer_norm(x, [4], m.g, m.b, 1e-5), [real(3, 4)], dims=dims, g=real(4), b=real(4))


def test_slice_scatter_with_a_step() -> None:
    compare(lambda m, x, y: torch.slice_scatter(x, y, 0, 1, 6, 2), [real(7, 4), real(3, 4)])
    doubled = lambda m, x: torch.slice_scatter(x, x[::2] * 2, 0, 0, 9999, 2)
    compare(doubled, [real(6, 4)], [real(7, 4)], dims=[{0: between("n", 4)}])

    def waves(m: Any, x: Any) -> Any:
        table = torch.zeros_like(x)
        table[:, 0::2], table[:, 1::2] = torch.sin(x[:, 0::2]), torch.cos(x[:, 1::2])
        return table

    compare(waves, [real(6, 8)], [real(3, 8)], dims=[{0: between("n", 2)}])


def test_condition_on_a_size() -> None:
    def chosen(m: Any, x: Any) -> Any:
        return torch.cond(x.shape[0] > 4, lambda x: x + 1, lambda x: x * 2, (x,))

    compare(chosen, [real(6, 4)], [real(3, 4)], dims=[{0: between("n", 2)}])


def test_whether_all_are_true() -> None:
    dims = [{0: between("n", 2)}]
    positive = lambda m, x: torch.where(torch.ops.aten._is_all_true(x > -1), x, -x)
    compare(positive, [real(6, 4)], [real(6, 4).abs()], dims=dims)


@pytest.mark.parametrize("exponent", [0.5, -0.5, 2])
def test_powers_of_sizes(exponent: float) -> None:
    dims = [{0: between("n", 2)}]
    compare(lambda m, x: x * (x.shape[0] ** exponent), [real(6, 4)], [real(3, 4)], dims=dims)
    if exponent == 2:
        compare(lambda m, x: x.new_ones(x.shape[0] ** 2), [real(6, 4)], [real(3, 4)], dims=dims)


WRAPPED: tuple[Callable[..., Any], ...] = (
    lambda m, x: torch.clamp(x, -3, 7), lambda m, x: torch.clamp(x, min=-3), lambda m, x: torch.clamp(x, max=-3),
    lambda m, x: x == -3, lambda m, x: x < 300, lambda m, x: -3 - x, lambda m, x: x // -3, lambda m, x: x % -3,
    lambda m, x: torch.where(x > 3, x, -3), lambda m, x: x.masked_fill(x > 3, -3), lambda m, x: torch.full_like(x, -3),
    lambda m, x: x & -3, lambda m, x: torch.scatter(x, 0, torch.tensor([1]), -3), lambda m, x: x.to(torch.int8) == 200,
)  # fmt: skip


@pytest.mark.parametrize("function", WRAPPED)
def test_numbers_beyond_the_integer_type_wrap_around(function: Callable[..., Any]) -> None:
    compare(function, [torch.tensor([0, 1, 5, 44, 200, 253], dtype=torch.uint8)])


@pytest.mark.parametrize("kept", [True, False])
def test_any_and_all_of_uint8_are_0_or_1(kept: bool) -> None:
    x = torch.tensor([[0, 8, 9], [3, 2, 7], [0, 0, 0]], dtype=torch.uint8)
    compare(lambda m, x: (torch.any(x), torch.all(x), torch.any(x, 1, kept), torch.all(x, 0, kept)), [x])
    assert [v.dtype for v in compare(lambda m, x: (torch.any(x), torch.all(x, 1)), [x])] == [np.uint8, np.uint8]


def test_numbers_from_tensors_below_0() -> None:
    x, numbers = torch.arange(10.0).reshape(2, 5), [torch.tensor(k) for k in (3, -2, 0)]
    functions: tuple[Callable[..., Any], ...] = (
        lambda m, x, k: x[:, k], lambda m, x, k: x + k.item(), lambda m, x, k: torch.full((2,), k.item()),
        lambda m, x, k: x.clamp(k.item(), 3), lambda m, x, k: x.masked_fill(x > 2, k.item()), lambda m, x, k: x[:, k] * k.item(),
    )  # fmt: skip
    for function in functions:
        compare(function, *([x, k] for k in numbers))


def test_median_of_all_without_elements() -> None:
    def medians(m: Any, x: Any, k: Any) -> Any:
        return torch.median(x), torch.nanmedian(x), torch.median(k)

    some, dims = torch.tensor([1.0, 7.0, 2.0, 5.0]), [{0: between("n", 0)}, {0: between("k", 0)}]
    compare(
        medians, [some, torch.arange(5)], [torch.arange(3.0), torch.arange(2)], [some[:0], torch.arange(0)], dims=dims
    )


def test_running_extremes_and_sums_without_elements() -> None:
    def running(m: Any, x: Any) -> Any:
        return (*torch.cummax(x, 1), *torch.cummin(x, -1), torch.logcumsumexp(x, 1))

    compare(running, [real(2, 4)], [torch.zeros(2, 0)], [real(2, 1)], dims=[{1: between("n", 0)}])
