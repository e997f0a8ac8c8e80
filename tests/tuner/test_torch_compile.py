"""The backend of torch.compile, against torch itself."""

from __future__ import annotations

import inspect
import re
import tomllib
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import relax_tune as rt
from relax_tune.ir.frontend.torch.importer import SUPPORTED

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
pytestmark = [pytest.mark.torch, pytest.mark.ccompiler, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
QUICK = {"db": "memory://", "self_test": False}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


class Backend:
    """The backend, which counts the graphs that torch passes to it."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, arguments: Any, **options: Any) -> Any:
        compiled = rt.torch_backend(graph, arguments, **options)
        self.graphs += 1
        return compiled


def compiled(model: Any, backend: Any = rt.torch_backend, **options: Any) -> Any:
    return torch.compile(model, backend=backend, dynamic=True, options={**QUICK, **options})


def same(found: Any, wanted: Any) -> None:
    """Compare results with torch's in structure, type, values and layout."""
    if not isinstance(wanted, torch.Tensor):
        assert type(found) is type(wanted)
        if isinstance(wanted, (tuple, list)):
            assert len(found) == len(wanted)
            for a, b in zip(found, wanted):
                same(a, b)
        else:
            assert found == wanted
        return
    assert found.dtype == wanted.dtype and found.stride() == wanted.stride()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Layers(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Two layers, with results of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(4, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Any, factor: float = 2) -> Any:
        y = torch.relu(self.dense(x)) * factor + self.shift
        return y, y.transpose(0, 1) * 2, x.view(-1), x.shape[0] * 2, None


@pytest.mark.filterwarnings("error::relax_tune.tuner.torch_compile.FallbackWarning")
def test_model_at_several_shapes_equals_eager_with_one_graph() -> None:
    model, backend = Layers().eval(), Backend()
    fast = compiled(model, backend)
    for shape in ((3, 5, 4), (2, 7, 4), (31, 17, 4)):
        x = torch.randn(shape)
        found = fast(x)
        same(found, model(x))
        found[2].zero_()  # a view of the input
        assert not x.any()
    assert backend.graphs == 1
    with torch.inference_mode():
        same(fast(torch.ones(3, 5, 4)), model(torch.ones(3, 5, 4)))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modules that are built."""
    modules: list[Any] = []
    api = rt.torch_backend.__globals__["api"]
    build = api.build
    monkeypatch.setattr(api, "build", lambda module, **more: modules.append(module) or build(module, **more))
    return modules


class Attends(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A layer whose memory layouts differ where a dim is 1, with a size among its results."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = torch.nn.LayerNorm(8), torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        places = torch.arange(64)[None, : x.shape[1]] * 2  # the length is at most 64
        return self.inner(y, y, y, need_weights=False)[0] + x, y[:, 0] * 2, x.shape[0], x.shape[1] + 2, places


@pytest.mark.filterwarnings("error::relax_tune.tuner.torch_compile.FallbackWarning")
def test_sizes_of_one_share_the_program_of_other_sizes(built: list[Any]) -> None:
    model, backend = Attends().eval(), Backend()
    fast = compiled(model, backend)
    for shape in ((3, 5, 8), (1, 5, 8), (4, 1, 8), (1, 1, 8), (2, 7, 8), (1, 9, 8)):
        x = torch.randn(shape)
        same(fast(x), model(x))
    assert backend.graphs == 4 and len(built) == 1


SHIFT = torch.tensor([1.0, 2.0])


@pytest.mark.filterwarnings("error::relax_tune.tuner.torch_compile.FallbackWarning")
@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.squeeze(0) * 2,
        lambda x: x * 2 if x.shape[0] == 1 else x * 3,
        lambda x: x * (1 if x.shape[0] == 1 else True),
        lambda x: x + (SHIFT if x.shape[0] == 1 else SHIFT * 2),
        lambda x: x + torch.tensor([1.0, 2.0] if x.shape[0] == 1 else [1.0, 3.0]),
        lambda x: x.sum(0 if x.shape[0] == 1 else 1),
        lambda x: x.to(torch.int32 if x.shape[0] == 1 else torch.int64),
    ],
    ids=["squeeze", "number", "bool", "expression", "constant", "axis", "type"],
)
def test_size_of_one_with_another_graph_equals_eager(model: Callable[[Any], Any], built: list[Any]) -> None:
    fast = compiled(model)
    for rows in (3, 1, 4):
        x = torch.randn(rows, 2)
        same(fast(x), model(x))
    assert len(built) == 2


@pytest.mark.filterwarnings("error::relax_tune.tuner.torch_compile.FallbackWarning")
def test_size_of_one_with_results_in_another_order_equals_eager(built: list[Any]) -> None:
    def ordered(x: Any) -> Any:
        double, triple = x * 2, x * 3
        return (double, triple) if x.shape[0] == 1 else (triple, double, x.shape[0])

    fast = compiled(ordered)
    for rows in (3, 1, 4):
        x = torch.randn(rows, 2)
        same(fast(x), ordered(x))
    assert len(built) == 1


@pytest.mark.filterwarnings("error::relax_tune.tuner.torch_compile.FallbackWarning")
def test_models_of_one_structure_keep_separate_programs(built: list[Any]) -> None:
    for _ in range(2):
        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        same(compiled(model)(x), model(x))
        same(compiled(model)(x[:1]), model(x[:1]))
    assert len(built) == 2


@pytest.mark.filterwarnings("error::relax_tune.tuner.torch_compile.FallbackWarning")
def test_numbers_as_arguments_equal_eager() -> None:
    def scaled(x: Any, factor: float) -> Any:
        return x * factor + 1

    fast = compiled(scaled)
    for factor in (3, 2.5, 3.5):
        same(fast(torch.ones(4, 3).T, factor), scaled(torch.ones(4, 3).T, factor))


def test_operators_written_for_numbers_are_supported() -> None:
    # torch writes them after its decompositions
    reference = pytest.importorskip(
        "torch.utils._sympy.reference", reason="needs a torch that turns numbers into tensors"
    )
    written = set(re.findall(r"ops\.(aten\.\w+\.\w+)", inspect.getsource(reference.TensorReferenceAnalysis)))
    # the last one stands behind a `raise`
    assert "aten.mul.Tensor" in written and written - SUPPORTED.keys() <= {"aten.true_divide.default"}


@pytest.mark.filterwarnings("error::relax_tune.tuner.torch_compile.FallbackWarning")
def test_arithmetic_on_numbers_and_dims_equals_eager() -> None:
    def scaled(x: Any, factor: float) -> Any:
        places = torch.arange(0.5, 4, 0.3), torch.arange(0, 7, 2.0, dtype=torch.int64)
        return x * (1 / factor + factor / 3), x[: x.shape[0] >> 1], x.new_zeros(x.shape[0] << 1), *places

    fast = compiled(scaled)
    for rows, factor in ((6, 1.7), (7, 2.6)):
        x = torch.randn(rows, 2)
        same(fast(x, factor), scaled(x, factor))


RATE = 0.25


class Scales(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = torch.nn.LayerNorm(4), 0.75

    def forward(self, x: Any, most: float) -> Any:
        return torch.clamp(self.norm(x) * self.scale, max=most) + RATE


@pytest.mark.filterwarnings("error::relax_tune.tuner.torch_compile.FallbackWarning")
def test_numbers_of_a_model_are_constants_until_changed(built: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Scales(), torch.randn(3, 4)
    fast = compiled(model)
    same(fast(x, 0.5), model(x, 0.5))
    assert [p.name for p in built[0].functions["main"].params] == ["x"]
    same(fast(x, 0.5), model(x, 0.5))
    model.scale, model.norm.eps = 1.25, 0.5
    same(fast(x, 0.5), model(x, 0.5))
    monkeypatch.setitem(globals(), "RATE", 2.5)
    same(fast(x, 0.5), model(x, 0.5))


@pytest.mark.filterwarnings("error::relax_tune.tuner.torch_compile.FallbackWarning")
def test_weights_changed_in_place_are_seen() -> None:
    model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
    fast = compiled(model)
    same(fast(x), model(x))
    model.weight.mul_(2)
    same(fast(x), model(x))
    model.bias = torch.nn.Parameter(torch.randn(3))
    same(fast(x), model(x))
    model.weight.data = torch.randn(3, 4)
    same(fast(x), model(x))


def test_weights_changed_often_run_in_eager_with_a_warning() -> None:
    model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
    fast = compiled(model)
    with pytest.warns(rt.FallbackWarning, match="weights were changed more than") as caught:
        for _ in range(7):
            model.weight.mul_(1.5)
            same(fast(x), model(x))
    assert len(caught) == 1


@pytest.mark.filterwarnings("error::relax_tune.tuner.torch_compile.FallbackWarning")
def test_layers_with_one_graph_keep_separate_weights() -> None:
    class Stack(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Stack(), torch.randn(3, 4)
    wanted = model(x)
    for layer in model.layers:
        layer.compile(backend=rt.torch_backend, dynamic=True, options=QUICK)
    same(model(x), wanted)
    same(model(x), wanted)


@pytest.mark.filterwarnings("error::relax_tune.tuner.torch_compile.FallbackWarning")
def test_written_inputs_and_buffers_are_written() -> None:
    class Counts(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))
            self.norm = torch.nn.BatchNorm1d(3)

        def forward(self, x: Any) -> Any:
            self.count.add_(1)
            x.mul_(2)
            return self.norm(x) + self.count

    fast, slow = Counts(), Counts()
    quick = compiled(fast)
    for _ in range(3):
        x = torch.randn(4, 3)
        y = x.clone()
        same(quick(x), slow(y))
        same([x, *fast.buffers()], [y, *slow.buffers()])


@pytest.mark.filterwarnings("error::relax_tune.tuner.torch_compile.FallbackWarning")
def test_graph_breaks_and_element_types_equal_eager() -> None:
    def broken(x: Any, ids: Any) -> Any:
        y = x.to(torch.bfloat16) * 2
        torch._dynamo.graph_break()
        return y + 1, ids[None] * 2, ids > 1

    backend = Backend()
    fast = compiled(broken, backend)
    for rows in (3, 5):
        given = torch.randn(rows, 4), torch.arange(rows)
        same(fast(*given), broken(*given))
    assert backend.graphs == 2


def zeta(x: Any) -> Any:
    return torch.special.zeta(x + 2, x + 1)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (zeta, "special_zeta"),
        (lambda x: torch.nn.functional.dropout(x) * 0 + x, "random numbers"),
        (lambda x: torch.view_as_complex(x.reshape(-1, 2)) * 2, "complex"),
    ],
    ids=["operator", "random", "complex"],
)
def test_unsupported_graph_runs_in_eager_with_one_warning(model: Callable[[Any], Any], reason: str) -> None:
    fast = compiled(model)
    with pytest.warns(rt.FallbackWarning, match=reason) as caught:
        for rows in (2, 4):
            x = torch.rand(rows, 4)
            same(fast(x), model(x))
    assert len(caught) == 1


def test_training_runs_in_eager_and_computes_gradients() -> None:
    model, x = Layers(), torch.randn(3, 5, 4)
    with torch.enable_grad(), pytest.warns(rt.FallbackWarning, match="computes gradients"):
        compiled(model)(x)[0].sum().backward()
    assert model.dense.weight.grad is not None


def test_index_out_of_range_is_the_error_of_eager() -> None:
    model = torch.nn.Embedding(5, 4)
    fast = compiled(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(fast(torch.tensor([1, 2])), model(torch.tensor([1, 2])))
    with pytest.warns(rt.FallbackWarning, match="indices"), pytest.raises(IndexError):
        fast(torch.tensor([1, 9]))


def test_range_of_a_marked_dim_is_the_range_of_the_symbol(built: list[Any]) -> None:
    model, x = torch.nn.ReLU(), torch.randn(3, 4)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=8)
    same(torch.compile(model, backend=rt.torch_backend, options=QUICK)(x), model(x))
    assert [(b.lower, b.upper) for b in built[0].bounds] == [(2, 8)]


@pytest.mark.process
def test_second_compilation_and_other_importers_measure_nothing(tmp_path: Path) -> None:
    model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
    options = {"tune": "quick", "trials": 1, "db": tmp_path / "records.db", "self_test": False}

    def records() -> int:
        with rt.open_database(str(tmp_path / "records.db")) as store:
            return len(list(store.query(store.targets()[0].key)))

    same(compiled(model, **options)(x), model(x))
    measured = records()
    assert measured
    torch._dynamo.reset()
    same(compiled(torch.nn.Linear(4, 3), **options)(x).shape, model(x).shape)
    assert records() == measured
    dim = torch.export.Dim("rows", min=1)
    module = rt.load_model(model, example_inputs=(x,), dynamic_shapes={"input": {0: dim}})
    work = rt.tune(module, target="c", db=options["db"], effort="quick", trials=1).work
    assert work.measurements == 0 and records() == measured


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tunes": "quick"}, "got tunes"),
        ({"tune": "fast"}, "option tune: .* 'fast'"),
        ({"tune": True}, "option tune: .* True"),
        ({"trials": 3}, "got trials"),
        ({"target": "c,opencl"}, "option target: expected one device"),
        ({"target": "abacus"}, "abacus"),
        ({"threads": "two"}, "whole number"),
        ({"db": "missing.db"}, "missing.db"),
    ],
)
def test_wrong_option_is_an_error(options: dict[str, Any], match: str) -> None:
    with pytest.raises(Exception, match=match) as caught:
        compiled(torch.nn.ReLU(), **options)(torch.ones(2, 3))
    assert isinstance(getattr(caught.value, "inner_exception", None), rt.RelaxTuneError)


def test_mode_of_inductor_is_an_error() -> None:
    with pytest.raises(Exception, match="mode of torch"):
        torch.compile(torch.nn.ReLU(), backend=rt.torch_backend, mode="max-autotune")(torch.ones(2, 3))


def test_entry_point_names_the_backend() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["torch_dynamo_backends"].items()
    assert name == "relax_tune"
    assert EntryPoint(name, value, "torch_dynamo_backends").load() is rt.torch_backend
