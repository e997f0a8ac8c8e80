"""Import of Hugging Face folders, config.json and model.safetensors, without the transformers package.

An encoder is `main(input_ids (b, n) i64, attention_mask (b, n) i64) -> sentence_embedding (b, hidden) f32`. What follows its
last hidden state is in the folder: the modules of sentence-transformers (modules.json), or the head that `architectures` names;
a bare encoder gives the normalised mean. Token types are all 0, except with a head and several types, where they are a third
input, `token_type_ids (b, n) i64`. Heads give `logits` of masked words (b, n, vocabulary), of a sequence (b, labels) or of each
position (b, n, labels), or the logits of the first and last position of an answer, (b, n) each. Positions count from 0; RoBERTa
models skip padding tokens, independently of the mask.

A decoder whose vectors are pooled, by modules.json or `pooling`, is read as an encoder too, and so is one with a head of classes. A
pooling without the prompt takes a third input, `prompt_length (b,) i64`. Texts of pages have `bbox (b, n, 4) i64`,
and for LayoutLMv3 the image of the page.

An encoder of images takes `pixel_values (b, channels, height, width) f32`; where its layers take any size, height and width are
the symbols `h` and `w`. It gives the last hidden state, a pooled vector if the family has one, a projected vector, or `logits`.
An encoder of sound takes `input_values (b, n) f32`, and `attention_mask (b, n) i64` if its preprocessor gives one. CLIP and
SigLIP are three functions, `main`, `text` and `image`; see `load_towers`. A forecaster of time series takes `past_values (b, s) f32`,
`past_values_padding (b, s) i64` and `freq (b, 1) i64`; see `load_series`.

A decoder is two functions that share weights. `prefill(input_ids (b, n) i64) -> (logits (b, 1, vocabulary) f32, key_0,
value_0, key_1 ...)` takes a prompt. `decode(input_ids (b, 1) i64, past_key_0, past_value_0, past_key_1 ...)` takes one more
token and returns the same. Attention is causal. Keys and values are (b, key heads, positions, head size), with `n` positions
after a prompt; `decode` takes `m` past positions and returns `m + 1`. A state space layer has the last inputs of its convolution
and its state instead, of the same size after every token.

With paged caches a decoder is one function of `t` tokens of `r` texts, whose keys and values are in blocks of pools:
`step(input_ids (t,) i64, requests (t,) i64, positions (t,) i64, last (r,) i64, tables (r, w) i64, key_pool_0, value_pool_0 ...) ->
(logits (r, vocabulary) f32, key_0, value_0 ...)`. Token `i` is at `positions[i]` of text `requests[i]`, and sees this text up to there.
Row `j` of the logits follows token `last[j]`. A pool is (p, 16, key heads, head size); the blocks of text `j` are `tables[j]`. The other
results are the pools with the keys and values of the tokens.

An encoder-decoder is three functions that share weights. `encode(input_ids (b, s) i64, attention_mask (b, s) i64) ->
(cross_key_0, cross_value_0, cross_key_1 ...)`, (b, heads, s, head size) each, reads a source. `prefill(input_ids (b, n) i64,
attention_mask, cross_key_0 ...)` and `decode(input_ids (b, 1) i64, attention_mask, cross_key_0 ..., past_key_0, past_value_0 ...)` are
like a decoder's. Whisper has `encode(input_features (b, mels, frames) f32)` and no mask. Of sound samples, `encode(input_values (b, s)
f32, attention_mask (b, s) i64)` gives `frame_mask (b, f) i64` before the keys, which the others take in place of `attention_mask`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.core.dtype import dtype
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.hf.adapter import CONFIG as ADAPTER
from relax_tune.ir.frontend.hf.adapter import MERGE, AdaptedWeights
from relax_tune.ir.frontend.hf.config import BATCH, Bounds, ConfigFields, SymbolRange, read_config, symbol_bounds, upper
from relax_tune.ir.frontend.hf.families.decoders import DECODERS, read_decoder_as_encoder
from relax_tune.ir.frontend.hf.families.encoder_decoders import ENCODER_DECODERS, read_encoder_decoder
from relax_tune.ir.frontend.hf.families.encoders import ENCODERS, read_encoder
from relax_tune.ir.frontend.hf.families.family import read_decoder
from relax_tune.ir.frontend.hf.families.pairs import PAIRS, read_pair
from relax_tune.ir.frontend.hf.families.series import SERIES
from relax_tune.ir.frontend.hf.families.speech import MASKED, SPEECH
from relax_tune.ir.frontend.hf.families.with_images import WITH_IMAGES, read_text_model
from relax_tune.ir.frontend.hf.heads import BARE, CAUSAL_HEADS, bare_results, head_stage, result_names, scored
from relax_tune.ir.frontend.hf.images.load import IMAGES, load_images
from relax_tune.ir.frontend.hf.pooling import Pooling, first_position, normalized, pooled
from relax_tune.ir.frontend.hf.quantized import CONFIG, open_weights
from relax_tune.ir.frontend.hf.sentence import (
    MODEL2VEC,
    MODULES,
    SENTENCE_CONFIG,
    TASKS,
    Sentence,
    StaticWeights,
    read_modules,
    sentence_stages,
    static_stack,
)
from relax_tune.ir.frontend.hf.series import load_series
from relax_tune.ir.frontend.hf.towers import TOWERS, load_towers
from relax_tune.ir.frontend.hf.transformer.inputs import Patches, Sound, Subsampling, Waves, Words
from relax_tune.ir.frontend.hf.transformer.parameters import Weights
from relax_tune.ir.frontend.hf.transformer.programs import (
    LONGEST,
    Stage,
    decoder_module,
    encoder_decoder_module,
    encoder_module,
    paged_module,
)
from relax_tune.ir.frontend.hf.transformer.spec import EncoderDecoder, Stack
from relax_tune.ir.frontend.hf.weights import read_json
from relax_tune.ir.frontend.shared.bounds import checked_bounds

CacheType = Literal["f32", "f16", "bf16"]
KVCache = Literal["contiguous", "paged"]
BLOCK = 16
"""Positions of a block of paged caches."""
PREPROCESSOR = "preprocessor_config.json"
GUIDES = "https://github.com/relax-tune/relax-tune/tree/main/docs/guides"
USUAL_SAMPLES = 480_000  # default upper bound of a sound, 30 s of 16,000 samples
EMBEDDING = ("sentence_embedding",)  # name of the result of an encoder whose positions are pooled
USUAL_POSITIONS = 4096  # default upper bound of an encoder-decoder without a position table
LOADERS: Mapping[str, Callable[..., IRModule]] = {
    **dict.fromkeys(IMAGES, load_images),
    **dict.fromkeys(TOWERS, load_towers),
    **dict.fromkeys(SERIES, load_series),
}
SUPPORTED = tuple(dict.fromkeys((*ENCODERS, *LOADERS, *DECODERS, *WITH_IMAGES, *ENCODER_DECODERS, *PAIRS)))


def load_hf(
    folder: str | Path,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    bounds: Bounds | None = None,
    every_position: bool = False,
    cache_dtype: CacheType = "f32",
    adapter: str | Path | None = None,
    kv_cache: KVCache = "contiguous",
) -> IRModule:
    """Import a Hugging Face model by the `model_type` of its config.json.

    The module's docstring describes the functions of each kind of model.

    Args:
        folder: contains config.json and model.safetensors
        pooling: encoders and decoders read as such: `mean`, `max`, `mean_sqrt_len` or `weightedmean` over the positions of the mask,
            `cls` or `lasttoken` (its first or last position), `none` (last hidden state (b, n, hidden)); replaces the modules or head
            of the folder
        normalize: encoders: scale the pooled vector to unit length; default with `pooling`: True
        bounds: inclusive (lower, upper) of the symbols `b`, `n`, `m`, `s`; default: at least 1, at most the positions of the model
        every_position: decoders: logits of `prefill` are (b, n, vocabulary)
        cache_dtype, kv_cache: decoders: type of stored keys and values; arrays of each text, or `paged`, blocks that texts share
        adapter: folder of a LoRA adapter, which is merged into the weights

    Raises:
        ParseError: for files that cannot be read or do not fit together.
        UserError: for bounds that the model cannot have.
    """
    root = Path(folder)
    _check_arguments(root, pooling, cache_dtype, kv_cache)
    modules = read_modules(root) if (root / MODULES).is_file() else None
    inner = root if modules is None else modules.inner
    data = {"model_type": MODEL2VEC} if modules is not None and modules.static else read_config(inner)
    where = str(inner / "config.json")
    requested = pooling is not None or normalize is not None
    options = _EncoderOptions(root, inner, modules, pooling, normalize, bounds, adapter)
    if data.get("model_type") == MODEL2VEC:
        _refuse_adapter(MODEL2VEC, adapter)
        _refuse_options_of_decoders(MODEL2VEC, cache_dtype, every_position, kv_cache)
        return _load_static(options, data, where)
    kind = _model_type(data, where)
    if _is_encoder(data, kind, modules is not None or requested):
        _refuse_options_of_decoders(kind, cache_dtype, every_position, kv_cache)
        return _load_encoder(options, data, where)
    _refuse_embedding(root, kind, requested)
    if kind in LOADERS:
        ConfigFields(data, where).only(CONFIG, None)
        _refuse_options_of_decoders(kind, cache_dtype, every_position, kv_cache)
        _refuse_adapter(kind, adapter)
        return LOADERS[kind](root, data, where, bounds)
    if kind in DECODERS or kind in WITH_IMAGES:
        stack = read_decoder(DECODERS[kind], data, where) if kind in DECODERS else read_text_model(data, where)
        with _opened(root, data, where, adapter) as weights:
            return load_decoder(stack, weights, bounds, every_position, cache_dtype, kv_cache)
    _refuse_paged(kind, kv_cache)
    data = with_preprocessor(data, inner)
    model = read_pair(data, where) if kind in PAIRS else read_encoder_decoder(data, where)
    with _opened(root, data, where, adapter) as weights:
        return _load_encoder_decoder(model, weights, bounds, every_position, cache_dtype)


@contextmanager
def _opened(root: Path, data: Mapping[str, Any], where: str, adapter: str | Path | None) -> Iterator[Weights]:
    """Open the weights of a folder, with an adapter merged in, and warn in the end of what was not read."""
    weights = open_weights(root, data, where)
    if adapter is None:
        yield weights
        return
    adapted = AdaptedWeights(weights, Path(adapter))
    yield adapted
    adapted.warn_of_unread()


def _refuse_adapter(kind: str, adapter: str | Path | None) -> None:
    if adapter is not None:
        raise UserError(f"adapter: expected an encoder or a decoder of text or sound, got {kind}; {MERGE}")


def _check_arguments(root: Path, pooling: str | None, cache_dtype: str, kv_cache: str) -> None:
    if (root / ADAPTER).is_file() and not (root / "config.json").exists():
        raise ParseError(
            f"{root}: expected a model, got the folder of a LoRA adapter; give the model, and this as adapter"
        )
    chosen = (
        ("pooling", pooling or "none", Pooling),
        ("cache_dtype", cache_dtype, CacheType),
        ("kv_cache", kv_cache, KVCache),
    )
    for name, value, known in chosen:
        if value not in get_args(known):
            names = ", ".join(get_args(known))
            raise UserError(f"{name}: expected one of {names}, got {value!r:.80}; give one of them")


def _refuse_embedding(root: Path, kind: str, requested: bool) -> None:
    """Refuse embeddings of a model that is no encoder of text. requested: by options, not only by modules"""
    if requested:
        what = "which pools as its folder says" if kind in LOADERS else "whose results are logits"
        raise UserError(f"pooling and normalize: expected an encoder, got {kind}, {what}; leave them out")
    if (root / MODULES).is_file():
        raise ParseError(f"{root / MODULES}: expected an encoder, got {kind}; this model cannot be imported as one")


def _is_encoder(data: Mapping[str, Any], kind: str, embeds: bool) -> bool:
    """Return whether a model is read as an encoder.

    Args:
        embeds: an embedding is requested, for which decoders and T5's encoder are read as encoders too
    """
    named = data.get("architectures")
    # Embedding models are often fine-tuned decoders, and config.json does not say so: pooling modules or a head do.
    if kind in DECODERS and kind not in ENCODERS:
        first = str(named[0]) if isinstance(named, list) and named else ""
        return embeds or any(first.endswith(head) for head in CAUSAL_HEADS)
    family = ENCODER_DECODERS.get(kind)
    return kind in ENCODERS and (family is None or embeds or named != [family.architecture])


def _refuse_options_of_decoders(kind: str, cache_dtype: str, every_position: bool, kv_cache: str) -> None:
    _refuse_paged(kind, kv_cache)
    if cache_dtype != "f32":
        raise UserError(f"cache_dtype: expected a decoder, got {kind}, which stores no keys and values; leave it out")
    if every_position:
        raise UserError(f"every_position: expected a decoder, got {kind}, whose result is an embedding; leave it out")


def _refuse_paged(kind: str, kv_cache: str) -> None:
    if kv_cache != "contiguous":
        raise UserError(f"kv_cache: expected a decoder for paged caches, got {kind}; leave it out")


def _model_type(data: Mapping[str, Any], where: str) -> str:
    kind = data.get("model_type")
    if kind not in SUPPORTED:
        near = difflib.get_close_matches(kind, SUPPORTED, 4, 0.6) if isinstance(kind, str) else []
        nearest = f"the nearest known ones are {', '.join(near)}" if near else "no known one is near"
        raise ParseError(
            f"{where}: expected a known model_type, got {kind!r:.80}; {nearest} ({GUIDES} lists all). Export the model by "
            "torch.export (a .pt2 file) or torch.onnx.export (an .onnx file) and load that"
        )
    return str(kind)


@dataclass(frozen=True, slots=True)
class _EncoderOptions:
    """How an encoder is read.

    Attributes:
        root: folder of sentence-transformers' modules
        inner: folder of the first module
        pooling, normalize: replace the modules or head of the folder
        adapter: folder of an adapter
    """

    root: Path
    inner: Path
    modules: Sentence | None
    pooling: Pooling | None
    normalize: bool | None
    bounds: Bounds | None
    adapter: str | Path | None

    @property
    def requested(self) -> list[Stage] | None:
        """The stages that the options ask for."""
        if self.pooling is None and self.normalize is None:
            return None
        stages: list[Stage] = [] if self.pooling == "none" else [pooled(self.pooling or "mean")]
        return [*stages, normalized] if stages and self.normalize is not False else stages


def _load_encoder(options: _EncoderOptions, data: Mapping[str, Any], where: str) -> IRModule:
    """Import an encoder and what follows it."""
    root, modules = options.root, options.modules
    kind = data["model_type"]
    data = with_preprocessor(data, options.inner)
    stack = read_encoder(data, where) if kind in ENCODERS else read_decoder_as_encoder(data, where)
    image, sound = isinstance(stack.embedding, Patches), isinstance(stack.embedding, Waves | Subsampling)
    _check_pooling(image, sound, options.pooling, options.normalize)
    stages, head, names = options.requested, None, list(EMBEDDING)
    if stages is not None and options.pooling == "none":
        names = list(BARE[:1])
    if stages is not None and image:
        # Images have no mask to find a first position by.
        stages = [first_position if options.pooling == "cls" else s for s in stages[:1]] + stages[1:]
    elif stages is None and modules is not None:
        stages = []
        if modules.head:
            head = head_stage({**data, "architectures": [modules.head]}, where, stack)
            stages += [] if head is None else _headed(root, data, where, head, modules.head)
        later = sentence_stages(modules, root, stack.hidden)
        stages, names = [*stages, *later], names if later else []
    elif stages is None and (head := head_stage(data, where, stack)) is not None:
        stages = _headed(root, data, where, head, str(data["architectures"][0]))
        names = list(result_names(data, stack)) if len(stages) == 1 else ["scores"]
    elif stages is None and (image or sound or stack.outputs.pooler is not None):
        stages, names = [bare_results], list(BARE)
    elif stages is None:
        stages = [pooled("mean"), normalized]
    symbols = {"b": BATCH}
    if isinstance(stack.embedding, Waves):
        symbols["n"] = SymbolRange("samples", stack.embedding.least)
    elif isinstance(stack.embedding, Subsampling):
        usual = stack.embedding.usual * stack.embedding.stride**stack.embedding.rounds
        symbols["n"] = SymbolRange("frames", 1, None, usual)
    elif isinstance(stack.embedding, Words):
        symbols["n"] = SymbolRange("positions", most=min(stack.positions, LONGEST))
    span = symbol_bounds(symbols, options.bounds)
    # texts whose words' logits are pooled are not pairs
    typed = head is not None and (modules is None or modules.head != TASKS["fill-mask"])
    with _opened(options.inner, data, where, options.adapter) as weights:
        return encoder_module(stack, weights, span["b"], span.get("n"), stages, typed=typed, names=names)


def with_preprocessor(data: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Return a configuration with what the folder's preprocessor says about masks of sound."""
    path, inside = folder / PREPROCESSOR, data.get("encoder")
    if not path.is_file():
        return data
    if data.get("model_type") in PAIRS and isinstance(inside, dict):
        return {**data, "encoder": with_preprocessor(inside, folder)}
    if data.get("model_type") not in SPEECH:
        return data
    # Whether padding is masked belongs to the model, but only the preprocessor's file states it.
    fields = read_json(path, "the configuration of a preprocessor")
    return {**data, **({MASKED: fields[MASKED]} if MASKED in fields else {})}


def _headed(root: Path, data: Mapping[str, Any], where: str, head: Stage, name: str) -> list[Stage]:
    """Return a head, and the activation of its scores if the folder is a cross-encoder's."""
    path = root / SENTENCE_CONFIG
    saved = read_json(path, "settings of sentence-transformers") if path.is_file() else {}
    if not name.endswith("ForSequenceClassification"):
        return [head]
    score = scored(data, where, saved if saved.get("model_type") == "CrossEncoder" else None)
    return [head] if score is None else [head, score]


def _load_static(options: _EncoderOptions, data: Mapping[str, Any], where: str) -> IRModule:
    """Import static embeddings: the mean of the embeddings of a text's tokens, and the modules that follow it."""
    weights = StaticWeights(options.inner)
    stack, stages = static_stack(weights), options.requested
    if stages is None:
        modules, scale = options.modules, ConfigFields(data, where).truth("normalize", False)
        later = sentence_stages(modules, options.root, stack.hidden) if modules is not None else [normalized] * scale
        stages = [pooled("mean"), *later]
    span = symbol_bounds({"b": BATCH, "n": SymbolRange("positions", most=stack.positions)}, options.bounds)
    return encoder_module(stack, weights, span["b"], span["n"], stages, names=EMBEDDING)


def _check_pooling(image: bool, sound: bool, pooling: str | None, normalize: bool | None) -> None:
    """Refuse poolings of text for models of images and sound."""
    if sound and (pooling not in (None, "none") or normalize is not None):
        raise UserError(
            f"pooling: expected none of a model of sound, got {pooling or 'mean'!r} and normalize {normalize}; correct them"
        )
    if image and (pooling not in (None, "none", "cls") or (pooling is None and normalize is not None)):
        raise UserError(
            f"pooling: expected none or cls of a model of images, got {pooling or 'mean'!r}; give one of them"
        )


def load_decoder(
    stack: Stack,
    weights: Weights,
    bounds: Bounds | None,
    every_position: bool,
    cache_dtype: CacheType,
    kv_cache: KVCache = "contiguous",
) -> IRModule:
    """Build the functions of a decoder. Raises UserError for bounds or paged caches that the model cannot have."""
    if kv_cache == "paged":
        if every_position:
            raise UserError("every_position: expected contiguous caches, got paged ones; leave it out")
        return _load_paged(stack, weights, bounds, cache_dtype)
    given, positions = checked_bounds(bounds), stack.positions
    # m cached positions come before one new one, which needs m + 1 rows of tables.
    usual = stack.usual_positions(given[s][1] + more for s, more in (("n", 0), ("m", 1)) if s in given)
    # logits of the last position need one
    symbols = {"b": BATCH, "n": SymbolRange("positions", 0 if every_position else 1, positions, usual)}
    if stack.attends:
        symbols["m"] = SymbolRange("past positions", 0, positions - 1, max(1, usual - 1))
    span = symbol_bounds(symbols, given)
    n, m = upper(span["n"]), upper(span.get("m", (0, 0)))
    return decoder_module(stack, weights, span["b"], n, m, every_position, dtype(cache_dtype))


def _load_paged(stack: Stack, weights: Weights, bounds: Bounds | None, cache_dtype: CacheType) -> IRModule:
    """Build the function of a decoder with paged caches. Raises UserError for bounds or a model that it cannot have."""
    given = checked_bounds(bounds)
    usual = stack.usual_positions(n * BLOCK for n in [given.get("w", (0, 0))[1]])
    symbols = {
        "t": SymbolRange("tokens of a step", 1, None, 256),
        "r": SymbolRange("texts of a step", 1, None, 16),
        "w": SymbolRange("blocks of a text", 1, stack.positions // BLOCK, usual // BLOCK),
    }
    texts, width = (given.get(s, (1, symbols[s].usual or 1))[1] for s in "rw")
    symbols["p"] = SymbolRange("blocks of the pools", 1, None, texts * width)
    span = {name: upper(of) for name, of in symbol_bounds(symbols, given).items()}
    return paged_module(stack, weights, span["t"], span["r"], span["w"], span["p"], BLOCK, dtype(cache_dtype))


def _load_encoder_decoder(
    model: EncoderDecoder, weights: Weights, bounds: Bounds | None, every_position: bool, cache_dtype: CacheType
) -> IRModule:
    """Import the three functions of an encoder-decoder. Raises UserError for bounds that the model cannot have."""
    read, target = model.encoder.embedding, model.decoder.positions
    source = USUAL_SAMPLES if isinstance(read, Sound) else model.encoder.positions
    symbols = {"b": BATCH}
    if isinstance(read, Sound):
        symbols["s"] = SymbolRange("samples", read.least, None, USUAL_SAMPLES)
    elif isinstance(read, Words):
        symbols["s"] = SymbolRange("positions of the source", 1, source, min(source, USUAL_POSITIONS))
    symbols["n"] = SymbolRange("positions", 0 if every_position else 1, target, min(target, USUAL_POSITIONS))
    symbols["m"] = SymbolRange("past positions", 1, target - 1, min(target - 1, USUAL_POSITIONS))
    span = symbol_bounds(symbols, bounds)
    s, n, m = (upper(span.get(name, (source, source))) for name in "snm")
    return encoder_decoder_module(model, weights, span["b"], s, n, m, every_position, dtype(cache_dtype))
