"""A builder of encoders from their specifications: embeddings, layers of attention and feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import Expr, Var, add, const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Constant, GVar, Value
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.activations import ACTIVATIONS
from relax_tune.ir.frontend.hf.decoders.rope import Rope
from relax_tune.ir.frontend.hf.distances import distance_bucket, halves, log_bucket
from relax_tune.ir.frontend.hf.encoder_spec import (
    LOWEST,
    Bottleneck,
    Disentangled,
    EncoderSpec,
    GridBias,
    LayerNames,
    Part,
    Patches,
    Spectrogram,
    Words,
)
from relax_tune.ir.frontend.hf.images.attention import grid_distance
from relax_tune.ir.frontend.hf.patches import embed_patches
from relax_tune.ir.frontend.hf.waves import embed_spectrogram, embed_waves
from relax_tune.ir.frontend.hf.weights import HfWeights
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Permute, Reshape, Slice, Take
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import (
    Add,
    AddScalar,
    Cast,
    Div,
    MaximumScalar,
    Minimum,
    Mul,
    MulScalar,
    Sigmoid,
    Sub,
)
from relax_tune.ir.op.math.logic import NotEqual
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.decoder import RmsNorm, Rotary
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm, Sum
from relax_tune.ir.op.reduction.scan import CumSum

Stage = Callable[["Encoder", GVar], "GVar | tuple[GVar, ...]"]
"""What follows an encoder: from its builder and the value so far to the next value, or to the results."""
Block = tuple[Callable[[GVar], GVar], str, str]


class Encoder:
    """Builder of the graph of one encoder.

    types: token types are an input, else all are 0
    g: builder of the function; batch, positions: names of the symbols of its batch and of the positions of a text
    arrays: weights by name, shared with the builders of other functions
    states: inputs of the layers, then the result of the last, once they are emitted"""

    ids: GVar
    mask: GVar
    dims: tuple[Var, Expr]
    words: Constant

    def __init__(
        self,
        spec: EncoderSpec,
        weights: HfWeights,
        types: bool = False,
        g: GraphBuilder | None = None,
        batch: str = "b",
        positions: str = "n",
        arrays: dict[str, NDArray[Any]] | None = None,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.types = types and isinstance(spec.inputs, Words) and spec.inputs.token_types > 1
        self.g, self.batch, self.positions = g or GraphBuilder(), batch, positions
        self.past: Expr = const(0)
        self._arrays = {} if arrays is None else arrays
        self.hidden_bias: GVar | None = None
        self.seen: GVar | None = None
        self.states: list[GVar] = []
        self._constants: dict[str, Constant] = {}
        self._biases: dict[object, Value | None] = {}

    def constant(self, name: str, make: Callable[[], NDArray[Any]]) -> Constant:
        """Return a constant by name, made on first use."""
        if name not in self._constants:
            if name not in self._arrays:
                self._arrays[name] = make()
            self._constants[name] = self.g.constant(name, self._arrays[name])
        return self._constants[name]

    def weight(self, name: str, *shape: int) -> Constant:
        return self.constant(name, lambda: self.weights.get(name, shape))

    def build(self, b: tuple[int, int | None], n: tuple[int, int | None], stages: Sequence[Stage]) -> IRModule:
        """Build the encoder, followed by `stages`: from this builder and the value so far to the next value."""
        x: Any = self.encode(b, n)
        for stage in stages:
            x = stage(self, x)
        return self.g.finish(x)

    def encode(self, b: tuple[int, int | None], n: tuple[int, int | None]) -> GVar:
        """Emit the inputs and the last hidden state (b, n, hidden)."""
        s = self.spec
        batch = self.g.symbol(self.batch, *b)
        if isinstance(s.inputs, Words):
            x = self.text(batch, n, s.inputs)
        elif isinstance(s.inputs, Spectrogram):
            x = embed_spectrogram(self, batch, s.inputs)
        else:
            x = (
                embed_patches(self, batch, s.inputs)
                if isinstance(s.inputs, Patches)
                else embed_waves(self, batch, n, s.inputs)
            )
        for number in range(len(s.layers)):
            self.states.append(x)
            x = self.layer(x, number)
        self.states.append(x)
        return self.norm(x, s.last_norm) if s.last_norm else x

    def text(self, batch: Var, n: tuple[int, int | None], words: Words) -> GVar:
        """Emit the inputs and embeddings of text."""
        g = self.g
        length, self.longest = g.symbol(self.positions, *n), n[1] or words.positions
        self.dims = batch, length
        self.ids = g.input("input_ids", (batch, length), i64)
        mask = self.mask = g.input("attention_mask", (batch, length), i64)
        types = g.input("token_type_ids", (batch, length), i64) if self.types else None
        seen = g.call(NotEqual(), mask, g.constant("hidden", np.asarray(0, np.int64)), hint="seen")
        self.seen = g.call(ExpandDims((1, 2)), seen)
        return self.embed(words, self.ids, types, length)

    def visible(self, mask: GVar) -> GVar:
        """Return a mask (b, n) as floats."""
        return self.g.call(Cast(f32), mask, hint="visible")

    def mask_bias(self, visible: GVar) -> GVar:
        """Return what is added to scores of columns, (b, 1, 1, n): the most negative finite number where `visible` (b, n) is 0."""
        g = self.g
        bias = g.call(AddScalar(LOWEST), g.call(MulScalar(-LOWEST), visible), hint="mask_bias")
        return g.call(ExpandDims((1, 2)), bias)

    # embeddings

    def embed(self, w: Words, ids: GVar, types: GVar | None, length: Expr) -> GVar:
        g = self.g
        self.words = self.weight(f"{self.stored(w.words)}.weight", w.vocabulary, w.width)
        kinds, width = f"{w.types}.weight", self.spec.hidden if w.trigram else w.width
        row: NDArray[Any] | None = None
        if w.token_types and types is None:
            row = self.weights.get(kinds, (w.token_types, width))[0]
        x = g.call(Take(), self.words, ids)
        if w.dropped is not None:
            x = self.kept(x, ids, w.dropped)
        if w.scale != 1:
            x = g.call(MulScalar(float(np.float32(w.scale))), x)
        if w.norm_before_positions:
            x = self.norm(x, w.norm, width)
        if w.trigram:
            none, one = const(0), const(1)
            wide = g.call(Pad((none, one, none), (none, one, none)), x)
            after, before = (g.call(Slice(1, k, add(k, length)), wide) for k in (const(2), none))
            x = self.linear(g.call(Concat(2), after, x, before), w.project, 3 * w.width, width)
        if types is not None:
            x = g.call(Add(), x, g.call(Take(), self.weight(kinds, w.token_types, width), types))
        if w.table:
            name = f"{w.table.rpartition('.')[0]}.position{'' if row is None else '_and_type_0'}"
            positions = self.constant(name, lambda: self.table(w, width) + (0 if row is None else row))
            x = g.call(Add(), x, self.placed(positions, ids, length, w))
        elif row is not None:
            x = g.call(Add(), x, g.constant("embeddings.type_0", row))
        if w.norm and not w.norm_before_positions:
            x = self.norm(x, w.norm, width)
        return self.linear(x, w.project, w.width, self.spec.hidden) if w.project and not w.trigram else x

    def kept(self, x: GVar, ids: GVar, dropped: int) -> GVar:
        """Zero the embeddings of one token, and scale the others to the share that training kept."""
        g = self.g
        other = g.call(Cast(f32), g.call(NotEqual(), ids, g.constant("dropped", np.asarray(dropped, np.int64))))
        length = g.call(Cast(f32), g.call(Sum((1,)), self.mask))
        gone = g.call(Sum((1,)), g.call(AddScalar(1.0), g.call(MulScalar(-1.0), other)))
        share = g.call(AddScalar(1.0), g.call(MulScalar(-1.0), g.call(Div(), gone, length)))
        factor = g.call(Div(), g.constant("share_of_training", np.asarray(1 - 0.15 * 0.8, np.float32)), share)
        factors = g.call(Mul(), other, g.call(ExpandDims((1,)), factor))
        return g.call(Mul(), x, g.call(ExpandDims((2,)), factors), hint="kept")

    def stored(self, names: str) -> str:
        """Return the first of alternative names `a|b` of a matrix that the file has."""
        known = names.split("|")
        return next((n for n in known if self.weights.has(f"{n}.weight")), known[0])

    def table(self, w: Words, width: int) -> NDArray[Any]:
        """Return the table of positions: read, or computed where the file has none."""
        if w.sinusoids is not None and not self.weights.has(f"{w.table}.weight"):
            return w.sinusoids(w.rows, width)
        return self.weights.get(f"{w.table}.weight", (w.rows, width))

    def placed(self, table: Constant, ids: GVar, length: Expr, w: Words) -> Value:
        """Return the position embeddings of `length` tokens behind `past` ones.

        With a padding token, positions count the other tokens, starting behind the padding row of the table (RoBERTa)."""
        g, past, padding = self.g, self.past, w.padding
        if padding is None:
            start = add(past, const(w.first))
            return g.call(Slice(0, start, add(start, length)), table)
        other = g.call(
            Cast(i64), g.call(NotEqual(), ids, self.constant("padding", lambda: np.asarray(padding, np.int64)))
        )
        count = g.call(CumSum(1), other)
        if past is not const(0):
            before = g.call(Slice(0, past, add(past, const(1))), g.call(Iota(add(past, const(1)))), hint="before")
            count = g.call(Add(), count, before)
        return g.call(Take(), table, g.call(AddScalar(padding), g.call(Mul(), count, other), hint="positions"))

    # products and norms

    def norm(self, x: GVar, name: str, width: int | None = None) -> GVar:
        s, width = self.spec, width or self.spec.hidden
        gamma = self.weight(f"{name}.weight", width)
        if s.norm == "rms_norm":
            return self.g.call(RmsNorm(s.eps), x, gamma)
        if s.norm == "affine":
            return self.g.call(Add(), self.g.call(Mul(), x, gamma), self.weight(f"{name}.bias", width))
        if "norm" in s.unbiased:
            beta = self.constant(f"{name}.bias", lambda: np.zeros(width, np.float32))
        else:
            beta = self.weight(f"{name}.bias", width)
        return self.g.call(LayerNorm(s.eps), x, gamma, beta)

    def linear(
        self, x: GVar, name: str, width: int, out: int, biased: bool = True, order: NDArray[Any] | None = None
    ) -> GVar:
        """Emit `x @ W.T + bias` with weights of the encoder."""
        return self.dense(x, self.weights, name, width, out, biased, inner=True, order=order)

    def dense(
        self,
        x: GVar,
        weights: HfWeights,
        name: str,
        width: int,
        out: int,
        biased: bool = True,
        folder: str = "",
        inner: bool = False,
        hint: str | None = None,
        order: NDArray[Any] | None = None,
    ) -> GVar:
        """Emit `x @ W.T + bias`; the file holds W as (out, in), the graph as (in, out).

        name: `name#1/3` is the second of three equal parts of the rows
        folder: of the weights, for their names in the graph. inner: they are the encoder's, under its prefix
        order: of the results, in terms of the rows in the file"""
        kept = f"{folder}.{name}" if folder else name
        stored, _, part = name.partition("#")
        number, _, parts = part.partition("/")
        rows, first = out * int(parts or 1), out * int(number or 0)

        def read(what: str, *shape: int) -> NDArray[Any]:
            found = weights.get(f"{stored}.{what}", (rows, *shape), inner)[first : first + out]
            return found if order is None else found[order]

        w = self.constant(f"{kept}.weight", lambda: np.ascontiguousarray(read("weight", width).T))
        if not biased:
            return self.g.call(Matmul(), x, w, hint=hint)
        bias = self.constant(f"{kept}.bias", lambda: read("bias"))
        return self.g.call(Add(), self.g.call(Matmul(), x, w), bias, hint=hint)

    # layers

    def layer(self, x: GVar, number: int) -> GVar:
        g, s = self.g, self.spec
        path = s.layers[number]
        if s.bottleneck is not None:
            return self.narrow(x, number, s.bottleneck)
        for block, norm, scale in self.blocks(number):
            y = block(self.norm(x, f"{path}.{norm}") if s.norm_first and norm else x)
            x = g.call(Add(), self.scaled(y, path, scale) if s.norm_first else y, x)
            x = x if s.norm_first else self.norm(x, f"{path}.{norm}")
        return x

    def blocks(self, number: int) -> list[Block]:
        """Return the blocks of a layer, each with the names of its norm and of the factor of its result."""
        s = self.spec
        path, names = s.layers[number], s.names
        middle = "" if s.bare_first and number == 0 else names.middle_norm
        return [
            (lambda x: self.attention(x, number), middle, names.middle_scale),
            (lambda x: self.feed_forward(x, path), names.last_norm, names.last_scale),
        ]

    def narrow(self, x: GVar, number: int, b: Bottleneck) -> GVar:
        """Emit a layer between a product that narrows and one that widens (Sun et al. 2020, figure 1)."""
        g, s, path = self.g, self.spec, self.spec.layers[number]

        def narrowed(name: str) -> GVar:
            y = self.linear(x, f"{path}.bottleneck.{name}.dense", s.hidden, b.width)
            return self.norm(y, f"{path}.bottleneck.{name}.LayerNorm", b.width)

        def added(y: GVar, other: GVar, name: str, width: int) -> GVar:
            return self.norm(g.call(Add(), y, other), f"{path}.{name}.LayerNorm", width)

        y = added(self.attention(narrowed("attention"), number, x), narrowed("input"), "attention.output", b.width)
        for block in (*(f"ffn.{k}." for k in range(b.blocks - 1)), ""):
            y = added(self.feed_forward(y, f"{path}.{block}".rstrip(".")), y, f"{block}output", b.width)
        return added(
            self.linear(y, f"{path}.output.bottleneck.dense", b.width, s.hidden), x, "output.bottleneck", s.hidden
        )

    def scaled(self, x: GVar, path: str, name: str) -> GVar:
        """Scale the result of a block (LayerScale; Touvron et al. 2021), if the family does."""
        return self.g.call(Mul(), x, self.weight(f"{path}.{name}", self.spec.hidden)) if name else x

    def part(self, x: GVar, path: str, part: Part, width: int, out: int, names: LayerNames | None = None) -> GVar:
        """Emit one of the products of a layer."""
        s = self.spec
        order = halves(s.heads, s.size) if s.interleaved and part in ("query", "key") else None
        return self.linear(x, f"{path}.{getattr(names or s.names, part)}", width, out, part not in s.unbiased, order)

    def attention(self, x: GVar, number: int, wide_side: GVar | None = None) -> GVar:
        """Emit attention. wide_side: of a narrow layer, where values come from."""
        s, path = self.spec, self.spec.layers[number]
        narrow = s.bottleneck.width if s.bottleneck is not None else s.hidden
        source, width = (x, narrow) if wide_side is None else (wide_side, s.hidden)
        groups = s.groups or s.heads
        q, k = self.heads(x, number, "query", s.heads, narrow), self.heads(x, number, "key", groups, narrow)
        k, v = self.remembered(number, k, self.heads(source, number, "value", groups, width))
        bias = self.bias(number)
        if s.buckets is not None and s.buckets.gate:
            bias = self.gated(x, f"{path}.{s.buckets.gate}", bias)
        if s.disentangled is not None:
            bias = self.disentangled(s.disentangled, q, k, bias, path)
        return self.attended(q, k, v, bias, f"{path}.{s.names.out}", narrow, s.causal)

    def heads(self, x: GVar, number: int, part: Part, count: int, width: int, names: LayerNames | None = None) -> GVar:
        """Emit the queries, keys or values of a layer: (b, count, positions, size). width: of `x`"""
        g, s = self.g, self.spec
        y = self.part(x, s.layers[number], part, width, count * s.size, names)
        y = g.call(Permute((0, 2, 1, 3)), g.call(Reshape((*self.dims, const(count), const(s.size))), y), hint=part)
        return self.rotated(y, s.thetas[number]) if s.thetas and part != "value" else y

    def remembered(self, number: int, key: GVar, value: GVar) -> tuple[GVar, GVar]:
        """Return the keys and values that a layer attends to."""
        return key, value

    def attended(self, q: GVar, k: GVar, v: GVar, bias: Value | None, out: str, width: int, causal: bool) -> GVar:
        """Emit attention and the product `out` of its results, of `width`."""
        g, s = self.g, self.spec
        scale = float(s.size**-0.5) if s.scale is None else s.scale
        hides = bias is not None and bias is self.seen
        operator = Attention(scale, causal=causal, offset=self.past if causal else const(0), hides_rows=hides)
        seen = g.call(operator, q, k, v, *(() if bias is None else (bias,)))
        context = g.call(Permute((0, 2, 1, 3)), seen, hint="context")
        context = g.call(Reshape((*self.dims, const(s.heads * s.size))), context)
        return self.linear(context, out, s.heads * s.size, width, "out" not in s.unbiased)

    def feed_forward(self, x: GVar, path: str) -> GVar:
        g, s = self.g, self.spec
        width = s.bottleneck.width if s.bottleneck is not None else s.hidden
        inner = ACTIVATIONS[s.activation](g, self.part(x, path, "inner", width, s.inner))
        if s.names.gate:
            inner = g.call(Mul(), inner, self.part(x, path, "gate", width, s.inner))
        return self.part(inner, path, "outer", s.inner, width)

    def rotated(self, x: GVar, theta: float) -> GVar:
        """Rotate queries or keys (b, heads, n, size) by their positions."""
        cos = self.constant(f"rotary_cos_{theta:g}", lambda: self.waves("cos", theta))
        sin = self.constant(f"rotary_sin_{theta:g}", lambda: self.waves("sin", theta))
        return self.g.call(Rotary(const(0), 2), x, cos, sin)

    def waves(self, name: str, theta: float) -> NDArray[Any]:
        """Return the cosines or sines of all positions: read, sines first, or computed where the file has none."""
        size, table = self.spec.size, self.spec.rotary_table
        if isinstance(w := self.spec.inputs, Words) and table and self.weights.has(table):
            return np.split(self.weights.get(table, (w.positions, size)), 2, 1)[name == "cos"][: self.longest]
        return Rope(theta, size).table(getattr(np, name), self.longest, size)

    def disentangled(self, d: Disentangled, q: GVar, k: GVar, bias: Value | None, path: str) -> Value:
        """Add the scores between contents and relative positions (He et al. 2021, equation 4) to a bias."""
        g, s, length = self.g, self.spec, self.dims[1]
        table = self.weights.get(d.table, (2 * d.span, s.hidden))
        if d.norm:
            gamma, beta = (self.weights.get(f"{d.norm}.{what}", (s.hidden,)) for what in ("weight", "bias"))
            table = LayerNorm(s.eps).evaluate([table, gamma, beta])
        reach = np.arange(1 - self.longest, self.longest)
        # columns before a row have negative distances, and positive relative positions
        near = np.clip(log_bucket(-reach, d.span, d.furthest) + d.span, 0, 2 * d.span - 1)
        place = self.by_distance("relative_position", near[:, None])
        for way, rows, name in (("c2p", q, d.key), ("p2c", k, d.query)):
            if way not in d.ways:
                continue

            def made(name: str = name) -> NDArray[Any]:
                weight = self.weights.get(f"{path}.{name}.weight", (s.heads * s.size, s.hidden))
                product = table @ weight.T + self.weights.get(f"{path}.{name}.bias", (s.heads * s.size,))
                return np.ascontiguousarray(product.reshape(-1, s.heads, s.size).transpose(1, 2, 0))

            scores = g.call(Matmul(), rows, self.constant(f"{path}.{name}.{way}", made), hint=way)
            where = place if way == "c2p" else g.call(Permute((0, 2, 1)), place)
            where = g.call(BroadcastTo((self.dims[0], const(s.heads), length, length)), where)
            found = g.call(GatherElements(3), scores, where)
            found = found if way == "c2p" else g.call(Permute((0, 1, 3, 2)), found)
            found = g.call(MulScalar(s.scale or 1.0), found)
            bias = found if bias is None else g.call(Add(), found, bias)
        assert bias is not None
        return bias

    def gated(self, x: GVar, path: str, bias: Value | None) -> GVar:
        """Scale the biases of each row by a gate of its heads (Chi et al. 2022, WavLM), and hide padding."""
        g, s = self.g, self.spec
        assert bias is not None
        rows = g.call(Reshape((*self.dims, const(s.heads), const(s.size))), x)
        # the four parts of a gate are summed, which is a product with the sums of their rows
        weight, shift = (
            self.weights.get(f"{path}_linear.weight", (8, s.size)),
            self.weights.get(f"{path}_linear.bias", (8,)),
        )
        w = self.constant(f"{path}.weight", lambda: np.ascontiguousarray(weight.reshape(2, 4, s.size).sum(1).T))
        gates = g.call(Matmul(), g.call(Permute((0, 2, 1, 3)), rows), w)
        gates = g.call(Add(), gates, self.constant(f"{path}.bias", lambda: shift.reshape(2, 4).sum(1)))
        first, second = (g.call(Slice(3, const(k), const(k + 1)), g.call(Sigmoid(), gates)) for k in (0, 1))
        factor = self.constant(f"{path}_const", lambda: self.weights.get(f"{path}_const", (1, s.heads, 1, 1)))
        gate = g.call(Mul(), first, g.call(AddScalar(-1.0), g.call(Mul(), second, factor)))
        found = g.call(Mul(), g.call(AddScalar(2.0), gate), bias, hint="gated_bias")
        return found if self.hidden_bias is None else g.call(Add(), found, self.hidden_bias)

    def bias(self, number: int) -> Value | None:
        """Return what is added to the scores of a layer: (b or 1, heads or 1, n or 1, n)."""
        s = self.spec
        window = s.windows[number] if s.windows else None
        own = s.grid_bias is not None or (s.buckets is not None and s.buckets.each_layer)
        key = (window, s.layers[number] if own else "")
        if key not in self._biases:
            self._biases[key] = self._bias(window, s.layers[number])
        return self._biases[key]

    def _bias(self, window: int | None, path: str) -> Value | None:
        g, s, buckets = self.g, self.spec, self.spec.buckets
        if self.seen is not None:
            if (window, buckets, s.grid_bias, s.disentangled) == (None,) * 4:
                return self.seen
            self.hidden_bias = self.hidden_bias or self.mask_bias(self.visible(self.mask))
        found: Value | None = self.hidden_bias
        if window is not None:
            near = np.zeros((2 * window + 3, 1), np.float32)
            near[[0, -1]] = LOWEST
            seen = self.by_distance(f"window_{window}", near)
            found = seen if found is None else g.call(Minimum(), found, seen)
        if self.spec.grid_bias is not None:
            found = self.grid_bias(path, self.spec.grid_bias)
        if buckets is not None:
            name = f"{path}.{buckets.table}" if buckets.each_layer else buckets.table
            stored = self.weights.get(f"{name}.weight", (buckets.count, self.spec.heads))
            reach = np.arange(-buckets.furthest, buckets.furthest + 1)
            table = stored[distance_bucket(reach, buckets.count, buckets.furthest, buckets.behind)]
            biases = self.by_distance(f"{name}.by_distance", table)
            found = biases if found is None or buckets.gate else g.call(Add(), found, biases)
        return found

    def grid_bias(self, path: str, b: GridBias) -> Value:
        """Return the biases of patches and of the token before them: (heads, n, n)."""
        p, heads = self.spec.inputs, self.spec.heads
        assert isinstance(p, Patches)
        rows, columns = p.grid
        count = (2 * rows - 1) * (2 * columns - 1) + 3
        place = np.full((p.positions, p.positions), count - 3)  # from the token to a patch
        place[:, 0], place[0, 0], place[1:, 1:] = count - 2, count - 1, grid_distance(rows, columns)
        names = [name for name in (b.shared, f"{path}.{b.own}" if b.own else "") if name]
        tables = [self.weights.get(f"{name}.relative_position_bias_table", (count, heads)) for name in names]
        table = np.asarray(np.sum(tables, axis=0), np.float32)
        return self.constant(f"{path}.bias", lambda: np.ascontiguousarray(table[place].transpose(2, 0, 1)))

    def by_distance(self, name: str, table: NDArray[Any]) -> GVar:
        """Read rows of a table (2 r + 1, k) by the distances -r .. r of columns from rows: (k, n, past + n).

        Further away counts the outermost row."""
        g, rows, past, total = self.g, len(table), self.past, add(self.past, self.dims[1])
        columns = g.call(Iota(total), hint="columns")
        own = columns if past is const(0) else g.call(Slice(0, past, total), columns)
        distance = g.call(Sub(), g.call(ExpandDims((0,)), columns), g.call(ExpandDims((1,)), own), hint="distance")
        place = g.call(MaximumScalar(0), g.call(AddScalar((rows - 1) // 2), distance))
        last = self.constant(f"last_of_{rows}", lambda: np.asarray(rows - 1, np.int64))
        chosen = g.call(Take(), self.constant(name, lambda: table), g.call(Minimum(), place, last))
        return g.call(Permute((2, 0, 1)), chosen, hint="by_distance")
