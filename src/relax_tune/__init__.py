"""relax-tune: compile models with symbolic shapes through measured kernel search.

The Python interface, in the order of its use:

    import relax_tune as rt

    model = rt.load_model("folder-or-file.onnx", bounds={"n": (1, 512)})
    result = rt.tune(model, target="c", db="records.db")
    artifact = rt.build(model, target="c", db="records.db")
    outputs = rt.load(artifact.save("model.rta"))(x=array)

Names are imported when they are first used, so a program that only runs artifacts needs nothing of the tuner.
"""

import importlib
from typing import TYPE_CHECKING, Any

# The public names. Type checkers follow these imports; at run time `_public` reads them, so that each name is written once.
if TYPE_CHECKING:
    from relax_tune.ir.frontend.load import load_model as load_model
    from relax_tune.ir.frontend.text import save_text
    from relax_tune.ir.frontend.graph_builder import GraphBuilder as GraphBuilder
    from relax_tune.ir.text.parser import parse_prim_func as parse_prim_func
    from relax_tune.ir.rewrite.rules import Rule as Rule
    from relax_tune.ir.rewrite.rules import rewrite as rewrite
    from relax_tune.ir.core.function import IRModule as IRModule
    from relax_tune.ir.passes.graph.quantize import QuantizeWeights as QuantizeWeights
    from relax_tune.ir.passes.graph.lift import LiftParameters as LiftParameters
    from relax_tune.tuner.api import tune as tune, TuneResult as TuneResult
    from relax_tune.tuner.job.progress import TuningProgress as TuningProgress
    from relax_tune.schedules.schedule import Schedule as Schedule
    from relax_tune.tuner.kernels.kernel import kernel as kernel, source as source, Kernel as Kernel
    from relax_tune.tuner.kernels.timing import KernelTiming as KernelTiming
    from relax_tune.tuner.search.named import SearchSpace as SearchSpace, Search as Search
    from relax_tune.tuner.api import build as build, replace_weights as replace_weights
    from relax_tune.tuner.pack.pack import make_pack as make_pack, read_pack as read_pack, ModelPack as ModelPack
    from relax_tune.tuner.pack.install import install as install, Installation as Installation
    from relax_tune.tuner.api import submit as submit
    from relax_tune.tuner.text.encoder import SentenceEncoder as SentenceEncoder
    from relax_tune.tuner.text.tasks import pipeline as pipeline
    from relax_tune.tuner.torch_compile import torch_backend as torch_backend, FallbackWarning as FallbackWarning
    from relax_tune.runtime.artifact import Artifact as Artifact, load_artifact as load_artifact, load as load
    from relax_tune.runtime.model import Model as Model
    from relax_tune.runtime.results import Results as Results
    from relax_tune.runtime.memory.resident import DeviceArray as DeviceArray
    from relax_tune.runtime.generate import generate as generate, generate_steps as generate_steps
    from relax_tune.runtime.generate import beam_search as beam_search
    from relax_tune.runtime.generation.config import GenerationConfig as GenerationConfig
    from relax_tune.runtime.generation.detokenizer import IncrementalDetokenizer as IncrementalDetokenizer
    from relax_tune.runtime.shapes import ShapeProfile as ShapeProfile
    from relax_tune.runtime.calls.stream import Stream as Stream
    from relax_tune.runtime.signature import TensorSpec as TensorSpec
    from relax_tune.database.store import open_store, Store as Store
    from relax_tune.errors import RelaxTuneError as RelaxTuneError, RelaxTuneWarning as RelaxTuneWarning
    from relax_tune.errors import UserError as UserError, ModelStateError as ModelStateError

    save_model, open_database = save_text, open_store
    __version__: str

_EXTRAS = {"submit": "jobs"}
"""Extras of single names; others need `opencl` to run artifacts, and `tune` for anything else."""

_public_names: dict[str, tuple[str, str]] = {}


def _public() -> dict[str, tuple[str, str]]:
    """Return the module and the name there of each public name."""
    if not _public_names:
        import ast
        import pkgutil

        source = pkgutil.get_data(__name__, "__init__.py")
        if source is None:
            raise ImportError(f"{__name__}: its source __init__.py is missing; install relax-tune with its .py files")
        tree = ast.parse(source)
        (block,) = (node for node in tree.body if isinstance(node, ast.If))
        origins: dict[str, tuple[str, str]] = {}
        for node in block.body:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                origins.update({a.name: (node.module, a.name) for a in node.names})
                _public_names.update({a.name: (node.module, a.name) for a in node.names if a.asname})
            elif isinstance(node, ast.Assign):  # names that differ from the names in their modules
                (names,) = node.targets
                for name, value in zip(ast.walk(names), ast.walk(node.value)):
                    if isinstance(name, ast.Name) and isinstance(value, ast.Name):
                        _public_names[name.id] = origins[value.id]
    return _public_names


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from relax_tune.runtime.hashed_zip import tool_version

        return tool_version()
    if name == "__all__":
        return list(_public())
    if name.startswith("__"):  # asked by Python itself, and by tools
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _public():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_public())}")
    module, attribute = _public()[name]
    try:
        value = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("relax_tune"):
            raise
        extra = _EXTRAS.get(name, "opencl" if module.startswith("relax_tune.runtime") else "tune")
        package = error.name.partition(".")[0]
        raise ImportError(
            f"relax_tune.{name} needs the package {package}, which is not installed; pip install 'relax-tune[{extra}]'",
            name=error.name,
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_public()})
