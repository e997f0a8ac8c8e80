"""Import of GGUF files: the decoders of llama.cpp, with weights decoded to float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax_tune.errors import ParseError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.gguf.architectures import ARCHITECTURES, Architecture, stored_as_gguf
from relax_tune.ir.frontend.gguf.file import GgufFile
from relax_tune.ir.frontend.gguf.weights import GgufWeights
from relax_tune.ir.frontend.hf.config import MOST_LAYERS
from relax_tune.ir.frontend.hf.families.decoders import DECODERS
from relax_tune.ir.frontend.hf.families.family import FULL, SLIDING, read_decoder
from relax_tune.ir.frontend.hf.folder import CacheType, load_decoder
from relax_tune.ir.frontend.hf.transformer.spec import Stack

SUFFIX = ".gguf"
MOST_POSITIONS = 1 << 24
# Prefixes of keys without effect, and keys of sizes that tensors have too.
DESCRIBING = ("general.", "tokenizer.", "quantize.", "imatrix.")
REPEATED = (
    "vocab_size",
    "rope.dimension_count",
    "attention.key_length",
    "attention.value_length",
    "attention.head_count_kv",
)
LAYOUT = "tensor_data_layout"
TEXTS, FRACTIONS = (
    (LAYOUT, "rope.scaling.type"),
    ("epsilon", "freq_base", "freq_base_swa", "softcapping", "factor", "_fast", "_slow", "_multiplier"),
)
FLAGS = ("finetuned",)
SCALING, PATTERN = "rope.scaling.", "attention.sliding_window_pattern"
YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
FACTORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"


def load_gguf(
    path: str | Path, bounds: Mapping[str, tuple[int, int]] | None = None, cache_dtype: CacheType = "f32"
) -> IRModule:
    """Import a GGUF file as `prefill` and `decode`, as `load_hf` imports a decoder's folder. Weights are decoded to float32.

    Args:
        bounds: inclusive (lower, upper) of the symbols `b`, `n` and `m`
        cache_dtype: type of stored keys and values

    Raises:
        ParseError: for a file that is truncated or contradicts itself, and for an unknown architecture, key or type of tensor.
        UserError: without the package gguf, and for bounds that the model cannot have.
    """
    file = GgufFile(Path(path))
    weights = GgufWeights(file)
    spec = _Reader(file, weights).spec()
    module = load_decoder(spec, weights, bounds, False, cache_dtype)
    if weights.unread:
        some = ", ".join(sorted(weights.unread)[:6])
        raise ParseError(
            f"{file.path}: expected only tensors of the architecture {file.fields['general.architecture']}, got {len(weights.unread)} "
            f"others: {some}; {CONVERT}"
        )
    return module


CONVERT = (
    "workaround: load the Hugging Face folder of the model; or let transformers read the file (with accelerate and gguf), "
    "AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME), and load torch.export.export of that"
)
"""What to do about a file of an unknown architecture or form."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reader of the metadata of one file as the fields of a config.json."""

    file: GgufFile
    weights: GgufWeights

    def wrong(self, expected: str, actual: object) -> ParseError:
        return ParseError(f"{self.file.path}: expected {expected}, got {actual!r:.80}; {CONVERT}")

    def spec(self) -> Stack:
        name = self.file.fields.get("general.architecture")
        a = ARCHITECTURES.get(name) if isinstance(name, str) else None
        if a is None or not isinstance(name, str):
            raise ParseError(
                f"{self.file.path}: expected general.architecture among {', '.join(ARCHITECTURES)}, got {name!r:.80}; {CONVERT}"
            )
        keys = {
            k.removeprefix(f"{name}."): self._plain(k, v)
            for k, v in self.file.fields.items()
            if k.startswith(f"{name}.")
        }
        self._check_keys(name, a, keys)
        config = self._config(a, keys)
        spec = read_decoder(DECODERS[config["model_type"]], config, str(self.file.path))
        self._check_sizes(spec, keys)
        return stored_as_gguf(spec, a)

    def _plain(self, key: str, value: Any) -> Any:
        """Return the number that an array of all layers repeats, such as the number of heads; other values unchanged."""
        if isinstance(value, np.ndarray) and value.size > MOST_LAYERS:
            raise self.wrong(f"{key} for at most {MOST_LAYERS} layers", value.size)
        if not isinstance(value, np.ndarray) or key.endswith(f".{PATTERN}"):
            kinds = (str,) if key.endswith(TEXTS) else (int, float) if key.endswith(FRACTIONS) else (int, np.ndarray)
            if type(value) not in (*kinds, *((bool,) if key.endswith(FLAGS) else ())):
                raise self.wrong(f"{key} as {' or '.join(kind.__name__ for kind in kinds)}", value)
            return value
        numbers = set(value.tolist())
        if len(numbers) != 1:
            raise ParseError(
                f"{self.file.path}: {key}: expected one value for all layers, got {sorted(numbers)!r:.80}; {CONVERT}"
            )
        return numbers.pop()

    def _check_keys(self, name: str, a: Architecture, keys: Mapping[str, Any]) -> None:
        layout = keys.get(LAYOUT, a.layout)
        if layout != a.layout:
            raise self.wrong(f"{LAYOUT} {a.layout}", layout)
        known = {LAYOUT, *a.fields, a.eps[0], *REPEATED, *(k for k in keys if k.startswith(SCALING))}
        if a.patterned:
            known.add(PATTERN)
        unknown = [f"{name}.{k}" for k in keys if k not in known]
        unknown += [k for k in self.file.fields if not k.startswith((f"{name}.", *DESCRIBING))]
        if unknown:
            expected, extra = ", ".join(sorted(known)), ", ".join(sorted(unknown))[:200]
            raise ParseError(f"{self.file.path}: expected the keys {expected} of {name}, got {extra} too; {CONVERT}")

    def _config(self, a: Architecture, keys: Mapping[str, Any]) -> dict[str, Any]:
        names = self.weights.names
        config: dict[str, Any] = {"model_type": a.model_type, **a.fixed}
        config |= {to: keys[key] for key, to in (*a.fields.items(), a.eps) if key in keys}
        config["vocab_size"] = self.weights.shape("token_embd.weight")[0]
        config["tie_word_embeddings"] = "output.weight" not in names
        config |= {to: f"blk.0.{tensor}" in names for tensor, to in a.biases.items()}
        if "context_length" in keys and not 1 <= int(keys["context_length"]) <= MOST_POSITIONS:
            raise self.wrong(f"context_length from 1 to {MOST_POSITIONS}", keys["context_length"])
        missing = [k for k in (*a.fields, a.eps[0]) if k in NEEDED and k not in keys]
        if missing:
            raise self.wrong(f"the key {missing[0]} of {a.model_type}", f"keys {', '.join(keys)[:60]}")
        pattern = keys.get(PATTERN)
        if isinstance(pattern, np.ndarray):
            config["layer_types"] = [SLIDING if one else FULL for one in pattern.tolist()]
        elif pattern is not None:
            config["sliding_window_pattern"] = pattern
        config = config if a.finish is None else a.finish(keys, names, config)
        return self._with_rope(a, keys, config)

    def _with_rope(self, a: Architecture, keys: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        """Read the scaling of a rotation; factors of its frequencies may be in tensors."""
        size = keys.get("attention.key_length") or keys.get("embedding_length", 0) // max(
            1, keys.get("attention.head_count", 1)
        )
        dims = keys.get("rope.dimension_count", size)
        if dims != size:
            rope = DECODERS[config["model_type"]].rope
            if rope is None or rope.part_key is None:
                raise self.wrong(f"rope.dimension_count of {size}, the size of a head", dims)
            config = {**config, "partial_rotary_factor": dims / size}
        scaling = {k.removeprefix(SCALING): v for k, v in keys.items() if k.startswith(SCALING)}
        kind = scaling.pop("type", "none")
        given: dict[str, Any] = {}
        original = scaling.get("original_context_length")
        if FACTORS in self.weights.names:
            factors = self.weights.get(FACTORS, (dims // 2,)).tolist()
            given = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
            original = keys.get("context_length")
            scaling = {
                k: v for k, v in scaling.items() if k not in ("original_context_length", "factor", "attn_factor")
            }
        elif SHORT in self.weights.names:
            short, long = (self.weights.get(n, (dims // 2,)).tolist() for n in (SHORT, LONG))
            given = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
            if scaling.get("attn_factor") is not None:
                given["attention_factor"] = scaling.pop("attn_factor")
        elif kind == "linear":
            given = {"rope_type": "linear", "factor": scaling.pop("factor", 1.0)}
        elif kind == "yarn":
            given = {"rope_type": "yarn", "factor": scaling.pop("factor", None)}
            given |= {to: scaling.pop(key) for key, to in YARN.items() if key in scaling}
        elif kind != "none":
            raise self.wrong("rope.scaling.type none, linear or yarn", kind)
        if given and given["rope_type"] != "linear":
            # LongRoPE reads it at the top level of a config.json.
            where = config if given["rope_type"] == "longrope" else given
            where["original_max_position_embeddings"] = original
            scaling.pop("original_context_length", None)
        unknown = {k: v for k, v in scaling.items() if k != "finetuned" and not (k == "factor" and v in (0, 1))}
        if unknown:
            raise self.wrong("no other keys of rope.scaling", unknown)
        return {**config, "rope_scaling": given} if given else config

    def _check_sizes(self, spec: Stack, keys: Mapping[str, Any]) -> None:
        """Check sizes that the metadata repeat."""
        sizes = {
            "attention.key_length": spec.size,
            "attention.value_length": spec.size,
            "attention.head_count_kv": spec.groups,
        }
        for key, value in sizes.items():
            if keys.get(key, value) != value:
                raise self.wrong(f"{key} of {value}, as by the other keys", keys[key])


NEEDED = frozenset({
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon",
})  # fmt: skip
