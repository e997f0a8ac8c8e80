"""The decoder of `streams.py` as an OpenVINO model with stateful caches, in the form that openvino-genai turns into paged attention.

The operators are those that optimum-intel's export of a Llama has. Needs openvino; the weights come from `decoder_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.decoder_folder import decoder_weights, write_folder
from experiments.harness.e2e_cases import Array, Decoder

EPSILON, THETA = 1e-6, 10000.0


class _Graph:
    """Emits the layers of the decoder as operators of OpenVINO."""

    def __init__(self, d: Decoder, weights: Mapping[str, Array]) -> None:
        from openvino import opset6, opset13

        self.d, self.weights, self.op, self.states = d, weights, opset13, opset6
        self.assigns: list[Any] = []
        self.ids = opset13.parameter([-1, -1], np.int64, name="input_ids")
        self.mask = opset13.parameter([-1, -1], np.int64, name="attention_mask")
        self.places = opset13.parameter([-1, -1], np.int64, name="position_ids")
        self.beams = opset13.parameter([-1], np.int32, name="beam_idx")
        self.cos, self.sin = self._rotations()
        self.visible = self._visible()

    def integers(self, *values: int) -> Any:
        return self.op.constant(np.array(values, np.int64))

    def linear(self, x: Any, name: str) -> Any:
        return self.op.matmul(x, self.op.constant(self.weights[f"{name}.weight"], name=f"{name}.weight"), False, True)

    def norm(self, x: Any, name: str) -> Any:
        op = self.op
        mean = op.reduce_mean(op.power(x, op.constant(np.float32(2))), self.integers(-1), True)
        scale = op.divide(op.constant(np.float32(1)), op.sqrt(op.add(mean, op.constant(np.float32(EPSILON)))))
        return op.multiply(op.constant(self.weights[f"{name}.weight"]), op.multiply(x, scale))

    def _rotations(self) -> tuple[Any, Any]:
        """Return cosines and sines of the tokens' angles, (batch, 1, tokens, size of a head)."""
        op, size = self.op, self.d.head_size
        steps = (THETA ** (-np.arange(0, size, 2) / size)).astype(np.float32)
        angles = op.multiply(
            op.unsqueeze(op.convert(self.places, "f32"), self.integers(2)), op.constant(steps[None, None])
        )
        both = op.unsqueeze(op.concat([angles, angles], -1), self.integers(1))
        return op.cos(both), op.sin(both)

    def _visible(self) -> Any:
        """Return which positions a token sees, (batch, 1, tokens, positions)."""
        op, zero = self.op, op_scalar(self.op, 0)
        count = op.gather(op.shape_of(self.mask), op_scalar(op, 1), zero)
        columns = op.unsqueeze(op.range(zero, count, op_scalar(op, 1), "i64"), self.integers(0, 1, 2))
        return op.less_equal(columns, op.unsqueeze(self.places, self.integers(1, 3)))

    def rotated(self, x: Any) -> Any:
        op, half = self.op, self.d.head_size // 2
        first = op.slice(x, self.integers(0), self.integers(half), self.integers(1), self.integers(3))
        last = op.slice(x, self.integers(half), self.integers(2**31 - 1), self.integers(1), self.integers(3))
        turned = op.concat([op.multiply(last, op.constant(np.float32(-1))), first], -1)
        return op.add(op.multiply(x, self.cos), op.multiply(turned, self.sin))

    def heads(self, x: Any, name: str, count: int) -> Any:
        split = self.op.reshape(self.linear(x, name), self.integers(0, 0, count, self.d.head_size), True)
        return self.op.transpose(split, self.integers(0, 2, 1, 3))

    def cached(self, new: Any, name: str) -> Any:
        """Append to a state; return all positions, each key head as often as query heads read it."""
        op, d = self.op, self.d
        shape = (1, d.groups, 0, d.head_size)
        rows = op.gather(op.shape_of(self.ids), self.integers(0), op_scalar(op, 0))
        empty = op.broadcast(op.constant(np.float32(0)), op.concat([rows, self.integers(*shape[1:])], 0))
        past = self.states.read_value(empty, name, np.float32, [-1, d.groups, -1, d.head_size])
        whole = op.concat([op.gather(past, self.beams, op_scalar(op, 0)), new], 2)
        self.assigns.append(self.states.assign(whole, name))
        repeats = self.integers(1, 1, d.heads // d.groups, 1, 1)
        repeated = op.broadcast(op.unsqueeze(whole, self.integers(2)), repeats, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(repeated, self.integers(0, d.heads, -1, d.head_size), True)

    def layer(self, x: Any, number: int) -> Any:
        op, d, own = self.op, self.d, f"model.layers.{number}"
        y = self.norm(x, f"{own}.input_layernorm")
        q = self.rotated(self.heads(y, f"{own}.self_attn.q_proj", d.heads))
        k = self.cached(
            self.rotated(self.heads(y, f"{own}.self_attn.k_proj", d.groups)), f"past_key_values.{number}.key"
        )
        v = self.cached(self.heads(y, f"{own}.self_attn.v_proj", d.groups), f"past_key_values.{number}.value")
        y = op.transpose(op.scaled_dot_product_attention(q, k, v, self.visible), self.integers(0, 2, 1, 3))
        y = op.reshape(y, self.integers(0, 0, d.heads * d.head_size), True)
        x = op.add(x, self.linear(y, f"{own}.self_attn.o_proj"))
        y = self.norm(x, f"{own}.post_attention_layernorm")
        gated = op.multiply(op.swish(self.linear(y, f"{own}.mlp.gate_proj")), self.linear(y, f"{own}.mlp.up_proj"))
        return op.add(x, self.linear(gated, f"{own}.mlp.down_proj"))

    def model(self) -> Any:
        from openvino import Model

        table = self.op.constant(self.weights["model.embed_tokens.weight"])
        x = self.op.gather(table, self.op.convert(self.ids, "i32"), op_scalar(self.op, 0))
        for number in range(self.d.layers):
            x = self.layer(x, number)
        result = self.op.result(self.linear(self.norm(x, "model.norm"), "lm_head"))
        inputs = [self.ids, self.mask, self.places, self.beams]
        for one in inputs:
            one.output(0).tensor.set_names({one.friendly_name})
        result.output(0).tensor.set_names({"logits"})
        return Model([result], self.assigns, inputs, "decoder")


def op_scalar(op: Any, value: int) -> Any:
    return op.constant(np.int64(value))


def write_openvino(folder: Path, d: Decoder, positions: int) -> None:
    """Write the decoder as openvino-genai reads it: `openvino_model.xml` beside `config.json`."""
    import openvino

    write_folder(folder, d, positions)
    openvino.save_model(_Graph(d, decoder_weights(d)).model(), folder / "openvino_model.xml", compress_to_fp16=False)
