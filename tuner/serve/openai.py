"""Routes in the form of OpenAI's API: embeddings, completions, chat completions, the list of models.

Tests: `tests/tuner/serve/test_openai.py`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from relax_tune.runtime.generation.config import GenerationConfig
from relax_tune.tuner.serve.generator import Generator, Piece
from relax_tune.tuner.serve.models import ModelVersion
from relax_tune.tuner.serve.requests import ActiveRequest, Serving, Stream, as_request_error, route
from relax_tune.tuner.serve.tensors import RequestError

MOST_TEXTS = 2048
"""Texts of a request for embeddings, as of OpenAI."""
MOST_CHOICES = 128
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "logprobs": (False, 0), "top_logprobs": (0,), "suffix": ("",), "best_of": (1,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "logit_bias": ({},), "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "modalities": (["text"],), "audio": (),
    "response_format": ({"type": "text"},),
}  # fmt: skip
"""Fields that are not implemented, by the values that change nothing; null changes nothing either."""


def error_body(status: int, message: str) -> Mapping[str, Any]:
    """Return an error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = "model_not_found" if status == 404 else None
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def openai_routes(serving: Serving) -> list[Route]:
    """Return the routes."""

    async def models(request: Request) -> Response:
        names = sorted({m.name for m in serving.repository.models})
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "relax-tune"} for name in names]
        return JSONResponse({"object": "list", "data": data})

    async def completions(call: ActiveRequest) -> Response | Stream:
        return await _complete(call, chat=False)

    async def chat(call: ActiveRequest) -> Response | Stream:
        return await _complete(call, chat=True)

    return [
        Route("/v1/models", models, methods=["GET"]),
        route(serving, "/v1/embeddings", "embeddings", _embed, error_body),
        route(serving, "/v1/completions", "completions", completions, error_body),
        route(serving, "/v1/chat/completions", "chat", chat, error_body),
    ]


def _model(call: ActiveRequest, document: Mapping[str, Any]) -> ModelVersion:
    """Return the model that a request names, as NAME or NAME:VERSION."""
    name = document.get("model")
    if not isinstance(name, str):
        raise RequestError(f"model: expected a name, got {name!r:.80}")
    name, separator, number = name.partition(":")
    model = call.serving.repository.find(name, number if separator else None)
    call.labels = model.labels
    return model


def _texts(given: object, where: str) -> list[str | list[int]]:
    """Return one text or several, each a string or a list of token ids."""
    values: list[Any] = given if isinstance(given, list) and not (given and _are_ids(given)) else [given]
    if not values or len(values) > MOST_TEXTS or not all(isinstance(v, str) or _are_ids(v) for v in values):
        raise RequestError(
            f"{where}: expected a text, a list of token ids, or up to {MOST_TEXTS} of them, got {given!r:.80}"
        )
    return values


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in value)


async def _embed(call: ActiveRequest) -> Response:
    document = await call.json()
    model = _model(call, document)
    encoder = model.encoder
    if encoder is None or not encoder.embeds:
        raise RequestError(
            f"model {model.name}: expected an encoder served with --model FOLDER; use /v2/models/{model.name}/infer"
        )
    form = document.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise RequestError(f"encoding_format: expected float or base64, got {form!r:.80}")
    given = _texts(document.get("input"), "input")
    strings = [t for t in given if isinstance(t, str)]
    ids = iter(await asyncio.to_thread(encoder.tokenize, strings))
    tokens = [next(ids) if isinstance(t, str) else t for t in given]
    ((label, function),) = model.functions.items()
    calls = [function.check(encoder.arrays(t)) for t in tokens]
    batcher = model.batchers[label]

    async def all_texts() -> list[Any]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(batcher.infer(c, call.expires)) for c in calls]
        return [task.result()[0][0] for task in tasks]

    try:
        vectors = await call.until_gone(all_texts())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    width = document.get("dimensions")
    if width is not None and width != len(vectors[0]):
        raise RequestError(f"dimensions: expected {len(vectors[0])}, the width of this model, got {width!r:.80}")
    data = [{"object": "embedding", "index": n, "embedding": _vector(vector, form)} for n, vector in enumerate(vectors)]
    count = sum(map(len, tokens))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "data": data, "model": model.name, "usage": usage})


def _vector(vector: Any, form: str) -> Any:
    narrow = np.asarray(vector, "<f4")
    return base64.b64encode(narrow.tobytes()).decode() if form == "base64" else narrow.tolist()


@dataclass(frozen=True, slots=True)
class _Job:
    """A checked request to generate."""

    model: ModelVersion
    generator: Generator
    prompts: list[list[int]]
    config: GenerationConfig
    chat: bool
    id: str
    created: int
    echo: tuple[str, ...] = ()

    def document(self, kind: str, choices: list[dict[str, Any]], usage: Mapping[str, int] | None) -> dict[str, Any]:
        """Return an answer, or a part of a stream."""
        document = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
        }
        return document if usage is None else {**document, "usage": usage}

    def usage(self, generated: int) -> dict[str, int]:
        """Return the counts of tokens."""
        asked = sum(map(len, self.prompts))
        return {"prompt_tokens": asked, "completion_tokens": generated, "total_tokens": asked + generated}


async def _complete(call: ActiveRequest, chat: bool) -> Response | Stream:
    document = await call.json()
    model = _model(call, document)
    if model.generator is None:
        raise RequestError(f"model {model.name}: expected a decoder served with --model FOLDER")
    for name, neutral in _NEUTRAL.items():
        value = document.get(name)
        if value is not None and not any((type(value) is type(n) and value == n) or value == n for n in neutral):
            raise RequestError(
                f"{name}: expected it to be left out, which this server does not implement, got {value!r:.80}"
            )
    job = await asyncio.to_thread(_job, model, model.generator, document, chat)
    if not _truth(document, "stream"):
        pieces = await call.until_gone(_collected(job))
        return JSONResponse(_answer(job, pieces))
    options = document.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestError(f"stream_options: expected an object, got {options!r:.80}")
    with_usage = _truth(options, "include_usage")
    stream = job.generator.pieces(job.prompts, job.config)
    # a prompt that the model refuses is answered with a status, before the stream begins
    first = await call.until_gone(_next(stream))
    return _events(job, first, stream, with_usage)


async def _next(pieces: AsyncGenerator[Piece, None]) -> Piece:
    return await anext(pieces)


def _truth(document: Mapping[str, Any], name: str) -> bool:
    value = document.get(name)
    if value not in (None, True, False):
        raise RequestError(f"{name}: expected true or false, got {value!r:.80}")
    return bool(value)


def _job(model: ModelVersion, generator: Generator, document: Mapping[str, Any], chat: bool) -> _Job:
    """Check a request and tokenize its prompts."""
    if chat:
        text = generator.template.render(_messages(document.get("messages")))
        given: list[str | list[int]] = [generator.tokenize(text, special=False)]
    else:
        given = _texts(document.get("prompt"), "prompt")
    prompts = [generator.tokenize(t) if isinstance(t, str) else t for t in given]
    for ids in prompts:
        generator.check(ids, "messages" if chat else "prompt")
    config = _config(generator, document, chat, max(map(len, prompts)))
    if config.num_return_sequences * len(prompts) > MOST_CHOICES:
        raise RequestError(
            f"n: expected at most {MOST_CHOICES} texts in all, got {config.num_return_sequences * len(prompts)}"
        )
    echo: tuple[str, ...] = ()
    if not chat and _truth(document, "echo"):
        if not all(isinstance(t, str) for t in given):
            raise RequestError("echo: expected prompts that are texts")
        echo = tuple(str(t) for t in given for _ in range(config.num_return_sequences))
    name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    return _Job(model, generator, prompts, config, chat, name, int(time.time()), echo)


def _messages(given: object) -> list[dict[str, Any]]:
    """Return messages with texts as contents; parts of texts are joined."""
    if not isinstance(given, list) or not given or not all(isinstance(m, dict) for m in given):
        raise RequestError(f"messages: expected a list of messages, got {given!r:.80}")
    messages = []
    for number, message in enumerate(given):
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list):
            parts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
            content = "".join(p for p in parts if p is not None) if all(isinstance(p, str) for p in parts) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise RequestError(f"messages[{number}]: expected a role and a text as content, got {message!r:.80}")
        messages.append({**message, "content": content})
    return messages


def _config(generator: Generator, document: Mapping[str, Any], chat: bool, longest: int) -> GenerationConfig:
    """Return the settings of a request. A wrong value raises UserError that names the setting."""

    def given(name: str, default: Any) -> Any:
        return default if document.get(name) is None else document[name]

    temperature, most = given("temperature", 1.0), given("max_tokens", None)
    most = given("max_completion_tokens", most) if chat else most
    if most is None:  # OpenAI's default: 16 of a completion, as many as fit of a chat
        most = 16 if not chat else (generator.room or longest + 512) - longest + 1
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 <= temperature <= 2:
        raise RequestError(f"temperature: expected a number from 0 to 2, got {temperature!r:.80}")
    stop = given("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > 4:
        raise RequestError(f"stop: expected a text or up to 4 of them, got {stop!r:.80}")
    drawn = temperature > 0
    count = given("n", 1)
    if not drawn and count != 1:
        raise RequestError("n: expected 1 with temperature 0, since all texts would be the same")
    settings = {"temperature": float(temperature), "top_p": given("top_p", 1.0), "top_k": 0} if drawn else {}
    return generator.config(
        max_new_tokens=most,
        do_sample=drawn,
        num_return_sequences=count,
        seed=document.get("seed"),
        stop_strings=tuple(stops),
        **settings,
    )


async def _collected(job: _Job) -> list[Piece]:
    async with aclosing(job.generator.pieces(job.prompts, job.config)) as pieces:
        return [piece async for piece in pieces]


def _answer(job: _Job, pieces: Sequence[Piece]) -> dict[str, Any]:
    count = len(job.prompts) * job.config.num_return_sequences
    texts, ends = ([*job.echo] or [""] * count), [""] * count
    for piece in pieces:
        texts[piece.row] += piece.text
        ends[piece.row] = piece.finish or ends[piece.row]
    choices: list[dict[str, Any]] = []
    for row, (text, end) in enumerate(zip(texts, ends, strict=True)):
        part = {"message": {"role": "assistant", "content": text}} if job.chat else {"text": text}
        choices.append({"index": row, **part, "logprobs": None, "finish_reason": end})
    kind = "chat.completion" if job.chat else "text_completion"
    return job.document(kind, choices, job.usage(sum(p.tokens for p in pieces)))


async def _events(
    job: _Job, first: Piece, others: AsyncGenerator[Piece, None], with_usage: bool
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of a stream: an event for each token with text, and the end of each text."""
    kind = "chat.completion.chunk" if job.chat else "text_completion"

    def chunk(row: int, text: str, finish: str | None) -> bytes:
        part: dict[str, Any] = {"delta": {"content": text} if text else {}} if job.chat else {"text": text}
        return _event(job.document(kind, [{"index": row, **part, "logprobs": None, "finish_reason": finish}], None))

    generated = 0
    try:
        if job.chat:
            for row in range(job.config.num_return_sequences):
                start = {
                    "index": row,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
                yield _event(job.document(kind, [start], None))
        for row, text in enumerate(job.echo):
            yield chunk(row, text, None)
        async for piece in _chained(first, others):
            generated += piece.tokens
            if piece.text or piece.finish:
                yield chunk(piece.row, piece.text, piece.finish)
        if with_usage:
            yield _event(job.document(kind, [], job.usage(generated)))
        yield b"data: [DONE]\n\n"
    except Exception as error:  # the status is sent already
        known = as_request_error(error)
        yield _event(dict(error_body(known.status, f"{known}")))
    finally:
        await others.aclose()


async def _chained(first: Piece, others: AsyncGenerator[Piece, None]) -> AsyncIterator[Piece]:
    yield first
    async for piece in others:
        yield piece


def _event(document: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(document, separators=(',', ':'))}\n\n".encode()
