"""The models of `whole_models.py` in torch, with random weights, and the contenders that run them. For a Python with torch.

python -m experiments.end_to_end.whole_model_peers prepare plain|onnxruntime MODEL FOLDER
python -m experiments.end_to_end.whole_model_peers serve torch-eager|torch-compile|onnxruntime MODEL FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from experiments.end_to_end.whole_models import CASES
from experiments.harness.contenders import serve
from experiments.harness.e2e_cases import head


class Residual(nn.Module):
    """A residual block (He et al. 2016)."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
            nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b),
        )  # fmt: skip
        self.side = (
            nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b)) if a != b else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.side(x))


def cnn() -> nn.Module:
    """ResNet-18's blocks, a quarter of its area: images of 96 x 96."""
    widths, parts, last = (64, 128, 256, 512), list[nn.Module](), 64
    for k, width in enumerate(widths):
        parts += [Residual(last, width, 1 if k == 0 else 2), Residual(width, width, 1)]
        last = width
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class UNet(nn.Module):
    """A U-Net of three levels with group norms, as diffusion models use (Ho et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        block = lambda a, b: nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1),
            nn.GroupNorm(8, b),
            nn.SiLU(),
            nn.Conv2d(b, b, 3, padding=1),
            nn.GroupNorm(8, b),
            nn.SiLU(),
        )
        self.first, self.second, self.deep = block(3, 32), block(32, 64), block(64, 128)
        self.up2, self.up1, self.head = block(192, 64), block(96, 32), nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(F.avg_pool2d(a, 2))
        c = self.deep(F.avg_pool2d(b, 2))
        b = self.up2(torch.cat((F.interpolate(c, scale_factor=2.0, mode="nearest"), b), 1))
        return self.head(self.up1(torch.cat((F.interpolate(b, scale_factor=2.0, mode="nearest"), a), 1)))


class Attend(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, causal: bool = False) -> Tensor:
        apart = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(apart(self.q(x)), apart(self.k(y)), apart(self.v(y)), is_causal=causal)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A transformer's layer with norms first; across: it attends to another sequence too."""

    def __init__(self, width: int, heads: int, across: bool) -> None:
        super().__init__()
        self.own, self.other = Attend(width, heads), Attend(width, heads) if across else None
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3 if across else 2)])
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.norms[0](x)
        x = x + self.own(h, h, self.other is not None)
        if self.other is not None and y is not None:
            x = x + self.other(self.norms[2](x), y)
        return x + self.back(F.gelu(self.wide(self.norms[1](x))))


class Speech(nn.Module):
    """Frames and tokens to logits, as Whisper (Radford et al. 2022): 4 and 4 layers of 256."""

    def __init__(self, width: int = 256, words: int = 4000) -> None:
        super().__init__()
        self.near, self.shorter = nn.Conv1d(80, width, 3, padding=1), nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.places, self.words = nn.Parameter(torch.randn(2048, width) * 0.1), nn.Embedding(words, width)
        self.encoder = nn.ModuleList([Layer(width, 4, False) for _ in range(4)])
        self.decoder = nn.ModuleList([Layer(width, 4, True) for _ in range(4)])
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, frames: Tensor, tokens: Tensor) -> Tensor:
        x = F.gelu(self.shorter(F.gelu(self.near(frames)))).transpose(1, 2)
        x = x + self.places[: x.shape[1]]
        for layer in self.encoder:
            x = layer(x)
        x = self.norm(x)
        y = self.words(tokens) + self.places[: tokens.shape[1]]
        for layer in self.decoder:
            y = layer(y, x)
        return self.last(y) @ self.words.weight.T


class Experts(nn.Module):
    """Gated feed-forward parts of which a token takes its best two (Jiang et al. 2024); all are computed for all tokens."""

    def __init__(self, width: int, inner: int, count: int) -> None:
        super().__init__()
        self.route = nn.Linear(width, count, bias=False)
        self.gate, self.up = (nn.Parameter(torch.randn(count, width, inner) / width**0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(count, inner, width) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.route(x).softmax(-1)
        best, at = scores.topk(2, -1)
        share = torch.zeros_like(scores).scatter(-1, at, best / best.sum(-1, keepdim=True))
        h = F.silu(x @ self.gate) * (x @ self.up)
        return torch.einsum("end,ne->nd", h @ self.down, share)


class Mixture(nn.Module):
    """A decoder of 4 layers of 256 with 8 experts each."""

    def __init__(self, width: int = 256, words: int = 4000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.own = nn.ModuleList([Attend(width, 4) for _ in range(4)])
        self.parts = nn.ModuleList([Experts(width, 512, 8) for _ in range(4)])
        self.norms = nn.ModuleList([nn.RMSNorm(width, 1e-6) for _ in range(9)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for k, (own, part) in enumerate(zip(self.own, self.parts, strict=True)):
            h = self.norms[2 * k](x)
            x = x + own(h, h, True)
            x = x + part(self.norms[2 * k + 1](x)[0])[None]
        return self.norms[8](x) @ self.words.weight.T


class Recommender(nn.Module):
    """DLRM (Naumov et al. 2019): 8 tables of 20,000 rows, bags of 20."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(20000, width, mode="sum") for _ in range(8)])
        layers = lambda *w: nn.Sequential(*(x for a, b in zip(w, w[1:]) for x in (nn.Linear(a, b), nn.ReLU())))
        self.dense, self.top, self.last = layers(13, 256, width), layers(width + 36, 256, 128), nn.Linear(128, 1)

    def forward(self, dense: Tensor, bags: Tensor) -> Tensor:
        first = self.dense(dense)
        found = torch.stack([first, *(t(bags[k]) for k, t in enumerate(self.tables))], 1)
        products = found @ found.transpose(1, 2)
        i, j = torch.tril_indices(9, 9, -1)
        return torch.sigmoid(self.last(self.top(torch.cat((first, products[:, i, j]), 1))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": cnn, "unet": UNet, "speech": Speech, "experts": Mixture, "recommender": Recommender
}  # fmt: skip


def inputs(model: str, case: str) -> list[Any]:
    rng = np.random.default_rng([len(case), *case.encode()])
    sizes = [int(s) for s in case.split("x")]
    if model == "cnn":
        return [rng.standard_normal((sizes[0], 3, 96, 96), np.float32)]
    if model == "unet":
        return [rng.standard_normal((1, 3, *sizes), np.float32)]
    if model == "speech":
        return [rng.standard_normal((1, 80, 2 * sizes[0]), np.float32), rng.integers(0, 4000, (1, sizes[1]))]
    if model == "experts":
        return [rng.integers(0, 4000, (1, sizes[0]))]
    return [rng.standard_normal((sizes[0], 13), np.float32), rng.integers(0, 20000, (8, sizes[0], 20))]


def dims(model: str) -> Any:
    n = lambda name, most: Dim(name, min=1, max=most)
    if model == "cnn":
        return ({0: n("b", 16)},)
    if model == "unet":
        return ({2: 4 * n("h", 64), 3: 4 * n("w", 64)},)
    if model == "speech":
        return ({2: 2 * n("n", 1024)}, {1: n("m", 64)})
    if model == "experts":
        return ({1: n("n", 256)},)
    b = n("b", 512)
    return ({0: b}, {1: b})


def module_of(model: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]().eval()


def exported(model: str) -> Any:
    example = {"cnn": "3", "unet": "64x72", "speech": "30x7", "experts": "12", "recommender": "6"}[model]
    args = tuple(torch.from_numpy(a) for a in inputs(model, example))
    with torch.no_grad():
        return torch.export.export(
            module_of(model), args, dynamic_shapes=dims(model), prefer_deferred_runtime_asserts_over_guards=True
        )


def prepare(kind: str, model: str, folder: Path) -> None:
    held = {f"{case}/{k}": a for case in CASES[model] for k, a in enumerate(inputs(model, case))}
    np.savez(folder / "cases.npz", **held)
    if kind == "plain":
        from relax_tune.ir.frontend.torch.export import plain_program
        from relax_tune.ir.frontend.torch.program import to_json

        plain = plain_program(exported(model))
        np.savez(folder / "weights.npz", **plain.weights)
        (folder / "program.json").write_text(to_json(plain))
    else:
        torch.onnx.export(exported(model), dynamo=True, verbose=False).save(str(folder / "model.onnx"))


def answers(peer: str, model: str, folder: Path) -> Any:
    run: Callable[[Sequence[Any]], Any]
    if peer == "onnxruntime":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        run = lambda given: session.run(None, dict(zip(names, given, strict=True)))
    else:
        made = module_of(model)
        called = torch.compile(made, dynamic=True) if peer == "torch-compile" else made
        run = lambda given: [called(*map(torch.from_numpy, given)).numpy()]

    def answer(case: str) -> tuple[Callable[[], Any], Callable[[], Sequence[float]]]:
        given, kept = inputs(model, case), list[Any]()

        def once() -> None:
            with torch.inference_mode():
                kept[:] = run(given)

        return once, lambda: head(kept)

    return answer


if __name__ == "__main__":
    what, kind, model, folder = sys.argv[1:5]
    if what == "prepare":
        prepare(kind, model, Path(folder))
    else:
        serve(answers(kind, model, Path(folder)))
