"""Import of Hugging Face folders, config.json and model.safetensors, without the transformers package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.core.dtype import dtype
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.hf.config import batch_bounds, read_config, sample_bounds, symbol_bounds
from relax_tune.ir.frontend.hf.decoders.builder import DecoderBuilder
from relax_tune.ir.frontend.hf.decoders.families import FAMILIES
from relax_tune.ir.frontend.hf.decoders.family import read_spec
from relax_tune.ir.frontend.hf.decoders.parameters import DecoderWeights
from relax_tune.ir.frontend.hf.decoders.spec import DecoderSpec
from relax_tune.ir.frontend.hf.encoder import Encoder, Stage
from relax_tune.ir.frontend.hf.encoder_decoders.builder import EncoderDecoderBuilder
from relax_tune.ir.frontend.hf.encoder_decoders.families import (
    ENCODER_DECODERS,
    EncoderDecoderSpec,
    encoder_decoder_spec,
)
from relax_tune.ir.frontend.hf.encoder_families import ENCODERS, encoder_spec
from relax_tune.ir.frontend.hf.encoder_spec import Patches, Waves, Words
from relax_tune.ir.frontend.hf.heads import (
    MODULES,
    Pooling,
    bare_results,
    head_stage,
    normalized,
    pooled,
    sentence_stages,
    transformer_folder,
)
from relax_tune.ir.frontend.hf.images.load import IMAGES, load_images
from relax_tune.ir.frontend.hf.speech_families import MASKED, SPEECH
from relax_tune.ir.frontend.hf.towers import TOWERS, load_towers
from relax_tune.ir.frontend.hf.weights import HfWeights, read_json
from relax_tune.ir.frontend.shared.bounds import checked_bounds

CacheType = Literal["f32", "f16", "bf16"]
PREPROCESSOR = "preprocessor_config.json"
USUAL_POSITIONS = 4096  # of an encoder-decoder without a table of positions, unless bounds say more
LOADERS: Mapping[str, Callable[..., IRModule]] = {
    **dict.fromkeys(IMAGES, load_images),
    **dict.fromkeys(TOWERS, load_towers),
}
SUPPORTED = tuple(dict.fromkeys((*ENCODERS, *LOADERS, *FAMILIES, *ENCODER_DECODERS)))


def load_hf(
    folder: str | Path,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    bounds: Mapping[str, tuple[int, int]] | None = None,
    every_position: bool = False,
    cache_dtype: CacheType = "f32",
) -> IRModule:
    """Import a Hugging Face model by the `model_type` of its config.json.

    An encoder is `main(input_ids (b, n) i64, attention_mask (b, n) i64) -> sentence_embedding (b, hidden) f32`. What follows its last
    hidden state is what the folder says: the modules of sentence-transformers (modules.json), or the head that `architectures`
    names; of a bare encoder the normalised mean. Token types are all 0; their row is folded into the position table. Beside a head
    they are a third input, `token_type_ids (b, n) i64`, where the model has several. Heads give `logits` of masked words
    (b, n, vocabulary), of a sequence (b, labels) or of each position (b, n, labels), or the logits of the first and last position
    of an answer, (b, n) each. Positions count from 0; RoBERTa models leave out padding tokens, whatever the mask says.

    An encoder of images takes `pixel_values (b, channels, height, width) f32`, of any size (symbols `h` and `w`) where its layers do.
    It gives the last hidden state, a pooled vector where the family has one, a projected vector alone, or `logits`. One of sound
    takes `input_values (b, n) f32`, and `attention_mask (b, n) i64` where its preprocessor gives one. CLIP and SigLIP are three
    functions, `main`, `text` and `image`; see `load_towers`.

    A decoder is two functions that share weights. `prefill(input_ids (b, n) i64) -> (logits (b, 1, vocabulary) f32, key_0,
    value_0, key_1 ...)` takes a prompt. `decode(input_ids (b, 1) i64, past_key_0, past_value_0, past_key_1 ...)` takes one further
    token and gives the same kinds of results. Attention is causal. Keys and values are (b, key heads, positions, size of a head),
    with `n` positions after a prompt; `decode` takes `m` past positions and gives `m + 1`.

    An encoder-decoder is three functions that share weights. `encode(input_ids (b, s) i64, attention_mask (b, s) i64) ->
    (cross_key_0, cross_value_0, cross_key_1 ...)`, (b, heads, s, size of a head) each, reads a source; a model of speech has
    `encode(input_features (b, mels, frames) f32)` and no mask. `prefill(input_ids (b, n) i64, attention_mask, cross_key_0 ...)` and
    `decode(input_ids (b, 1) i64, attention_mask, cross_key_0 ..., past_key_0, past_value_0 ...)` are like a decoder's.

    folder: contains config.json and model.safetensors
    pooling: encoders: `mean`, `max` or `mean_sqrt_len` over the positions of the mask, `cls` (first position), `none` (last hidden
        state (b, n, hidden)), whatever modules or head the folder has
    normalize: encoders: scale the pooled vector to unit length; by default, given a pooling, True
    bounds: inclusive (lower, upper) of the symbols `b`, `n`, `m`, `s`; default: at least 1, and at most the positions of the model
    every_position: decoders: logits of `prefill` are (b, n, vocabulary)
    cache_dtype: decoders: type of stored keys and values

    Raises: ParseError for files that cannot be read or do not fit together, UserError for bounds the model cannot have.
    """
    _check_names(pooling, cache_dtype)
    root, sentence = Path(folder), (Path(folder) / MODULES).is_file()
    inner = transformer_folder(root) if sentence else root
    data, where = read_config(inner), str(inner / "config.json")
    kind = _model_type(data, where)
    asked = pooling is not None or normalize is not None
    if kind in ENCODERS and _is_encoder(data, kind, sentence or asked):
        _refuse_options_of_decoders(kind, cache_dtype, every_position)
        return _load_encoder(root, inner, data, pooling, normalize, bounds)
    _refuse_embedding(root, kind, asked)
    if kind in LOADERS:
        _refuse_options_of_decoders(kind, cache_dtype, every_position)
        return LOADERS[kind](root, data, where, bounds)
    if kind in FAMILIES:
        spec = read_spec(FAMILIES[kind], data, where)
        return load_decoder(spec, HfWeights(root), bounds, every_position, cache_dtype)
    return _load_encoder_decoder(root, encoder_decoder_spec(data, where), bounds, every_position, cache_dtype)


def _check_names(pooling: str | None, cache_dtype: str) -> None:
    for name, value, known in (("pooling", pooling or "none", Pooling), ("cache_dtype", cache_dtype, CacheType)):
        if value not in get_args(known):
            raise UserError(
                f"{name}: wanted one of {', '.join(get_args(known))}, found {value!r:.80}; give one of them"
            )


def _refuse_embedding(root: Path, kind: str, asked: bool) -> None:
    """Raise an error for a model that is to embed, but is no encoder of text. asked: by options, else by modules"""
    if asked:
        what = "which pools as its folder says" if kind in LOADERS else "whose results are logits"
        raise UserError(f"pooling and normalize: wanted an encoder, found {kind}, {what}; leave them out")
    if (root / MODULES).is_file():
        raise ParseError(f"{root / MODULES}: wanted an encoder, found {kind}; this model cannot be imported as one")


def _is_encoder(data: Mapping[str, Any], kind: str, embeds: bool) -> bool:
    """Return whether a model is read as an encoder. embeds: embeddings are wanted, for which T5's encoder is read alone"""
    family = ENCODER_DECODERS.get(kind)
    return kind in ENCODERS and (family is None or embeds or data.get("architectures") != [family.architecture])


def _refuse_options_of_decoders(kind: str, cache_dtype: str, every_position: bool) -> None:
    if cache_dtype != "f32":
        raise UserError(f"cache_dtype: wanted a decoder, found {kind}, which keeps no keys and values; leave it out")
    if every_position:
        raise UserError(f"every_position: wanted a decoder, found {kind}, whose result is an embedding; leave it out")


def _model_type(data: Mapping[str, Any], where: str) -> str:
    kind = data.get("model_type")
    if kind not in SUPPORTED:
        raise ParseError(
            f"{where}: wanted a known model_type, found {kind!r:.80}; export the model by torch.export (a .pt2 file) or "
            f"torch.onnx.export (an .onnx file) and load that; known: {', '.join(SUPPORTED)}"
        )
    return str(kind)


def _load_encoder(
    root: Path,
    inner: Path,
    data: Mapping[str, Any],
    pooling: Pooling | None,
    normalize: bool | None,
    bounds: Mapping[str, tuple[int, int]] | None,
) -> IRModule:
    """Import an encoder and what follows it. inner: the folder of the transformer; root: of sentence-transformers' modules."""
    where, given = str(inner / "config.json"), inner / PREPROCESSOR
    if data["model_type"] in SPEECH and given.is_file():
        found = read_json(given, "the configuration of a preprocessor")
        data = {**data, **({MASKED: found[MASKED]} if MASKED in found else {})}
    spec = encoder_spec(data, where)
    stages: list[Stage]
    head = None
    image, sound = isinstance(spec.inputs, Patches), isinstance(spec.inputs, Waves)
    if sound and (pooling not in (None, "none") or normalize is not None):
        raise UserError(
            f"pooling: wanted none of a model of sound, found {pooling or 'mean'!r} and normalize {normalize}; correct them"
        )
    if image and (pooling not in (None, "none", "cls") or (pooling is None and normalize is not None)):
        raise UserError(
            f"pooling: wanted none or cls of a model of images, found {pooling or 'mean'!r}; give one of them"
        )
    if pooling is not None or normalize is not None:
        stages = [] if pooling == "none" else [pooled(pooling or "mean")]
        stages += [normalized] if stages and normalize is not False else []
    elif (root / MODULES).is_file():
        stages = sentence_stages(root, spec.hidden)
    else:
        head = head_stage(data, where, spec)
        bare: list[Stage] = (
            [bare_results] if image or sound or spec.pooler is not None else [pooled("mean"), normalized]
        )
        stages = bare if head is None else [head]
    b: tuple[int, int | None]
    n: tuple[int, int | None]
    if isinstance(spec.inputs, Waves):
        b, n = sample_bounds(spec.inputs.least, bounds)
    else:
        positions = spec.inputs.positions
        b, n = (batch_bounds(bounds), (positions, positions)) if image else symbol_bounds(positions, bounds)
    return Encoder(spec, HfWeights(inner, spec.prefixes), types=head is not None).build(b, n, stages)


def load_decoder(
    spec: DecoderSpec,
    weights: DecoderWeights,
    bounds: Mapping[str, tuple[int, int]] | None,
    every_position: bool,
    cache_dtype: CacheType,
) -> IRModule:
    """Build the two functions of a decoder. Raises UserError for bounds that the model cannot have."""
    given = checked_bounds(bounds)
    most = spec.usual_positions([given[s][1] + more for s, more in (("n", 0), ("m", 1)) if s in given])
    m = given.pop("m", (1, max(1, most - 1)))
    if m[1] >= spec.positions:
        raise UserError(
            f"bound of m: wanted less than {spec.positions}, the positions this model has, found {m[1]}; lower the bound"
        )
    b, n = symbol_bounds(spec.positions, {"n": (1, most), **given})
    if n[0] < 1 and not every_position:
        raise UserError(
            f"bound of n: wanted at least 1, as the logits are those of the last position, found {n[0]}; raise it"
        )
    model = DecoderBuilder(spec, weights, min(n[0], m[0] + 1), max(n[1], m[1] + 1))
    return model.module(b, n, m, every_position, dtype(cache_dtype))


def _load_encoder_decoder(
    root: Path,
    spec: EncoderDecoderSpec,
    bounds: Mapping[str, tuple[int, int]] | None,
    every_position: bool,
    cache_dtype: CacheType,
) -> IRModule:
    """Import the three functions of an encoder-decoder. Raises UserError for bounds that the model cannot have."""
    given, text = checked_bounds(bounds), isinstance(spec.source, Words)
    symbols = {
        "b": "batch",
        **({"s": "positions of the source"} if text else {}),
        "n": "positions",
        "m": "past positions",
    }
    unknown = sorted(set(given) - set(symbols))
    if unknown:
        known = ", ".join(f"{name} ({what})" for name, what in symbols.items())
        raise UserError(
            f"wanted bounds of the model's symbols {known}, found {', '.join(unknown)[:80]}; correct the name"
        )
    most = {"s": spec.source.positions, "n": spec.words.positions, "m": spec.words.positions - 1}
    for name, limit in most.items():
        low, high = given.get(name, (1, max(1, min(limit, USUAL_POSITIONS))))
        if high > max(1, limit):
            raise UserError(
                f"bound of {name}: wanted at most {limit}, by the positions this model has, found {high}; lower it"
            )
        if low < 1 and not (name == "n" and every_position):
            raise UserError(f"bound of {name}: wanted at least 1, found {low}; raise it")
        given[name] = (low, high)
    weights = HfWeights(root, spec.encoder.prefixes)
    model = EncoderDecoderBuilder(spec, weights, dtype(cache_dtype))
    return model.module(given.get("b", (1, None)), given["s"], given["n"], given["m"], every_position)
