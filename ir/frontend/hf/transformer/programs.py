"""Programs of transformers: `main` of an encoder; `prefill` and `decode` of a decoder, or `step`; `encode` too of an encoder-decoder.

Tests: `tests/ir/frontend/hf/families/test_decoders.py`, `tests/ir/frontend/hf/families/test_encoder_decoders.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import DType, f32, i64
from relax_tune.ir.core.expr import Expr, const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.transformer.attention import Paged, Pair
from relax_tune.ir.frontend.hf.transformer.inputs import Sound, Words
from relax_tune.ir.frontend.hf.transformer.parameters import Below, Parameters, Weights
from relax_tune.ir.frontend.hf.transformer.rope import for_lengths
from relax_tune.ir.frontend.hf.transformer.spec import EncoderDecoder, Stack
from relax_tune.ir.frontend.hf.transformer.stack import Bounds, StackEmitter
from relax_tune.ir.frontend.shared.finish import with_result_names
from relax_tune.ir.op.indexing.movement import Reshape
from relax_tune.ir.op.math.elementwise import Cast

LONGEST = 1 << 20  # positions of a computed table
STEP = "step"  # the function of a decoder with paged caches
Range = tuple[int, int]
Stage = Callable[[StackEmitter, GVar], "GVar | tuple[GVar, ...]"]
"""A part that follows an encoder: maps the value so far to the next value, or to the results."""


def encoder_module(
    stack: Stack,
    weights: Weights,
    b: Bounds,
    n: Bounds | None,
    stages: Sequence[Stage],
    typed: bool = False,
    length: str = "n",
    names: Sequence[str] = (),
) -> IRModule:
    """Build `main`, an encoder followed by `stages`.

    Args:
        b, n: bounds of the batch, and of the positions of a text or the samples of sound
        typed: token types are an input
        length: name of the symbol of positions
        names: names of the results
    """
    e = StackEmitter(stack, Parameters.of(weights, stack.names), GraphBuilder())
    x: Any = e.encode(b, n, length=length, typed=typed)
    for stage in stages:
        x = stage(e, x)
    return with_result_names(e.g.finish(x), x if isinstance(x, tuple) else (x,), names)


def decoder_module(
    stack: Stack, weights: Weights, b: Bounds, n: Range, m: Range, every_position: bool = False, stored: DType = f32
) -> IRModule:
    """Build `prefill` and `decode`, as `hf.folder` describes them.

    Args:
        b, n, m: bounds of the batch, of the positions of a prompt and of past positions
        every_position: `prefill` gives the logits of every position
        stored: type of cached keys and values

    Raises:
        UserError: for more positions than tables may have, or lengths that need different rotations.
    """
    longest = max(n[1], m[1] + 1)
    if longest > LONGEST:
        raise UserError(
            f"bound of positions: expected at most {LONGEST}, the rows of a table, got {longest}; lower the bound"
        )
    # Two functions share one rotation, so it must hold for the lengths of both.
    shortest = min(n[0], m[0] + 1)
    stack = stack.with_layers(lambda _, x: replace(x, rope=x.rope and for_lengths(x.rope, shortest, longest)))
    model = _Generator(stack, Parameters.of(weights, stack.names), stored, longest)
    first = model.step(None, "prefill", b, n, None, every_position)
    return model.step(first, "decode", b, (1, 1), m)


def paged_module(
    stack: Stack, weights: Weights, t: Range, r: Range, w: Range, p: Range, block: int, stored: DType = f32
) -> IRModule:
    """Build `step`, as `hf.folder` describes it.

    Args:
        t, r, w, p: bounds of the tokens of a step, of texts, of the blocks of a text and of a pool
        block: positions of a block
        stored: type of the keys and values in pools

    Raises:
        UserError: for a model with other state than keys and values, or biases by position.
    """
    _check_paged(stack)
    longest = w[1] * block
    stack = stack.with_layers(lambda _, x: replace(x, rope=x.rope and for_lengths(x.rope, 1, longest)))
    g = GraphBuilder(STEP)
    tokens, texts, width, blocks = (g.symbol(n, *of) for n, of in zip("trwp", (t, r, w, p)))
    ids, requests, positions = (g.input(n, (tokens,), i64) for n in ("input_ids", "requests", "positions"))
    last, tables = g.input("last", (texts,), i64), g.input("tables", (texts, width), i64)
    dims = blocks, const(block), const(stack.groups), const(stack.size)
    pools = {
        i: (g.input(f"key_pool_{i}", dims, stored), g.input(f"value_pool_{i}", dims, stored))
        for i, layer in enumerate(stack.layers)
        if layer.shares is None
    }
    paged = Paged(pools, tables, requests, positions)
    e = StackEmitter(stack, Parameters.of(weights, stack.names), g, positions=longest, stored=stored, paged=paged)
    e.dims = const(1), tokens
    return g.finish(e.generate(g.call(Reshape(e.dims), ids), False, last))


def _check_paged(stack: Stack) -> None:
    """Raise UserError for a stack that pools of keys and values do not suffice for."""
    words = stack.words
    reasons = {
        "layers with another state than keys and values": any(
            x.state_space is not None or not x.attends for x in stack.layers
        ),
        "biases of attention by position": stack.position_bias is not None,
        "several hidden states": stack.altup is not None,
        "positions that depend on padding": words.padding is not None or words.trigram or words.dropped is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UserError(
                f"kv_cache: expected a decoder of plain attention for paged caches, got {reason}; leave it out"
            )


def encoder_decoder_module(
    model: EncoderDecoder,
    weights: Weights,
    b: Bounds,
    s: Range,
    n: Range,
    m: Range,
    every_position: bool = False,
    stored: DType = f32,
) -> IRModule:
    """Build `encode`, `prefill` and `decode`, as `hf.folder` describes them.

    Args:
        s: bounds of the positions of a source; others as in `decoder_module`
    """
    if model.separate:
        parameters = Parameters.of(Below(weights, "decoder."), model.decoder.names, "decoder.")
        below = Below(weights, "encoder.")
        reader = Parameters.of(below, model.encoder.names, "encoder.", parameters.arrays)
    else:
        parameters = reader = Parameters.of(weights, model.decoder.names)
    link = Parameters(weights, arrays=parameters.arrays) if model.projected else None
    generator = _Generator(model.decoder, parameters, stored, 0, model.encoder, reader, link, model.projected)
    first = generator.encode(b, s)
    second = generator.step(first, "prefill", b, n, None, every_position)
    return generator.step(second, "decode", b, (1, 1), m)


@dataclass(frozen=True, slots=True)
class _Generator:
    """Builder of the functions of a model that generates; they share its parameters.

    Attributes:
        positions: largest number of positions
        encoder, reader: stack that reads a source, and its parameters
        link, projected: parameters and name of the projection of its results, if there is one
    """

    stack: Stack
    parameters: Parameters
    stored: DType
    positions: int
    encoder: Stack | None = None
    reader: Parameters | None = None
    link: Parameters | None = None
    projected: str = ""

    def encode(self, b: Bounds, s: Range) -> IRModule:
        """Build `encode`: the mask of frames of a sound, and the keys and values of every layer's cross-attention."""
        assert self.encoder is not None and self.reader is not None
        g = GraphBuilder("encode")
        encoder = StackEmitter(self.encoder, self.reader, g)
        hidden, width = encoder.encode(b, s, length="s"), self.encoder.out
        if self.link is not None:
            hidden, width = (
                encoder.dense(hidden, self.projected, width, self.stack.hidden, parameters=self.link),
                self.stack.hidden,
            )
        decoder = StackEmitter(self.stack, self.parameters, g, stored=self.stored)
        decoder.dims = encoder.dims
        results = [encoder.mask] if self.masks_frames else []
        results += [
            decoder.heads(hidden, number, part, width, cross=True)
            for number in range(len(self.stack.layers))
            for part in ("key", "value")
        ]
        return g.finish(results)

    @property
    def masks_frames(self) -> bool:
        """Whether `encode` gives a mask of the frames of a sound, which the decoder takes."""
        return self.encoder is not None and isinstance(self.encoder.embedding, Sound) and self.encoder.embedding.masked

    def step(
        self, module: IRModule | None, name: str, b: Bounds, n: Range, m: Range | None, every_position: bool = False
    ) -> IRModule:
        """Add a function of new positions to the functions so far.

        Args:
            n, m: bounds of new positions and of past ones, if any
        """
        g, read = GraphBuilder(name), None if self.encoder is None else self.encoder.embedding
        sources = {"b", "s"} if isinstance(read, Words) else {"b", "f"} if isinstance(read, Sound) else {"b"}
        known = {x.var.name: x for x in module.bounds} if module is not None else {}
        if module is not None:
            # The functions share the symbols of the batch and of the source, so that a caller cannot mix results of
            # other sizes.
            shared = tuple(x for x in module.bounds if x.var.name in sources)
            g.include(replace(module, functions={}, constants={}, bounds=shared))
        batch = known["b"].var if known else g.symbol("b", *b)
        past: Expr = const(0) if m is None or not self.stack.attends else g.symbol("m", *m)
        length: Expr = g.symbol("n", *n) if m is None else const(1)
        ids = g.input("input_ids", (batch, length), i64)
        mask, cross = None, None
        if self.encoder is not None and module is not None:
            source: Expr
            if isinstance(read, Words):
                source = known["s"].var
            elif isinstance(read, Sound):
                samples = known["s"]
                most = None if samples.upper is None else read.frames(samples.upper)
                source = known["f"].var if "f" in known else g.symbol("f", read.frames(samples.lower), most)
            else:
                source = const(self.encoder.positions)
            if isinstance(read, Words):
                mask = g.input("attention_mask", (batch, source), i64)
            elif self.masks_frames:
                mask = g.input("frame_mask", (batch, source), i64)
            cross = [self._pair(g, "cross", i, batch, source) for i in range(len(self.stack.layers))]
        cache, states = (None, None) if m is None else self._past(g, batch, past)
        e = StackEmitter(self.stack, self.parameters, g, past, self.positions, self.stored, cache, cross, states)
        e.dims = batch, length
        if mask is not None:
            e.cross_bias = e.mask_bias(g.call(Cast(f32), mask, hint="visible"))
        results = e.generate(ids, every_position)
        if module is None:
            return g.finish(results)
        g.include(replace(module, functions={}))
        built = g.finish(results)
        return replace(built, functions={**module.functions, **built.functions})

    def _past(
        self, g: GraphBuilder, batch: Expr, past: Expr
    ) -> tuple[list[Pair | None], list[tuple[GVar, ...] | None]]:
        """Declare the inputs that the layers left: keys and values, and states."""
        cache, states = list[Pair | None](), list[tuple[GVar, ...] | None]()
        for i, layer in enumerate(self.stack.layers):
            cache.append(self._pair(g, "past", i, batch, past) if layer.attends and layer.shares is None else None)
            m = layer.state_space
            if m is None:
                states.append(None)
                continue
            states.append(
                tuple(g.input(f"past_{name}_{i}", (batch, *map(const, dims))) for name, dims in m.states.items())
            )
        return cache, states

    def _pair(self, g: GraphBuilder, kind: str, number: int, batch: Expr, positions: Expr) -> Pair:
        """Declare the inputs `KIND_key_I` and `KIND_value_I` of a layer."""
        dims = (batch, const(self.stack.groups), positions, const(self.stack.size))
        key, value = (g.input(f"{kind}_{part}_{number}", dims, self.stored) for part in ("key", "value"))
        return key, value
