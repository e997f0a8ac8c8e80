"""Generation with a model that has the functions `prefill` and `decode` (see `Artifact.functions`).

Tests: `tests/tuner/emit/test_generate.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.arrays import any_tensor, as_tensor, as_tensors
from relax_tune.runtime.generation.beams import Hypothesis, search_group
from relax_tune.runtime.generation.config import GenerationConfig
from relax_tune.runtime.generation.decoder import Decoder
from relax_tune.runtime.generation.detokenizer import Tokenizer
from relax_tune.runtime.generation.logits import LogitsProcessor
from relax_tune.runtime.generation.paged import STEP, GeneratedText, PagedDecoder, paged_steps
from relax_tune.runtime.generation.rows import (
    Request,
    Row,
    as_result,
    group_steps,
    on_host_rows,
    read_prompts,
    warn_of_end,
)
from relax_tune.runtime.generation.sources import Source
from relax_tune.runtime.generation.stopping import StopRules
from relax_tune.runtime.model import Model

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class GenerationStep:
    """The next token of every row.

    tokens: (rows,) i64; `pad_token_id` in rows that had ended before
    live: (rows,) bool, whether the token belongs to the row
    """

    tokens: Ids
    live: NDArray[np.bool_]


@overload
def generate(
    model: Model,
    prompts: NDArray[Any],
    max_new_tokens: int | None = None,
    config: GenerationConfig | None = None,
    **options: Any,
) -> Ids: ...


@overload
def generate(
    model: Model,
    prompts: Mapping[str, ArrayLike],
    max_new_tokens: int | None = None,
    config: GenerationConfig | None = None,
    **options: Any,
) -> Any: ...


@overload
def generate(
    model: Model,
    prompts: Sequence[ArrayLike],
    max_new_tokens: int | None = None,
    config: GenerationConfig | None = None,
    **options: Any,
) -> list[Ids]: ...


def generate(
    model: Model,
    prompts: Any,
    max_new_tokens: int | None = None,
    config: GenerationConfig | None = None,
    **options: Any,
) -> Any:
    """Extend prompts by tokens: the likeliest ones, drawn ones, or the best ones of a beam search.

    A row ends after a token of `eos_token_id`, a stop sequence or a stop string, after `max_new_tokens`, or when the model has no more
    positions, which a `RelaxTuneWarning` says.

    Rows of equal length are computed together, as many as the model takes, and each group by itself: padding never reaches
    the model. What a row gets depends on no other row.

    With paged caches, rows of any lengths are computed together (`runtime/generation/paged`).

    Args:
        model: `prefill(input_ids (b, n)) -> (logits (b, _, vocabulary), *caches)` and `decode(input_ids (b, 1), *caches)` with
            results of the same kind; or an encoder-decoder, which has `encode` too; or a decoder with paged caches, which has `step`.
        prompts: (rows, length) token ids, or a list of prompts of any lengths, as arrays of any library (see `Model.run`). An
            encoder-decoder takes its sources by the name of the encoder's input instead: `{"input_ids": ids}`,
            `{"input_features": spectrograms}`; its texts start with `decoder_start_token_id`, or with prompts given as
            `decoder_input_ids`.
        max_new_tokens: Most tokens to add to a prompt.
        config: The settings.
        options: Fields of `GenerationConfig`, which override `config`, and three others. `attention_mask`, in the shape of
            `prompts`, is 0 for padding before or after the tokens, else 1. `tokenizer` is an object with `decode(ids)`, for
            `stop_strings`. `logits_processor` is a function from the tokens so far (b, length) and their logits (b, vocabulary) to
            such logits.

    Returns:
        An array (rows, length + added) i64, filled with `pad_token_id` after the end of a row, or a list of arrays for a list of
        prompts; `num_return_sequences` rows for each prompt. For tensors of torch, tensors.

    Raises:
        UserError: The model lacks these functions, prompts do not fit it, settings are wrong, or no token can be chosen by the
            logits.
    """
    tensors = any_tensor(prompts if isinstance(prompts, (Mapping, list, tuple)) else [prompts])
    prompts = on_host_rows(prompts)
    if STEP in model.functions:
        call = _call(prompts, max_new_tokens, config, **options)
        added, config = _paged_added(model, call), call.config
    else:
        request = _request(model, prompts, max_new_tokens, config, **options)
        added, config = _added(request), request.config
    result = as_result(prompts, added, config.filler, config.num_return_sequences)
    if not tensors:
        return result
    return as_tensor(result) if isinstance(result, np.ndarray) else as_tensors(result)


def generate_steps(
    model: Model,
    prompts: Any,
    max_new_tokens: int | None = None,
    config: GenerationConfig | None = None,
    **options: Any,
) -> Iterator[GenerationStep]:
    """Yield the next token of every row, as soon as it is known; arguments and errors as of `generate`.

    All groups of rows of equal length advance together, so the caches of all are in memory. Rows of a model with paged caches wait for
    blocks; while they wait, they get no tokens, and are not live. Beam search knows its tokens at its end only, and is refused.
    """
    if STEP in model.functions:
        return _paged_live(model, _call(prompts, max_new_tokens, config, **options))
    request = _request(model, prompts, max_new_tokens, config, **options)
    if request.config.num_beams > 1:
        raise UserError(
            f"num_beams: expected 1 where tokens are given one by one, got {request.config.num_beams}; call generate"
        )
    return _steps(request)


def beam_search(
    model: Model,
    prompts: Any,
    max_new_tokens: int | None = None,
    config: GenerationConfig | None = None,
    **options: Any,
) -> list[list[Hypothesis]]:
    """Return the best `num_return_sequences` continuations of each prompt, best first, with scores; arguments as of `generate`.

    A step computes `num_beams` rows for each prompt, and copies their caches in the order of the beams that go on.
    """
    request = _request(model, prompts, max_new_tokens, config, **options)
    return _search(request)


@dataclass(frozen=True)
class _Call:
    """The checked arguments of a call: rows without padding, each as often as it has results, and settings."""

    rows: tuple[Row, ...]
    config: GenerationConfig
    rules: StopRules
    custom: LogitsProcessor | None


def _request(
    model: Model, prompts: Any, max_new_tokens: int | None, config: GenerationConfig | None, **options: Any
) -> Request:
    """Check a call before anything is computed."""
    decoder = Decoder(model)
    call = _call(prompts, max_new_tokens, config, **options)
    return Request(decoder, call.rows, call.config, call.rules, call.custom)


def _call(
    prompts: Any,
    max_new_tokens: int | None,
    config: GenerationConfig | None,
    *,
    attention_mask: ArrayLike | None = None,
    tokenizer: Tokenizer | None = None,
    logits_processor: LogitsProcessor | None = None,
    **settings: Any,
) -> _Call:
    if max_new_tokens is not None:
        settings = {"max_new_tokens": max_new_tokens, **settings}
    if config is not None and not isinstance(config, GenerationConfig):
        raise UserError(
            f"config: expected a GenerationConfig, got a {type(config).__name__}; give its settings by name instead"
        )
    known = GenerationConfig.__dataclass_fields__
    unknown = [name for name in settings if name not in known]
    if unknown:
        more = "attention_mask, tokenizer, logits_processor"
        raise UserError(
            f"generate: expected options among {', '.join(known)}, {more}; got {unknown[0]:.80}; leave it out"
        )
    config = replace(config or GenerationConfig(), **settings)
    rules = StopRules(config, tokenizer)
    rows = read_prompts(on_host_rows(prompts), on_host_rows(attention_mask))
    if config.num_beams == 1:
        rows = tuple(row for row in rows for _ in range(config.num_return_sequences))
    return _Call(rows, config, rules, logits_processor)


def _added(request: Request) -> list[Ids]:
    """Return the added tokens of every result."""
    if request.config.num_beams > 1:
        return [h.tokens for hypotheses in _search(request) for h in hypotheses]
    added = [np.empty(0, np.int64) for _ in request.rows]
    for numbers in request.groups():
        steps = list(group_steps(request, numbers))
        for at, number in enumerate(numbers if steps else ()):
            added[number] = np.array([tokens[at] for tokens, live in steps if live[at]], np.int64)
    return added


def _paged(model: Model, call: _Call) -> Iterator[list[GeneratedText]]:
    """Yield the texts of a call, then after each step the ones with a new token; see `paged_steps`."""
    config = call.config
    if config.num_beams > 1:
        raise UserError(f"num_beams: expected 1 with paged caches, got {config.num_beams}; build contiguous ones")
    if any(isinstance(row, Source) for row in call.rows) or config.decoder_start_token_id is not None:
        raise UserError("prompts: expected token ids for a model without an encoder; give rows of token ids")
    rows = [row.tolist() for row in call.rows if not isinstance(row, Source)]
    with closing(PagedDecoder(model, tokens=sum(len(row) + config.max_new_tokens for row in rows))) as decoder:
        yield from paged_steps(decoder, rows, config, call.rules, call.custom)


def _paged_added(model: Model, call: _Call) -> list[Ids]:
    steps = _paged(model, call)
    texts = list(next(steps))
    for _ in steps:
        pass
    for number, text in enumerate(texts):
        if not text.stopped:
            warn_of_end(call.config, number, text.added)
    return [np.array(text.tokens[text.prompt :], np.int64) for text in texts]


def _paged_live(model: Model, call: _Call) -> Iterator[GenerationStep]:
    steps = _paged(model, call)
    number = {text: at for at, text in enumerate(next(steps))}  # errors are raised here, before the first step

    def live_steps() -> Iterator[GenerationStep]:
        for stepped in steps:
            tokens, live = np.full(len(number), call.config.filler, np.int64), np.zeros(len(number), np.bool_)
            for text in stepped:
                tokens[number[text]], live[number[text]] = text.tokens[-1], True
            yield GenerationStep(tokens, live)

    return live_steps()


def _search(request: Request) -> list[list[Hypothesis]]:
    results: list[list[Hypothesis]] = [[] for _ in request.rows]
    for numbers in request.groups(request.config.num_beams):
        for number, hypotheses in zip(numbers, search_group(request, numbers), strict=True):
            results[number] = hypotheses
    return results


def _steps(request: Request) -> Iterator[GenerationStep]:
    going = [(numbers, group_steps(request, numbers)) for numbers in request.groups()]
    if len(going) == 1:
        yield from (GenerationStep(tokens.copy(), live.copy()) for tokens, live in going[0][1])
        return
    while going:
        tokens = np.full(len(request.rows), request.config.filler, np.int64)
        live = np.zeros(len(request.rows), np.bool_)
        stepped = []
        for numbers, steps in going:
            step = next(steps, None)
            if step is not None:
                tokens[numbers], live[numbers] = step
                stepped.append((numbers, steps))
        if stepped:
            yield GenerationStep(tokens, live)
        going = stepped
