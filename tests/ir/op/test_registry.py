"""The table of operators is complete, and importers derive the handlers of elementwise operators from it."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import relax_tune.ir.op
from relax_tune.ir.frontend.onnx import importer as onnx_importer
from relax_tune.ir.frontend.onnx.versions import VERSIONS
from relax_tune.ir.frontend.torch import importer as torch_importer
from relax_tune.ir.op.math.elementwise import Exp
from relax_tune.ir.op.registry import ELEMENTWISE, MODULES, OPERATORS, operators_in, registry

ROOT = Path(__file__).parents[3]
ONNX = {op.onnx.name: op for op in ELEMENTWISE.values() if op.onnx}
ATEN = {f"aten.{op.torch}.default": op for op in ELEMENTWISE.values() if op.torch}


def test_registry_lists_every_module_with_operators() -> None:
    names = [m.name for m in pkgutil.walk_packages(relax_tune.ir.op.__path__, "relax_tune.ir.op.")]
    modules = {m for m in map(importlib.import_module, names) if operators_in(m)}
    assert modules == set(MODULES)
    assert sum(len(operators_in(m)) for m in MODULES) == len(OPERATORS)


def test_registry_refuses_second_operator_of_a_name() -> None:
    with pytest.raises(ValueError, match="'exp'"):
        registry((Exp, Exp))


def keys_written(package: str) -> set[str]:
    """Return the keys of the tables `HANDLERS` that the modules of a package write out."""
    keys: set[str] = set()
    for file in (ROOT / "ir" / "frontend" / package).rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if (
                isinstance(node, ast.AnnAssign)
                and ast.unparse(node.target) == "HANDLERS"
                and isinstance(node.value, ast.Dict)
            ):
                keys |= {k.value for k in node.value.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}
    return keys


def test_handlers_of_elementwise_operators_are_not_shadowed() -> None:
    assert set(ONNX) <= set(onnx_importer.SUPPORTED) and not set(ONNX) & keys_written("onnx")
    assert set(ATEN) <= set(torch_importer.SUPPORTED) and not set(ATEN) & keys_written("torch")
    assert len(keys_written("onnx")) > 100 and len(keys_written("torch")) > 100


def test_versions_of_elementwise_operators_are_derived() -> None:
    assert {name: VERSIONS[name] for name in ONNX} == {name: op.onnx.versions for name, op in ONNX.items() if op.onnx}
