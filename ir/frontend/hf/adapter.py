"""LoRA adapters of PEFT, merged into a folder's weights while they are read: `W + scale * B @ A` (Hu et al. 2021, arXiv:2106.09685).

An adapter is a folder of adapter_config.json and adapter_model.safetensors. Tensors that it has as a whole, such as trained biases and
heads (`modules_to_save`), replace the folder's.

Tests: `tests/ir/frontend/hf/test_adapter.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import ParseError, UserError, warn
from relax_tune.ir.frontend.hf.config import ConfigFields
from relax_tune.ir.frontend.hf.transformer.parameters import Weights
from relax_tune.ir.frontend.hf.weights import HfWeights, read_json
from relax_tune.summary import listed

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MERGE = "merge it with peft (PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(FOLDER)) and load that folder"
# How the matrices began does not matter, unless the base weights were changed as well (PiSSA, OLoRA, LoftQ ...).
_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
_READ = (
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
)
# The names of the tensors say what is adapted; the rest belongs to training.
_WITHOUT_EFFECT = (
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "target_modules",
    "exclude_modules", "lora_dropout", "bias", "modules_to_save", "layers_to_transform", "layers_pattern", "megatron_core",
    "qalora_group_size", "loftq_config", "eva_config", "runtime_config", "ensure_weight_tying",
)  # fmt: skip
_PART = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
_NAME = re.compile(r"\^?[\w.-]+")


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two matrices that change a module.

    Attributes:
        a, b: their names in the file
        table: the module is a table of embeddings
    """

    module: str
    a: str
    b: str
    table: bool


class AdaptedWeights:
    """The weights of a folder with an adapter merged in.

    Args:
        weights: Tensors of the model's folder.
        folder: Folder of the adapter.

    Raises:
        UserError: No such folder.
        ParseError: Files that cannot be read, that are of another method than LoRA, or that do not fit the model.
    """

    def __init__(self, weights: Weights, folder: Path) -> None:
        self._weights, self._where = weights, folder / TENSORS
        if not (folder / CONFIG).is_file():
            raise UserError(f"{folder}: expected the folder of an adapter, got one without {CONFIG}; correct the path")
        self._config = _config(folder)
        if not self._where.is_file():
            raise ParseError(
                f"{self._where} does not exist; save the adapter as safetensors, with save_pretrained of peft"
            )
        self._file = HfWeights(folder, TENSORS)
        pairs, whole = self._parts()
        self._pairs = {self._stored(f"{pair.module}.weight"): pair for pair in pairs}
        self._whole = {self._stored(name, True): stored for name, stored in whole.items()}
        if not self._pairs:
            raise ParseError(f"{self._where}: expected matrices lora_A and lora_B, got none; is this the adapter?")
        self.names = frozenset({*weights.names, *self._whole})
        self._unread = {*self._pairs, *self._whole}

    def _parts(self) -> tuple[list[_Pair], dict[str, str]]:
        """Return the pairs of matrices, and the names of whole tensors in the model and in the file."""
        pairs, whole = dict[tuple[str, str], dict[str, str]](), dict[str, str]()
        for stored in sorted(self._file.names):
            name = stored.removeprefix("base_model.model.")
            part = _PART.fullmatch(name)
            if part is not None:
                pairs.setdefault((part[1], part[2] or ""), {})[part[3]] = stored
            elif "lora_" in name or "token_adapter" in name:
                raise ParseError(f"{self._where}: {stored!r:.120}: expected matrices lora_A and lora_B; {MERGE}")
            else:
                whole[name.replace(".base_layer.", ".")] = stored  # of a table that has matrices too
        for (module, _), parts in pairs.items():
            if len(parts) != 2:
                raise ParseError(
                    f"{self._where}: {module}: expected lora_A and lora_B, got only lora_{next(iter(parts))}; save it again"
                )
        return [_Pair(module, p["A"], p["B"], bool(kind)) for (module, kind), p in pairs.items()], whole

    def _stored(self, name: str, new: bool = False) -> str:
        """Return the model's name of a tensor: its prefix may differ, by the class that was adapted.

        Args:
            new: a tensor that the model lacks is allowed
        """
        names = self._weights.names
        matches = [name] if name in names else [n for n in names if n.endswith(f".{name}") or name.endswith(f".{n}")]
        if len(matches) == 1:
            return matches[0]
        if new and not matches:
            return name
        got = f"several, {listed(sorted(matches))}" if matches else "none"
        raise ParseError(
            f"{self._where}: expected a tensor {name!r:.120} of the model, which the adapter changes, got {got}; "
            "is the adapter of this model?"
        )

    def get(self, name: str, shape: Sequence[int]) -> NDArray[Any]:
        """Read a tensor as float32, as the adapter changes it. Raises ParseError naming it, the expected and the actual shape."""
        self._unread.discard(name)
        whole = self._whole.get(name)
        base = self._weights.get(name, shape) if whole is None else self._file.get(whole, shape)
        pair = self._pairs.get(name)
        return base if pair is None else base + self._change(name, pair, tuple(shape))

    def _change(self, name: str, pair: _Pair, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return what the adapter adds to a tensor."""
        if len(shape) != 2:
            raise ParseError(
                f"{self._where}: {name}: expected a linear layer or a table, got weights of shape {shape}; {MERGE}"
            )
        rank, scale = self._scale(pair.module)
        square, width = shape[0] == shape[1], self._file.shape(pair.a)[-1]
        # A linear layer is stored as (out, in), one of GPT-2 as (in, out), and a table as (words, out).
        turned = pair.table or (self._config.truth("fan_in_fan_out", False) if square else width == shape[0])
        inner, out = shape if turned else shape[::-1]
        product = self._file.get(pair.b, (out, rank)) @ self._file.get(pair.a, (rank, inner)) * np.float32(scale)
        return np.asarray(product.T if turned else product, np.float32)

    def _scale(self, module: str) -> tuple[int, float]:
        """Return the rank of a module's matrices, and the factor of their product."""
        c = self._config
        rank = int(_of_pattern(c.data.get("rank_pattern"), module, c.whole("r")))
        alpha = _of_pattern(c.data.get("alpha_pattern"), module, c.number("lora_alpha", None, -1e9, 1e9, "a number"))
        return rank, alpha / (math.sqrt(rank) if c.truth("use_rslora", False) else rank)

    def warn_of_unread(self) -> None:
        """Warn of changes to tensors that have not been read, such as a head that config.json does not name."""
        if self._unread:
            names = listed(sorted(self._unread))
            warn(f"{self._where}: the adapter changes {names}, which the model as it is imported does not read")


def _config(folder: Path) -> ConfigFields:
    """Read the configuration. Raises ParseError for another method than LoRA and for its variants."""
    data = read_json(folder / CONFIG, "the configuration of an adapter")
    c, refused = ConfigFields(data, str(folder / CONFIG)), None
    if data.get("peft_type") != "LORA":
        refused = "peft_type", "LORA"
    elif not any(
        data.get("init_lora_weights", True) is start or data["init_lora_weights"] == start for start in _STARTS
    ):
        refused = "init_lora_weights", "true, gaussian or another start that leaves the model's weights as they are"
    else:
        # A field that this version does not know may change what the matrices mean, so it has to be off.
        extra = (n for n, v in data.items() if n not in (*_READ, *_WITHOUT_EFFECT) and v not in (None, False, [], {}))
        if (field := next(extra, None)) is not None:
            refused = field, "plain LoRA without it"
    if refused is not None:
        got = data.get(refused[0])
        raise ParseError(f"{c.where}: {refused[0]}: expected {refused[1]}, got {got!r:.80}; {MERGE}")
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = data.get(name) or {}
        if not isinstance(pattern, dict) or not all(type(v) in (int, float) and v > 0 for v in pattern.values()):
            raise ParseError(
                f"{c.where}: {name}: expected numbers by module, got {pattern!r:.80}; save the adapter again"
            )
        if (other := next((key for key in pattern if not _NAME.fullmatch(key)), None)) is not None:
            raise ParseError(f"{c.where}: {name}: expected names of modules, got the expression {other!r:.80}; {MERGE}")
    return c


def _of_pattern(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    """Return the value of the first name that the module's name ends in; `^` stands before a whole name."""
    for key, value in (pattern or {}).items():
        if module == key.removeprefix("^") or module.endswith(f".{key}"):
            return value
    return default
