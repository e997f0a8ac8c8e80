"""relax-tune: compile models with symbolic shapes through measured kernel search.

The Python interface, in the order of its use:

    import relax_tune as rt

    model = rt.load_model("folder-or-file.onnx", bounds={"n": (1, 512)})
    result = rt.tune(model, target="c", db="records.db")
    artifact = rt.build(model, target="c", db="records.db")
    outputs = rt.load(artifact.save("model.rta")).run({"x": array})

Names are imported when they are first used, so a program that only runs artifacts needs nothing of the tuner.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_tune.database.store import Store
    from relax_tune.database.store import open_store as open_database
    from relax_tune.errors import ModelStateError, RelaxTuneError, UserError
    from relax_tune.ir.core.function import IRModule
    from relax_tune.ir.frontend.graph_builder import GraphBuilder
    from relax_tune.ir.frontend.load import load_model
    from relax_tune.ir.frontend.text import save_text as save_model
    from relax_tune.ir.passes.graph.lift import LiftParameters
    from relax_tune.ir.passes.graph.quantize import QuantizeWeights
    from relax_tune.ir.rewrite.rules import Rule, rewrite
    from relax_tune.ir.text.parser import parse_prim_func
    from relax_tune.runtime.artifact import Artifact, load, load_artifact
    from relax_tune.runtime.generate import beam_search, generate, generate_steps
    from relax_tune.runtime.generation.config import GenerationConfig
    from relax_tune.runtime.generation.detokenizer import IncrementalDetokenizer
    from relax_tune.runtime.model import Model
    from relax_tune.runtime.shapes import ShapeProfile
    from relax_tune.runtime.signature import TensorSpec
    from relax_tune.runtime.calls.stream import Stream
    from relax_tune.tuner.api import TuneResult, build, submit, tune
    from relax_tune.tuner.job.progress import TuningProgress
    from relax_tune.tuner.pack.install import Installation, install
    from relax_tune.tuner.pack.pack import ModelPack, make_pack, read_pack
    from relax_tune.tuner.search.named import Search, SearchSpace

# Name -> (module, name there, the extra to install for it).
_PUBLIC = {
    "load_model": ("relax_tune.ir.frontend.load", "load_model", "tune"),
    "save_model": ("relax_tune.ir.frontend.text", "save_text", "tune"),
    "GraphBuilder": ("relax_tune.ir.frontend.graph_builder", "GraphBuilder", "tune"),
    "parse_prim_func": ("relax_tune.ir.text.parser", "parse_prim_func", "tune"),
    "Rule": ("relax_tune.ir.rewrite.rules", "Rule", "tune"),
    "rewrite": ("relax_tune.ir.rewrite.rules", "rewrite", "tune"),
    "IRModule": ("relax_tune.ir.core.function", "IRModule", "tune"),
    "QuantizeWeights": ("relax_tune.ir.passes.graph.quantize", "QuantizeWeights", "tune"),
    "LiftParameters": ("relax_tune.ir.passes.graph.lift", "LiftParameters", "tune"),
    "tune": ("relax_tune.tuner.api", "tune", "tune"),
    "TuneResult": ("relax_tune.tuner.api", "TuneResult", "tune"),
    "TuningProgress": ("relax_tune.tuner.job.progress", "TuningProgress", "tune"),
    "SearchSpace": ("relax_tune.tuner.search.named", "SearchSpace", "tune"),
    "Search": ("relax_tune.tuner.search.named", "Search", "tune"),
    "build": ("relax_tune.tuner.api", "build", "tune"),
    "make_pack": ("relax_tune.tuner.pack.pack", "make_pack", "tune"),
    "read_pack": ("relax_tune.tuner.pack.pack", "read_pack", "tune"),
    "ModelPack": ("relax_tune.tuner.pack.pack", "ModelPack", "tune"),
    "install": ("relax_tune.tuner.pack.install", "install", "tune"),
    "Installation": ("relax_tune.tuner.pack.install", "Installation", "tune"),
    "submit": ("relax_tune.tuner.api", "submit", "jobs"),
    "Artifact": ("relax_tune.runtime.artifact", "Artifact", "opencl"),
    "load_artifact": ("relax_tune.runtime.artifact", "load_artifact", "opencl"),
    "load": ("relax_tune.runtime.artifact", "load", "opencl"),
    "Model": ("relax_tune.runtime.model", "Model", "opencl"),
    "generate": ("relax_tune.runtime.generate", "generate", "opencl"),
    "generate_steps": ("relax_tune.runtime.generate", "generate_steps", "opencl"),
    "beam_search": ("relax_tune.runtime.generate", "beam_search", "opencl"),
    "GenerationConfig": ("relax_tune.runtime.generation.config", "GenerationConfig", "opencl"),
    "IncrementalDetokenizer": ("relax_tune.runtime.generation.detokenizer", "IncrementalDetokenizer", "opencl"),
    "ShapeProfile": ("relax_tune.runtime.shapes", "ShapeProfile", "opencl"),
    "Stream": ("relax_tune.runtime.calls.stream", "Stream", "opencl"),
    "TensorSpec": ("relax_tune.runtime.signature", "TensorSpec", "opencl"),
    "open_database": ("relax_tune.database.store", "open_store", "tune"),
    "Store": ("relax_tune.database.store", "Store", "tune"),
    "RelaxTuneError": ("relax_tune.errors", "RelaxTuneError", "tune"),
    "UserError": ("relax_tune.errors", "UserError", "tune"),
    "ModelStateError": ("relax_tune.errors", "ModelStateError", "opencl"),
}

__all__ = [
    "load_model",
    "save_model",
    "GraphBuilder",
    "parse_prim_func",
    "Rule",
    "rewrite",
    "IRModule",
    "QuantizeWeights",
    "LiftParameters",
    "tune",
    "TuneResult",
    "TuningProgress",
    "SearchSpace",
    "Search",
    "build",
    "make_pack",
    "read_pack",
    "ModelPack",
    "install",
    "Installation",
    "submit",
    "Artifact",
    "load_artifact",
    "load",
    "Model",
    "generate",
    "generate_steps",
    "beam_search",
    "GenerationConfig",
    "IncrementalDetokenizer",
    "ShapeProfile",
    "Stream",
    "TensorSpec",
    "open_database",
    "Store",
    "RelaxTuneError",
    "UserError",
    "ModelStateError",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_PUBLIC)}")
    module, attribute, extra = _PUBLIC[name]
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("relax_tune"):
            raise
        raise ImportError(
            f"relax_tune.{name} wants the package {error.name}, found none; pip install 'relax-tune[{extra}]'",
            name=error.name,
        ) from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
