"""Models as text: a program as `print_text` writes it, with its weights in a second file of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from relax_tune.errors import DeduceError, ParseError, UserError, VerifyError
from relax_tune.ir.check.untrusted import accept
from relax_tune.ir.core.expr import Var
from relax_tune.ir.core.function import Bound, IRModule
from relax_tune.ir.core.graph import Value
from relax_tune.ir.core.graph_walk import entries
from relax_tune.ir.core.struct_info import TensorInfo, info_symbols
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.text.parser import parse_module
from relax_tune.ir.text.printer import print_text

SUFFIX = ".relax"
WEIGHTS = (".safetensors", ".npz")


def load_text(path: Path, bounds: Mapping[str, tuple[int, int]] | None = None) -> IRModule:
    """Load a model from a file of program text.

    Weights are read from the .safetensors or .npz file of the same name in the same folder, if it exists. A text of one tensor
    function gives a model that calls it: inputs marked Const with a weight of their name are constants, others inputs. Accesses
    of tensor functions are limited to their buffers (`in_bounds`).

    Args:
        bounds: Inclusive (lower, upper) by symbol name, within the declared bounds.

    Raises:
        ParseError: The text does not parse (with line, column and a caret) or is not well-formed, or weights are missing or
            damaged.
        UserError: Impossible bounds.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ParseError(f"{path}: program text cannot be read: {error}; give a file of text in UTF-8") from None
    weights = _weights(path)
    try:
        module = parse_module(text, OPERATORS, weights)
        if len(module.functions) == len(module.prims) == 1:
            module = _calling(module)
        module = accept(module, " or ".join(path.with_suffix(s).name for s in WEIGHTS))
    except (ParseError, VerifyError, DeduceError) as error:
        raise ParseError(f"{path}: {error}") from None
    return _within(module, bounds or {})


def save_text(module: IRModule, path: str | Path) -> Path:
    """Write a module as text that `load_model` reads, and its weights as .safetensors of the same name.

    Raises:
        UserError: The name does not end in .relax, or the files cannot be written.
    """
    target = Path(path)
    if target.suffix != SUFFIX:
        raise UserError(f"{target}: expected a name that ends in {SUFFIX}, got {target.suffix or 'none'}; add it")
    arrays = {name: np.asarray(a, order="C") for name, a in module.constants.items()}
    try:
        target.write_text(print_text(module) + "\n", encoding="utf-8")
        if arrays:
            save_file(arrays, target.with_suffix(WEIGHTS[0]))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{target}: the model cannot be written: {error}; give another path") from None
    return target


def _weights(path: Path) -> dict[str, NDArray[Any]]:
    files = [p for p in map(path.with_suffix, WEIGHTS) if p.is_file()]
    if len(files) > 1:
        raise ParseError(
            f"{path}: expected one file of weights in its folder, got {files[0].name} and {files[1].name}; remove one"
        )
    if not files:
        return {}
    try:
        if files[0].suffix == ".npz":
            with np.load(files[0], allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        with cast(Any, safe_open(str(files[0]), framework="numpy")) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except Exception as error:  # numpy and zipfile raise many kinds for damaged files
        raise ParseError(f"{files[0]}: the weights cannot be read: {error}; write them again") from None


def _calling(module: IRModule) -> IRModule:
    """Add `main`, which calls the one tensor function of the module."""
    (func,) = module.prims.values()
    g = GraphBuilder("main" if func.name != "main" else "model")
    callee = g.add(func)
    args: list[Value] = []
    for b in func.input_buffers:
        given = b in func.consts and b.name in module.constants
        args.append(g.constant(b.name, module.constants[b.name]) if given else g.input(b.name, b.shape, b.dtype))
    outs = [TensorInfo(b.shape, b.dtype) for b in func.output_buffers]
    caller = g.finish(g.call_tir(callee, args, outs, func.scalar_params))
    return replace(caller, bounds=module.bounds)


def _within(module: IRModule, bounds: Mapping[str, tuple[int, int]]) -> IRModule:
    """Narrow the bounds of the module. Raises UserError for bounds outside the declared ones."""
    declared: dict[Var, Bound] = {b.var: b for b in module.bounds}
    symbols = {v.name: v for f in entries(module.functions).values() for p in f.params for v in info_symbols(p.info)}
    for name, (low, high) in bounds.items():
        var = symbols.get(name)
        if var is None:
            known = ", ".join(symbols) or "none: every dim is a number"
            raise UserError(f"bound of {name}: expected a symbol of the model's inputs, which are {known}; correct it")
        old = declared.get(var, Bound(var))
        if low < old.lower or (old.upper is not None and high > old.upper):
            upper = "any number" if old.upper is None else old.upper
            raise UserError(
                f"bound of {name}: expected it within {old.lower} to {upper}, as the text declares, got {low} to {high}; "
                "narrow the bound"
            )
        declared[var] = Bound(var, low, high)
    return replace(module, bounds=tuple(declared.values())) if bounds else module
