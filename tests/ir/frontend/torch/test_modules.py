"""Torch modules given to `load_model`, against torch itself."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from relax_tune.errors import UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.interp.interp_graph import run_function

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
pytestmark = pytest.mark.torch
Dim = torch.export.Dim


class Scaled(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A linear layer, scaled by a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(4, 3)

    def forward(self, x: Any, scale: Any) -> Any:
        return torch.relu(self.dense(x)) * scale[:, None]


def agrees(module: IRModule, model: Any, rows: int) -> None:
    given = torch.randn(rows, 4), torch.randn(rows)
    result = run_function(module, "main", [t.numpy() for t in given])
    np.testing.assert_allclose(result, model(*given).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["named", "AUTO", "DYNAMIC"])
def test_module_with_dynamic_dims_is_exported(kind: str) -> None:
    model, dim = Scaled().eval(), Dim("rows", min=1, max=64) if kind == "named" else getattr(Dim, kind)
    shapes, name = {"x": {0: dim}, "scale": {0: dim}}, "rows" if kind == "named" else "x_0"
    example = torch.randn(3, 4), torch.randn(3)
    module = load_model(model, bounds={name: (2, 32)}, example_inputs=example, dynamic_shapes=shapes)
    assert [(b.var.name, b.lower, b.upper) for b in module.bounds] == [(name, 2, 32)]
    agrees(module, model, 3)
    agrees(module, model, 17)


def test_module_with_examples_by_name_is_exported() -> None:
    model = Scaled().eval()
    example = {"x": torch.randn(3, 4), "scale": torch.randn(3)}
    agrees(load_model(model, example_kwargs=example), model, 3)
    agrees(load_model(model, example_inputs=[example["x"]], example_kwargs={"scale": example["scale"]}), model, 3)


def test_module_without_examples_names_the_line() -> None:
    with pytest.raises(UserError, match="Scaled: expected examples") as caught:
        load_model(Scaled())
    line = str(caught.value).partition("write ")[2].replace("rt.load_model", "load_model")
    given = {"model": Scaled().eval(), "x": torch.randn(3, 4), "scale": torch.randn(3)}
    module = eval(line, {"load_model": load_model, "torch": torch, **given})
    agrees(module, given["model"], 5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"example_inputs": torch.randn(3, 4)}, "example_inputs: expected a tuple .* Tensor"),
        ({"example_kwargs": [1]}, "example_kwargs: .* got a list"),
        ({"example_inputs": (torch.randn(3, 4),)}, "Scaled: .* missing a required argument"),
        ({"example_inputs": (torch.randn(3, 5), torch.randn(3))}, "Scaled: expected a module and examples"),
    ],
)
def test_module_with_wrong_examples_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        load_model(Scaled().eval(), **options)


def test_module_of_torchscript_is_refused() -> None:
    scripted = torch.jit.trace(torch.nn.Linear(4, 3), (torch.randn(2, 4),))
    for options in ({}, {"example_inputs": (torch.randn(2, 4),)}):
        with pytest.raises(UserError, match="got TorchScript"):
            load_model(scripted, **options)


def test_dynamic_dim_fixed_by_the_module_is_refused() -> None:
    shapes = {"x": {1: Dim("width", min=2, max=8)}, "scale": None}
    with pytest.raises(UserError, match=r"Scaled: .* width"):
        load_model(Scaled().eval(), example_inputs=(torch.randn(3, 4), torch.randn(3)), dynamic_shapes=shapes)


def test_examples_for_other_models_are_refused() -> None:
    example = torch.randn(3, 4), torch.randn(3)
    program = torch.export.export(Scaled(), example)
    for name, value in (("example_inputs", example), ("dynamic_shapes", {"x": None})):
        with pytest.raises(UserError, match=f"{name} applies only to a torch.nn.Module"):
            load_model(program, **{name: value})


def test_module_in_training_with_dropout_warns() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5))
    with pytest.warns(UserWarning, match="training mode, in which Dropout"):
        load_model(model, example_inputs=(torch.randn(2, 4),))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_model(model.eval(), example_inputs=(torch.randn(2, 4),))
        load_model(torch.nn.Linear(4, 3), example_inputs=(torch.randn(2, 4),))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_encoder_layers_of_torch_equal_torch(norm_first: bool, masked: bool) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True, norm_first=norm_first)
    model, rows, length = (
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(),
        Dim("b", min=1),
        Dim("n", min=1),
    )
    if masked:
        shapes = {"src": {0: rows, 1: length}, "src_key_padding_mask": {0: rows, 1: length}}
        example = {"src_key_padding_mask": torch.zeros(2, 5, dtype=torch.bool)}
    else:
        shapes, example = {"src": {0: rows, 1: length}}, {}
    module = load_model(model, example_inputs=(torch.randn(2, 5, 8),), example_kwargs=example, dynamic_shapes=shapes)
    x = torch.randn(3, 7, 8)
    given = {"src_key_padding_mask": torch.arange(7).expand(3, 7) > 4} if masked else {}
    result = run_function(module, "main", [x.numpy(), *(v.numpy() for v in given.values())])
    with torch.no_grad():
        np.testing.assert_allclose(result, model(x, **given).numpy(), rtol=1e-4, atol=1e-5)
