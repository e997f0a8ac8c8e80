"""The modules of sentence-transformers folders (`modules.json`), and folders of static embeddings.

Tests: `tests/ir/frontend/hf/test_sentence.py`, `tests/ir/frontend/hf/test_heads.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ParseError
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.pooling import concatenated, normalized
from relax_tune.ir.frontend.hf.transformer.inputs import Words
from relax_tune.ir.frontend.hf.transformer.parameters import Parameters
from relax_tune.ir.frontend.hf.transformer.programs import Stage
from relax_tune.ir.frontend.hf.transformer.spec import Names, Norm, Stack
from relax_tune.ir.frontend.hf.transformer.stack import StackEmitter
from relax_tune.ir.frontend.hf.weights import HfWeights, read_json, read_json_list
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.indexing.movement import ExpandDims
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Gelu, Mul, Relu, Sigmoid, Tanh
from relax_tune.ir.op.math.numeric import Log
from relax_tune.ir.op.reduction.reduce import Max, Sum

MODULES = "modules.json"
TRANSFORMER_CONFIG = "sentence_bert_config.json"
SENTENCE_CONFIG = "config_sentence_transformers.json"
MODEL2VEC = "model2vec"  # model_type of a folder of static embeddings
# Activations of torch by the name of their class; None: identity.
ACTIVATED: Mapping[str, type[OperatorSpec] | None] = {
    "Identity": None, "Tanh": Tanh, "ReLU": Relu, "GELU": Gelu, "Sigmoid": Sigmoid,
}  # fmt: skip
POOLED = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
NEWER = {**{kind: kind for kind in POOLED.values()}, "mean_sqrt_len_tokens": "mean_sqrt_len"}
TASKS: Mapping[str, str] = {
    "feature-extraction": "", "fill-mask": "ForMaskedLM", "sequence-classification": "ForSequenceClassification",
}  # fmt: skip
EXPORTED = (
    "call SentenceTransformer(FOLDER) in a torch.nn.Module that takes input_ids and attention_mask, export that by torch.export and load "
    "the .pt2 file"
)
UNLIMITED = 1 << 20  # positions of static embeddings, which have no table of them


@dataclass(frozen=True, slots=True)
class Sentence:
    """The modules of a folder.

    Attributes:
        inner: folder of the first module
        static: the first module is a table of embeddings
        head: ending of the architecture whose head the first module runs; empty: none
        later: type and folder of the other modules
    """

    inner: Path
    static: bool
    head: str
    later: tuple[tuple[str, Path], ...]


def read_modules(root: Path) -> Sentence:
    """Read modules.json and the task of a transformer.

    Raises:
        ParseError: for modules and tasks that are not imported.
    """
    path = root / MODULES
    listed = read_json_list(path, "the list of modules of a sentence-transformers folder")
    parts = [m for m in listed if isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("path", "type"))]
    # A foreign folder must not make the importer read files outside of it.
    inside = all(not Path(m["path"]).is_absolute() and ".." not in Path(m["path"]).parts for m in parts)
    if not listed or len(parts) != len(listed) or not inside:
        raise ParseError(f"{path}: expected objects with a type and a path inside the folder, got {listed!r:.120}")
    (first, inner), *later = ((m["type"].rpartition(".")[2], root / m["path"]) for m in parts)
    if first not in ("Transformer", "MLMTransformer", "StaticEmbedding"):
        holds = (inner / "config.json").is_file() and read_json(inner / "config.json", "settings").get("model_type")
        remedy = f"load {inner}, the folder of its model" if holds and inner != root else EXPORTED
        raise ParseError(
            f"{path}: module 0: expected a Transformer, MLMTransformer or StaticEmbedding, got {parts[0]['type']!r:.80}; {remedy}"
        )
    head = TASKS["fill-mask"] if first == "MLMTransformer" else ""
    if first == "Transformer" and (inner / TRANSFORMER_CONFIG).is_file():
        c = ConfigFields(read_json(inner / TRANSFORMER_CONFIG, "settings"), str(inner / TRANSFORMER_CONFIG))
        head = TASKS[c.chosen("transformer_task", "feature-extraction", TASKS)]
    return Sentence(inner, first == "StaticEmbedding", head, tuple(later))


def sentence_stages(modules: Sentence, root: Path, width: int) -> list[Stage]:
    """Return what follows the first module of a folder. width: of the first module's vectors

    Raises:
        ParseError: for a module or option that is not imported.
    """
    stages = list[Stage]()
    for number, (kind, folder) in enumerate(modules.later, 1):
        if kind == "Normalize":
            stages.append(normalized)
        elif kind == "Pooling":
            parts, include_prompt = _pooling_parts(folder)
            stages.append(concatenated(parts, include_prompt))
            # Several poolings are concatenated, so the vectors get longer.
            width *= len(parts)
        elif kind == "Dense":
            stage, width = _dense(folder, width)
            stages.append(stage)
        elif kind == "LayerNorm":
            stages.append(_layer_norm(folder, width))
        elif kind == "SpladePooling" and modules.head == TASKS["fill-mask"]:
            stages.append(_splade(folder))
        elif kind != "Dropout":
            known = "Pooling, Dense, LayerNorm, Normalize, Dropout, or SpladePooling behind a head of masked words"
            raise ParseError(
                f'{root / MODULES}: module {number}, {folder.name!r:.80}: expected {known}, got {kind!r:.80}; with pooling="none" only '
                f"the encoder is read, and the modules can be applied to its result; or {EXPORTED}"
            )
    return stages


def _pooling_parts(folder: Path) -> tuple[tuple[str, ...], bool]:
    """Read the modes of a pooling module, and whether it includes the prompt."""
    path = folder / "config.json"
    data = read_json(path, "the configuration of a pooling module")
    c = ConfigFields(data, str(path))
    newer = data.get("pooling_mode")
    if newer is not None:
        chosen = [newer] if isinstance(newer, str) else newer
        known = NEWER
        if not isinstance(chosen, list) or not chosen or any(not isinstance(x, str) or x not in known for x in chosen):
            raise c.wrong("pooling_mode", f"modes among {', '.join(known)}")
        return tuple(known[x] for x in chosen), c.truth("include_prompt", True)
    chosen = [k for k, v in data.items() if k.startswith("pooling_mode_") and v is True]
    wrong = [k for k in chosen if k not in POOLED]
    if wrong or not chosen:
        raise ParseError(
            f"{path}: expected pooling modes among {', '.join(POOLED)}, got {', '.join(wrong)[:80] or 'none'}; give pooling=, which "
            f"replaces the folder's modules, or {EXPORTED}"
        )
    return tuple(kind for key, kind in POOLED.items() if key in chosen), c.truth("include_prompt", True)


def _config(folder: Path, what: str) -> ConfigFields:
    path = folder / "config.json"
    return ConfigFields(read_json(path, f"the configuration of a {what} module"), str(path))


def activation_of(
    c: ConfigFields, key: str, default: str, hint: str | None = None
) -> Callable[[StackEmitter, GVar], GVar]:
    """Read an activation of torch by its class. hint: name of its result"""
    name = c.data.get(key, default)
    kind = name.rpartition(".")[2] if isinstance(name, str) and name.startswith("torch.nn.") else ""
    if kind not in ACTIVATED:
        raise c.wrong(key, f"torch's {', '.join(ACTIVATED)}")
    operator = ACTIVATED[kind]
    return lambda e, x: x if operator is None else e.g.call(operator(), x, hint=hint)


def _dense(folder: Path, width: int) -> tuple[Stage, int]:
    c = _config(folder, "dense")
    if c.whole("in_features") != width:
        raise c.wrong("in_features", f"{width}, the size of the vectors before it")
    for key, default in (("module_input_name", ()), ("module_output_name", (None,))):
        c.only(key, "sentence_embedding", *default)
    out, biased, residual = c.whole("out_features"), c.truth("bias", True), c.truth("use_residual", False)
    activation = activation_of(c, "activation_function", "torch.nn.modules.activation.Tanh")
    weights = HfWeights(folder)

    def stage(e: StackEmitter, x: GVar) -> GVar:
        parameters = Parameters(weights, label=f"{folder.name}.", arrays=e.parameters.arrays)
        y = activation(e, e.dense(x, "linear", width, out, biased, parameters=parameters))
        if not residual:
            return y
        more = x if out == width else e.dense(x, "residual", width, out, False, parameters=parameters)
        return e.g.call(Add(), y, more)

    return stage, out


def _layer_norm(folder: Path, width: int) -> Stage:
    c = _config(folder, "layer norm")
    if c.whole("dimension") != width:
        raise c.wrong("dimension", f"{width}, the size of the vectors before it")
    weights = HfWeights(folder)

    def stage(e: StackEmitter, x: GVar) -> GVar:
        parameters = Parameters(weights, label=f"{folder.name}.", arrays=e.parameters.arrays)
        return e.norm(x, "norm", width, Norm(1e-5, "layer", bias=True), parameters=parameters)

    return stage


def _splade(folder: Path) -> Stage:
    """Pool the logits of words to weights of words (Formal et al. 2021, SPLADE v2): log(1 + relu(logits))."""
    c = _config(folder, "pooling")
    largest = c.chosen("pooling_strategy", "max", ("max", "sum")) == "max"
    times = 2 if c.chosen("activation_function", "relu", ("relu", "log1p_relu")) == "log1p_relu" else 1

    def stage(e: StackEmitter, x: GVar) -> GVar:
        g = e.g

        def logarithm(y: GVar) -> GVar:
            for _ in range(times):
                y = g.call(Log(), g.call(AddScalar(1.0), y))
            return y

        shown = g.call(ExpandDims((2,)), g.call(Cast(f32), e.mask))
        y = g.call(Relu(), g.call(Mul(), x, shown))
        if largest:  # the logarithm is monotone, so only the largest needs it
            return logarithm(g.call(Max((1,)), y, hint="pooled"))
        return g.call(Sum((1,)), logarithm(y), hint="pooled")

    return stage


# static embeddings


class StaticWeights:
    """A table of embeddings as one tensor, `embedding.weight`: model2vec stores rows by class and a weight for each token."""

    names = frozenset({"embedding.weight"})

    def __init__(self, folder: Path) -> None:
        stored, name = HfWeights(folder), "embedding.weight"
        self.path = stored.path
        if name in stored.names:
            self.table = stored.get(name, self._shape(stored, name))
            return
        table = stored.get("embeddings", self._shape(stored, "embeddings"))
        if "mapping" in stored.names:
            rows = stored.integers("mapping")
            if rows.ndim != 1 or np.any((rows < 0) | (rows >= len(table))):
                raise ParseError(
                    f"{self.path}: 'mapping': expected rows of the {len(table)} embeddings; download it again"
                )
            # Tokens may share rows; the table is spread out once here instead of being indexed twice at every call.
            table = table[rows]
        if "weights" in stored.names:
            table = table * stored.get("weights", (len(table),))[:, None]
        self.table = np.ascontiguousarray(table, np.float32)

    def _shape(self, stored: HfWeights, name: str) -> tuple[int, ...]:
        shape = stored.shape(name)
        if len(shape) != 2:
            raise ParseError(f"{self.path}: {name!r}: expected 2 dims, got shape {shape}; download it again")
        return shape

    def get(self, name: str, shape: Sequence[int]) -> NDArray[Any]:
        return self.table


def static_stack(weights: StaticWeights) -> Stack:
    """Return a stack of embeddings without layers."""
    rows, width = weights.table.shape
    return Stack(
        names=Names(prefix="", words="embedding", last_norm=None), layers=(), embedding=Words(width, rows, UNLIMITED),
        hidden=width, heads=1, groups=1, size=width, inner=width, norm=Norm(1e-5), activation="relu", causal=False,
    )  # fmt: skip
