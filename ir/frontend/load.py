"""Import of a model from a path, a name or an object, with the importer of its format."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from relax_tune.errors import ParseError, RelaxTuneError, UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend import text
from relax_tune.ir.frontend.gguf import importer as gguf
from relax_tune.ir.frontend.hf.folder import CacheType, KVCache, load_hf
from relax_tune.ir.frontend.hf.pooling import Pooling
from relax_tune.ir.frontend.onnx.file import is_model_proto
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.frontend.shared.bounds import checked_bounds
from relax_tune.ir.frontend.source import find_model, path_exists
from relax_tune.ir.frontend.torch.export import is_exported_program
from relax_tune.ir.frontend.torch.importer import load_torch_export
from relax_tune.ir.frontend.torch.module import export_module, is_torch_module
from relax_tune.plugins import load_plugins

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.nn import Module

ModelSource = Union[str, Path, "ExportedProgram", "Module", Any]
"""A path, a name, an exported program, a torch module, or another object that the importer of an installed distribution recognises."""
Bounds = Mapping[str, tuple[int, int]]
WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
"""Suffixes of files that have weights without their program, or pickles."""
PLUGINS = "relax_tune.importers"
"""Entry-point group of importers of other distributions."""
Importer = Callable[[Any, Bounds], Union[IRModule, None]]
"""An importer of another distribution: takes an existing path or an object, and inclusive bounds by symbol name.

Returns the module, whose function `main` takes the inputs in order and returns the results, or None for a source that it does
not recognise. It is asked only for sources that no format of this package claims."""


def load_model(
    model: ModelSource,
    bounds: Bounds | None = None,
    cache_dtype: CacheType = "f32",
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    trust: bool = False,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    adapter: str | Path | None = None,
    kv_cache: KVCache = "contiguous",
) -> IRModule:
    """Import a model as one cross-level program, with dynamic dims as symbols.

    Args:
        model: One of

            * the folder of a Hugging Face model (config.json and model.safetensors);
            * a .gguf file of a decoder;
            * an .onnx file, a .pt2 file of `torch.export.save`, or a .relax file of program text;
            * `package:NAME/FOLDER`, a folder or file inside an installed package;
            * a `torch.nn.Module`, with `example_inputs`; a `torch.export.ExportedProgram`; or an `onnx.ModelProto`;
            * another path or object that an importer of an installed distribution recognises (`Importer`).
        bounds: Inclusive ranges by symbol name, within the ranges of the model.
        cache_dtype: Type of the keys and values that a decoder of a folder or a .gguf file stores (`load_hf`); `f32` for other
            models.
        pooling, normalize: Of a Hugging Face encoder, in place of what its folder states (`load_hf`).
        trust: Let torch unpickle and evaluate what a .pt2 file holds besides its graph and numbers: its author can then run any
            program.
        example_inputs, example_kwargs: Of a torch module: arguments of `forward`, by position and by name, for torch.export.
        dynamic_shapes: Of a torch module: as for `torch.export.export`; without any, all dims are as in the examples.
        adapter: Folder of a LoRA adapter that PEFT saved, which is merged into the weights of a Hugging Face encoder or decoder.
        kv_cache: `paged` stores the keys and values of a Hugging Face decoder in blocks, for many texts at a time (`load_hf`).

    Raises:
        ParseError: A file that is not a model of its format.
        UserError: A missing path, impossible bounds, options for other kinds of models, a .pt2 file that needs `trust`, or a torch module
            without examples or that torch.export refuses.
        BuildError: An importer of another distribution that is not a function, or returns something else than a module.
    """
    bounds = checked_bounds(bounds)
    cache = None if cache_dtype == "f32" else cache_dtype
    options = {"cache_dtype": cache, "pooling": pooling, "normalize": normalize, "adapter": adapter}
    options["kv_cache"] = None if kv_cache == "contiguous" else kv_cache
    if is_torch_module(model):
        _refuse_options(options, "a torch module")
        return load_torch_export(export_module(model, example_inputs, example_kwargs, dynamic_shapes), bounds)
    _refuse_examples(model, example_inputs=example_inputs, example_kwargs=example_kwargs, dynamic_shapes=dynamic_shapes)
    if is_exported_program(model):
        _refuse_options(options, "an exported program")
        return load_torch_export(model, bounds)
    if is_model_proto(model):
        _refuse_options(options, "an onnx.ModelProto")
        return load_onnx(model, bounds)
    if not isinstance(model, (str, os.PathLike)):
        imported = _imported_by_plugin(model, bounds, options)
        if imported is not None:
            return imported
    return _load_path(find_model(model), bounds, cache_dtype, options, trust)  # finding raises for an object


def _load_path(path: Path, bounds: Bounds, cache_dtype: CacheType, options: Mapping[str, Any], trust: bool) -> IRModule:
    of_folder = {name: value for name, value in options.items() if name != "cache_dtype"}
    if not path_exists(path):
        raise UserError(
            f"{path}: no such file or folder; give the folder of a Hugging Face model, a .gguf, .onnx, .pt2 or .relax file"
        )
    if path.is_dir() and (path / "config.json").exists():
        return load_hf(path, bounds=bounds, cache_dtype=cache_dtype, **_given(of_folder))
    if path.is_file() and path.suffix == gguf.SUFFIX:
        _refuse_options(of_folder, str(path))
        return gguf.load_gguf(path, bounds, cache_dtype)
    if path.is_file() and path.suffix in (".onnx", ".pt2", text.SUFFIX):
        _refuse_options(options, str(path))
        if path.suffix == ".pt2":
            return load_torch_export(path, bounds, trust)
        return (load_onnx if path.suffix == ".onnx" else text.load_text)(path, bounds)
    imported = _imported_by_plugin(path, bounds, options)
    if imported is not None:
        return imported
    if path.is_dir():
        # raises: which file is missing
        return load_hf(path, bounds=bounds, cache_dtype=cache_dtype, **_given(of_folder))
    _refuse_options(options, str(path))
    if path.suffix in WEIGHTS:
        got = f"a {path.suffix} file, which has weights or a pickled module"
        advice = "give the folder with its config.json, or load it with torch and give the module, with example_inputs"
    else:
        got, advice = "another file", "for a Hugging Face model give the folder that holds its files"
    raise UserError(
        f"{path}: expected the folder of a Hugging Face model (config.json and model.safetensors), a .gguf, .onnx, .pt2 or "
        f".relax file, got {got}; {advice}"
    )


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _imported_by_plugin(source: Any, bounds: Bounds, options: Mapping[str, object]) -> IRModule | None:
    """Return the module of the first importer of an installed distribution that recognises a source; None without one."""
    for plugin in load_plugins(PLUGINS):
        if not callable(plugin.value):
            raise plugin.refusal("a function of a source and bounds", repr(plugin.value))
        try:
            module = plugin.value(source, bounds)
        except RelaxTuneError:
            raise
        except Exception as error:
            raise ParseError(f"{source!s:.200}: {plugin.origin} failed: {type(error).__name__}: {error}") from error
        if module is None:
            continue
        if not isinstance(module, IRModule):
            raise plugin.refusal("an IRModule, or None for a source that it does not recognise", repr(module))
        _refuse_options(options, f"a model of {plugin.origin}")
        return module
    return None


def _refuse_examples(model: object, **examples: object) -> None:
    for name, value in examples.items():
        if value is not None:
            raise UserError(f"{name} applies only to a torch.nn.Module, got a {type(model).__name__}; leave it out")


def _refuse_options(options: Mapping[str, object], got: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise UserError(f"{name} {value!r:.80} applies only to Hugging Face folders, got {got}; leave it out")
