"""The models of `e2e.py` in torch, and the contenders that run them. For a Python with torch, transformers, onnxruntime, TVM.

    python -m experiments.end_to_end.peers prepare plain|onnxruntime|tvm MODEL FOLDER [--tiny]      exports; writes the files of a contender
    python -m experiments.end_to_end.peers serve torch-eager|torch-compile|onnxruntime|tvm MODEL FOLDER [--tiny]

`plain` is the program as this project's importer reads it (program.json, weights.npz). FOLDER/minilm names the encoder's weights.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from experiments.harness.contenders import Answer, serve
from experiments.harness.e2e_cases import LARGEST, Array, Decoder, decoder_of, head, inputs

EXPORTED = 16  # the size an export sees; every other is a matter of its symbol
Run = Callable[[Sequence[Array]], Sequence[Array]]


class Encoder(torch.nn.Module):
    """A sentence encoder: ids and mask to a unit vector."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        from transformers import AutoModel

        self.inner = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()

    def forward(self, ids: Any, mask: Any) -> Any:
        hidden = self.inner(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return (F.normalize(pooled, p=2.0, dim=1),)


class Layer(torch.nn.Module):
    def __init__(self, d: Decoder) -> None:
        super().__init__()
        self.d = d
        narrow = d.groups * d.head_size
        self.norm, self.norm2 = torch.nn.RMSNorm(d.width, 1e-6), torch.nn.RMSNorm(d.width, 1e-6)
        self.q, self.o = (torch.nn.Linear(d.width, d.width, bias=False) for _ in range(2))
        self.k, self.v = (torch.nn.Linear(d.width, narrow, bias=False) for _ in range(2))
        self.gate, self.up = (torch.nn.Linear(d.width, d.inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(d.inner, d.width, bias=False)

    def forward(self, x: Any, cos: Any, sin: Any, past: tuple[Any, Any] | None) -> tuple[Any, Any, Any]:
        """x (1, n, width); cos, sin (n, head_size); past: keys and values so far. Also gives those with the new ones behind."""
        h, n = self.norm(x), x.shape[1]
        q = rotated(self.q(h).view(1, n, self.d.heads, -1).transpose(1, 2), cos, sin)
        k = rotated(self.k(h).view(1, n, self.d.groups, -1).transpose(1, 2), cos, sin)
        v = self.v(h).view(1, n, self.d.groups, -1).transpose(1, 2)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=past is None, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(1, n, self.d.width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h)), k, v


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Llama(torch.nn.Module):
    """ids (1, n), and in decode keys and values of every layer -> logits of the last token, keys and values of every layer."""

    def __init__(self, d: Decoder, cached: bool, positions: int = LARGEST) -> None:
        super().__init__()
        torch.manual_seed(d.seed)
        self.cached = cached
        self.embed = torch.nn.Embedding(d.vocabulary, d.width)
        self.layers = torch.nn.ModuleList([Layer(d) for _ in range(d.layers)])
        self.norm = torch.nn.RMSNorm(d.width, 1e-6)
        self.logits = torch.nn.Linear(d.width, d.vocabulary, bias=False)
        turns = torch.arange(positions + 1)[:, None] * 10000.0 ** -(torch.arange(0, d.head_size, 2) / d.head_size)
        self.register_buffer("cos", torch.cat((turns, turns), -1).cos())
        self.register_buffer("sin", torch.cat((turns, turns), -1).sin())

    def forward(self, ids: Any, *cache: Any) -> Any:
        begin = cache[0].shape[2] if self.cached else 0
        end = begin + ids.shape[1]
        cos, sin = self.cos[begin:end], self.sin[begin:end]
        x, grown = self.embed(ids), []
        for p, layer in enumerate(self.layers):
            x, k, v = layer(x, cos, sin, (cache[2 * p], cache[2 * p + 1]) if self.cached else None)
            grown += [k, v]
        return (self.logits(self.norm(x[:, -1:])), *grown)


def model_of(name: str, folder: Path, decoder: Decoder) -> Any:
    if name == "minilm":
        return Encoder((folder / "minilm").read_text()).eval()
    return Llama(decoder, name == "decode").eval()


def dims(name: str, decoder: Decoder) -> Any:
    """The dynamic dims of every argument, as torch.export wants them."""
    n = torch.export.Dim("past" if name == "decode" else "n", min=1, max=LARGEST)
    cache = ({2: n},) * (2 * decoder.layers)
    return {"minilm": ({1: n}, {1: n}), "prefill": ({1: n},), "decode": (None, cache)}[name]


def example(name: str, decoder: Decoder) -> tuple[Any, ...]:
    return tuple(torch.from_numpy(a) for a in inputs(name, EXPORTED, decoder))


def exported(name: str, model: Any, decoder: Decoder) -> Any:
    with torch.no_grad():
        return torch.export.export(
            model, example(name, decoder), dynamic_shapes=dims(name, decoder), strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )  # fmt: skip


def prepare(kind: str, name: str, folder: Path, decoder: Decoder) -> None:
    model = model_of(name, folder, decoder)
    if kind == "plain":
        from relax_tune.ir.frontend.torch.export import plain_program
        from relax_tune.ir.frontend.torch.program import to_json

        plain = plain_program(exported(name, model, decoder))
        np.savez(folder / "weights.npz", **plain.weights)
        (folder / "program.json").write_text(to_json(plain))
    elif kind == "onnxruntime":
        torch.onnx.export(exported(name, model, decoder), dynamo=True, verbose=False).save(str(folder / "model.onnx"))
    else:
        tvm_build(exported(name, model, decoder), folder)


def tvm_build(program: Any, folder: Path) -> None:
    """TVM's default build of the program, its symbols left as they are, weights inside."""
    import tvm
    from tvm.relax.frontend.torch import from_exported_program

    from experiments.kernels.peer_kernels import tvm_target

    module = from_exported_program(program, keep_params_as_input=False, custom_convert_map={"slice.Tensor": tvm_slice})
    tvm.compile(module, target=tvm_target()).export_library(str(folder / "tvm.so"))


def tvm_slice(node: Any, importer: Any) -> Any:
    """Convert a slice along one axis, with the dims that torch states for its result.

    TVM's conversion gives `min(n, 513)`, cannot prove that it equals the dim of the other operand, and fails to build.
    """
    from tvm import relax, te

    x, axis, begin = importer.env[node.args[0]], node.args[1] % len(node.meta["val"].shape), node.args[2]
    begin = importer.env.get(begin, begin)
    symbols = {}
    for other, value in importer.env.items():
        if other.op == "placeholder" and isinstance(getattr(value.ty, "shape", None), relax.ShapeExpr):
            symbols |= {str(d): e for d, e in zip(other.meta["val"].shape, value.ty.shape.values, strict=True)}
    shape = [eval(str(d), dict(symbols)) for d in node.meta["val"].shape]  # torch prints dims as Python
    if isinstance(begin, int) and begin < 0:
        begin = x.ty.shape.values[axis] + begin

    def rows(t: Any, begin: Any, shape: Any) -> Any:
        return te.compute(shape, lambda *i: t(*i[:axis], i[axis] + begin, *i[axis + 1 :]), "slice")

    return importer.block_builder.emit_te(rows, x, begin, shape)


def runner(kind: str, name: str, folder: Path, decoder: Decoder) -> Run:
    threads = os.cpu_count() or 1
    if kind == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        return lambda arrays: session.run(None, dict(zip(names, arrays, strict=True)))
    if kind == "tvm":
        import tvm
        from tvm import relax

        machine = relax.VirtualMachine(tvm.runtime.load_module(str(folder / "tvm.so")), tvm.cpu())
        return lambda arrays: [t.numpy() for t in machine["main"](*map(tvm.runtime.tensor, arrays))]
    torch.set_num_threads(threads)
    model = model_of(name, folder, decoder)
    call = torch.compile(model, dynamic=True) if kind == "torch-compile" else model

    def run(arrays: Sequence[Array]) -> Sequence[Array]:
        with torch.no_grad():
            return [t.numpy() for t in call(*map(torch.from_numpy, arrays))]

    return run


def answers(kind: str, name: str, folder: Path, decoder: Decoder) -> Answer:
    run = runner(kind, name, folder, decoder)

    def answer(case: str) -> tuple[Callable[[], Any], Callable[[], Sequence[float]]]:
        given = inputs(name, int(case), decoder)
        return lambda: run(given), lambda: head(run(given))

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("prepare", "serve"))
    parser.add_argument("kind")
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    decoder = decoder_of(args.tiny)
    if args.command == "serve":
        serve(answers(args.kind, args.model, args.folder, decoder))
    else:
        prepare(args.kind, args.model, args.folder, decoder)


if __name__ == "__main__":
    main()
