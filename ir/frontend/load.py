"""Find a model by its path or name, and import it with the frontend of its format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Union

from relax_tune.errors import UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend import text
from relax_tune.ir.frontend.gguf import importer as gguf
from relax_tune.ir.frontend.hf.folder import CacheType, load_hf
from relax_tune.ir.frontend.hf.heads import Pooling
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.frontend.shared.bounds import checked_bounds
from relax_tune.ir.frontend.source import find_model, path_exists
from relax_tune.ir.frontend.torch.export import is_exported_program
from relax_tune.ir.frontend.torch.importer import load_torch_export

if TYPE_CHECKING:
    from torch.export import ExportedProgram

ModelSource = Union[str, Path, "ExportedProgram"]


def load_model(
    model: ModelSource,
    bounds: Mapping[str, tuple[int, int]] | None = None,
    cache_dtype: CacheType = "f32",
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    trust: bool = False,
) -> IRModule:
    """Import a model as one cross-level program, with dynamic dims as symbols.

    model: one of

    * the folder of a Hugging Face model (config.json and model.safetensors);
    * a .gguf file of a decoder;
    * an .onnx file, a .pt2 file of `torch.export.save`, or a .relax file of program text;
    * `package:NAME/FOLDER`, a folder or file inside an installed package;
    * a `torch.export.ExportedProgram`.

    bounds: inclusive ranges by symbol name, within those of the model
    cache_dtype: type of the keys and values that a decoder of a folder or a .gguf file stores (`load_hf`); `f32` for other models
    pooling, normalize: of a Hugging Face encoder, in place of what its folder says (`load_hf`)
    trust: let torch unpickle and evaluate what a .pt2 file holds beside its graph and numbers: whoever wrote it can run any program

    Raises: ParseError or UserError for a file that is no model, impossible bounds, options of folders for other models, and a .pt2
    file that needs `trust`.
    """
    bounds = checked_bounds(bounds)
    options = {"cache_dtype": None if cache_dtype == "f32" else cache_dtype, "pooling": pooling, "normalize": normalize}
    if is_exported_program(model):
        _refuse(options, "an exported program")
        return load_torch_export(model, bounds)
    path = find_model(model)
    if not path_exists(path):
        raise UserError(
            f"{path}: no such file or folder; give the folder of a Hugging Face model, a .gguf, .onnx, .pt2 or .relax file"
        )
    if path.is_file() and path.suffix == gguf.SUFFIX:
        _refuse({k: v for k, v in options.items() if k != "cache_dtype"}, str(path))
        return gguf.load_gguf(path, bounds, cache_dtype)
    if path.is_file():
        _refuse(options, str(path))
    if path.is_file() and path.suffix == ".onnx":
        return load_onnx(path, bounds)
    if path.is_file() and path.suffix == ".pt2":
        return load_torch_export(path, bounds, trust)
    if path.is_file() and path.suffix == text.SUFFIX:
        return text.load_text(path, bounds)
    if not path.is_dir():
        raise UserError(
            f"{path}: wanted the folder of a Hugging Face model (config.json and model.safetensors), a .gguf, .onnx, .pt2 or "
            ".relax file, found another file; of a Hugging Face model give the folder that holds its files"
        )
    return load_hf(path, pooling, normalize, bounds, cache_dtype=cache_dtype)


def _refuse(options: Mapping[str, object], found: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise UserError(
                f"{name} {value!r:.80}: wanted a Hugging Face folder, found {found}, which says itself what it computes; leave it out"
            )
