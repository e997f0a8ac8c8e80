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
from relax_tune.ir.frontend.hf.decoders.families import FAMILIES
from relax_tune.ir.frontend.hf.decoders.family import FULL, SLIDING, read_spec
from relax_tune.ir.frontend.hf.decoders.spec import DecoderSpec
from relax_tune.ir.frontend.hf.folder import CacheType, load_decoder

SUFFIX = ".gguf"
MOST_POSITIONS = 1 << 24
# Keys that name and describe, and sizes that tensors state too.
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

    bounds: inclusive (lower, upper) of the symbols `b`, `n` and `m`
    cache_dtype: type of stored keys and values

    Raises: ParseError for a file that is truncated or contradicts itself, for an unknown architecture, key or type of tensor;
    UserError without the package gguf, and for bounds the model cannot have.
    """
    file = GgufFile(Path(path))
    weights = GgufWeights(file)
    spec = _Reader(file, weights).spec()
    module = load_decoder(spec, weights, bounds, False, cache_dtype)
    if weights.unread:
        some = ", ".join(sorted(weights.unread)[:6])
        raise ParseError(
            f"{file.path}: wanted only tensors of the architecture {file.fields['general.architecture']}, found {len(weights.unread)} "
            f"others: {some}; what they compute cannot be imported"
        )
    return module


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reader of the metadata of one file as the fields of a config.json."""

    file: GgufFile
    weights: GgufWeights

    def wrong(self, wanted: str, found: object) -> ParseError:
        return ParseError(f"{self.file.path}: wanted {wanted}, found {found!r:.80}; this model cannot be imported")

    def spec(self) -> DecoderSpec:
        name = self.file.fields.get("general.architecture")
        a = ARCHITECTURES.get(name) if isinstance(name, str) else None
        if a is None or not isinstance(name, str):
            raise ParseError(
                f"{self.file.path}: wanted general.architecture among {', '.join(ARCHITECTURES)}, found {name!r:.80}; this model cannot "
                "be imported yet, but its Hugging Face folder may"
            )
        own = {
            k.removeprefix(f"{name}."): self._plain(k, v)
            for k, v in self.file.fields.items()
            if k.startswith(f"{name}.")
        }
        self._check_keys(name, a, own)
        config = self._config(a, own)
        spec = read_spec(FAMILIES[config["model_type"]], config, str(self.file.path))
        self._check_sizes(spec, own)
        return stored_as_gguf(spec, a)

    def _plain(self, key: str, value: Any) -> Any:
        """Return a number for an array that repeats it, such as heads by layer."""
        if isinstance(value, np.ndarray) and value.size > MOST_LAYERS:
            raise self.wrong(f"{key} for at most {MOST_LAYERS} layers", value.size)
        if not isinstance(value, np.ndarray) or key.endswith(f".{PATTERN}"):
            kinds = (str,) if key.endswith(TEXTS) else (int, float) if key.endswith(FRACTIONS) else (int, np.ndarray)
            if type(value) not in (*kinds, *((bool,) if key.endswith(FLAGS) else ())):
                raise self.wrong(f"{key} as {' or '.join(kind.__name__ for kind in kinds)}", value)
            return value
        found = set(value.tolist())
        if len(found) != 1:
            raise ParseError(
                f"{self.file.path}: {key}: wanted one value for all layers, found {sorted(found)!r:.80}; this model cannot be imported"
            )
        return found.pop()

    def _check_keys(self, name: str, a: Architecture, own: Mapping[str, Any]) -> None:
        layout = own.get(LAYOUT, a.layout)
        if layout != a.layout:
            raise self.wrong(f"{LAYOUT} {a.layout}", layout)
        known = {LAYOUT, *a.fields, a.eps[0], *REPEATED, *(k for k in own if k.startswith(SCALING))}
        if a.patterned:
            known.add(PATTERN)
        odd = [f"{name}.{k}" for k in own if k not in known]
        odd += [k for k in self.file.fields if not k.startswith((f"{name}.", *DESCRIBING))]
        if odd:
            raise ParseError(
                f"{self.file.path}: wanted the keys {', '.join(sorted(known))} of {name}, found {', '.join(sorted(odd))[:200]} too; what "
                "they change cannot be imported"
            )

    def _config(self, a: Architecture, own: Mapping[str, Any]) -> dict[str, Any]:
        names = self.weights.names
        config: dict[str, Any] = {"model_type": a.model_type, **a.fixed}
        config |= {to: own[key] for key, to in (*a.fields.items(), a.eps) if key in own}
        config["vocab_size"] = self.weights.shape("token_embd.weight")[0]
        config["tie_word_embeddings"] = "output.weight" not in names
        config |= {to: f"blk.0.{tensor}" in names for tensor, to in a.biases.items()}
        if "context_length" in own and not 1 <= int(own["context_length"]) <= MOST_POSITIONS:
            raise self.wrong(f"context_length from 1 to {MOST_POSITIONS}", own["context_length"])
        missing = [k for k in (*a.fields, a.eps[0]) if k in NEEDED and k not in own]
        if missing:
            raise self.wrong(f"the key {missing[0]} of {a.model_type}", f"keys {', '.join(own)[:60]}")
        pattern = own.get(PATTERN)
        if isinstance(pattern, np.ndarray):
            config["layer_types"] = [SLIDING if one else FULL for one in pattern.tolist()]
        elif pattern is not None:
            config["sliding_window_pattern"] = pattern
        config = config if a.finish is None else a.finish(own, names, config)
        return self._with_rope(a, own, config)

    def _with_rope(self, a: Architecture, own: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        """Read the scaling of a rotation, whose frequencies may have factors in tensors."""
        size = own.get("attention.key_length") or own.get("embedding_length", 0) // max(
            1, own.get("attention.head_count", 1)
        )
        dims = own.get("rope.dimension_count", size)
        if dims != size:
            rope = FAMILIES[config["model_type"]].rope
            if rope is None or rope.part_key is None:
                raise self.wrong(f"rope.dimension_count of {size}, the size of a head", dims)
            config = {**config, "partial_rotary_factor": dims / size}
        scaling = {k.removeprefix(SCALING): v for k, v in own.items() if k.startswith(SCALING)}
        kind = scaling.pop("type", "none")
        given: dict[str, Any] = {}
        original = scaling.get("original_context_length")
        if FACTORS in self.weights.names:
            factors = self.weights.get(FACTORS, (dims // 2,)).tolist()
            given = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
            original = own.get("context_length")
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
            given["original_max_position_embeddings"] = original
            scaling.pop("original_context_length", None)
        odd = {k: v for k, v in scaling.items() if k != "finetuned" and not (k == "factor" and v in (0, 1))}
        if odd:
            raise self.wrong("no other keys of rope.scaling", odd)
        return {**config, "rope_scaling": given} if given else config

    def _check_sizes(self, spec: DecoderSpec, own: Mapping[str, Any]) -> None:
        """Check sizes that the metadata repeat. A vocabulary has as many words as its tensor has rows."""
        wanted = {
            "attention.key_length": spec.size,
            "attention.value_length": spec.size,
            "attention.head_count_kv": spec.groups,
        }
        for key, value in wanted.items():
            if own.get(key, value) != value:
                raise self.wrong(f"{key} of {value}, as the other keys say", own[key])


NEEDED = frozenset({
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon",
})  # fmt: skip
