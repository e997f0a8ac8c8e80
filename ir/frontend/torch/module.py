"""Export of torch modules by torch.export.

Tests: `tests/ir/frontend/torch/test_modules.py`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from relax_tune.errors import UserError
from relax_tune.ir.frontend.torch.export import require_torch


def is_torch_module(value: object) -> bool:
    """Return True for a torch.nn.Module, without importing torch."""
    return any(c.__name__ == "Module" and c.__module__ == "torch.nn.modules.module" for c in type(value).__mro__)


def export_module(
    module: Any,
    example_inputs: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Any:
    """Export a module by torch.export.

    Args:
        module: The torch.nn.Module.
        example_inputs: Positional arguments of `forward`.
        example_kwargs: Arguments of `forward` by name.
        dynamic_shapes: As of torch.export.export.

    Raises:
        UserError: Examples are missing, or torch cannot export the module with them. The message has torch's reason.
    """
    torch, name = require_torch(), type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise UserError(
            f"torch module {name}: expected one in Python, got TorchScript, which torch.export does not read; give the module that "
            "was traced or scripted"
        )
    if example_inputs is None and example_kwargs is None:
        raise UserError(f"torch module {name}: expected examples of its inputs, got none; {_advice(module)}")
    if isinstance(example_inputs, torch.Tensor) or not isinstance(example_inputs or (), Sequence):
        raise UserError(
            f"example_inputs: expected a tuple with a value for each input of {name}, got a {type(example_inputs).__name__}; "
            f"{_advice(module)}"
        )
    if not isinstance(example_kwargs or {}, Mapping):
        raise UserError(f"example_kwargs: expected inputs of {name} by name, got a {type(example_kwargs).__name__}")
    _warn_of_training(torch, module)
    arguments = tuple(example_inputs or ()), dict(example_kwargs or {})
    try:
        with torch.no_grad():
            return torch.export.export(module, *arguments, dynamic_shapes=dynamic_shapes)
    except Exception as error:  # the code of the module may raise anything
        why = " ".join(str(error).split()) or "no reason given"
        raise UserError(
            f"torch module {name}: expected a module and examples that torch.export can export, got {type(error).__name__}: "
            f"{why:.1500}"
        ) from error


def _advice(module: Any) -> str:
    """Return the line to write for a module, with the names of its inputs."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in kinds and p.default is p.empty] or ["x"]
    dims = ", ".join(f'"{name}": {{0: torch.export.Dim.DYNAMIC}}' for name in names)
    return f"write rt.load_model(model, example_inputs=({', '.join(names)},), dynamic_shapes={{{dims}}})"


def _warn_of_training(torch: Any, module: Any) -> None:
    """Warn of layers that compute something else in training."""
    classes = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._NormBase)
    layers = (layer for layer in module.modules() if isinstance(layer, classes) and layer.training)
    first = next((type(layer).__name__ for layer in layers if getattr(layer, "p", 1)), None)
    if first is not None:
        warnings.warn(
            f"torch module {type(module).__name__} is in training mode, in which {first} computes something else; call "
            "model.eval() before loading it for inference",
            UserWarning,
            stacklevel=4,  # the line that calls `load_model`
        )
