"""Models that the heuristics of this package were not made with, in torch with random weights, and the peers that run them.

    python -m experiments.end_to_end.unseen_peers prepare MODEL FOLDER
    python -m experiments.end_to_end.unseen_peers serve PEER MODEL FOLDER

For a Python with torch, transformers, onnx, onnxruntime and openvino. All but torch run the ONNX file; the int8 models' peers run the
file that ONNX Runtime's `quantize_dynamic` writes of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.end_to_end.unseen_models import CASES, plain_name, sizes_of
from experiments.end_to_end.whole_model_peers import UNet
from experiments.harness.contenders import serve
from experiments.harness.e2e_cases import head

WIDTH, HEADS, LAYERS, WORDS = 768, 12, 4, 50257


class Block(nn.Module):
    """A layer of GPT-2 over `n` tokens after `m` earlier ones, whose keys and values are arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """past: (2, 1, heads, m, head size); returns the new rows of it too."""
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        new = torch.stack((k, v))
        k, v = torch.cat((past, new), 3).unbind(0)
        scores = (q @ k.transpose(2, 3)) / (WIDTH // HEADS) ** 0.5
        mixed = torch.where(mask, scores, -1e9).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.back(F.gelu(self.wide(self.second(x)), approximate="tanh")), new


class Decoder(nn.Module):
    """GPT-2 with four layers: the scores of the last token and the new keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(1024, WIDTH)
        self.blocks, self.norm = nn.ModuleList([Block() for _ in range(LAYERS)]), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        n, m = tokens.shape[1], past[0].shape[3]
        at = torch.arange(n) + m
        x = self.words(tokens) + self.places(at)
        mask = torch.arange(n + m)[None, :] <= at[:, None]
        news = []
        for block, own in zip(self.blocks, past, strict=True):
            x, new = block(x, mask, own)
            news.append(new)
        return (self.norm(x[:, -1]) @ self.words.weight.T, *news)


class Inverted(nn.Module):
    """A block of MobileNetV3: widen, convolve each channel, squeeze and excite, narrow."""

    def __init__(self, a: int, inner: int, b: int, kernel: int, stride: int, excite: bool, hard: bool) -> None:
        super().__init__()
        act = nn.Hardswish if hard else nn.ReLU
        conv = lambda i, o, k=1, s=1, groups=1: nn.Sequential(
            nn.Conv2d(i, o, k, s, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o)
        )
        self.first = nn.Sequential(conv(a, inner), act(), conv(inner, inner, kernel, stride, inner), act())
        fewer = max(8, inner // 4 // 8 * 8)
        self.excite = (
            nn.Sequential(
                nn.AdaptiveAvgPool2d(1),
                nn.Conv2d(inner, fewer, 1),
                nn.ReLU(),
                nn.Conv2d(fewer, inner, 1),
                nn.Hardsigmoid(),
            )
            if excite
            else None
        )
        self.last, self.added = conv(inner, b), stride == 1 and a == b

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.excite is not None:
            y = y * self.excite(y)
        y = self.last(y)
        return x + y if self.added else y


def mobilenet() -> nn.Module:
    """MobileNetV3-small (Howard et al. 2019)."""
    rows = (
        (16, 16, 16, 3, 2, True, False), (16, 72, 24, 3, 2, False, False), (24, 88, 24, 3, 1, False, False),
        (24, 96, 40, 5, 2, True, True), (40, 240, 40, 5, 1, True, True), (40, 240, 40, 5, 1, True, True),
        (40, 120, 48, 5, 1, True, True), (48, 144, 48, 5, 1, True, True), (48, 288, 96, 5, 2, True, True),
        (96, 576, 96, 5, 1, True, True), (96, 576, 96, 5, 1, True, True),
    )  # fmt: skip
    stem = (nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
    end = (
        nn.Conv2d(96, 576, 1, bias=False),
        nn.BatchNorm2d(576),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return nn.Sequential(
        *stem, *(Inverted(*row) for row in rows), *end, nn.Linear(576, 1024), nn.Hardswish(), nn.Linear(1024, 1000)
    )


class Recurrent(nn.Module):
    """Two layers of 256, over sequences whose step comes first."""

    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__()
        self.layers = cls(256, 256, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]


class Folder(nn.Module):
    """A model of transformers, as a function of one array."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        output = self.model(x)
        return output.logits if hasattr(output, "logits") else output.last_hidden_state


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536, num_labels=1000
    )
    return Folder(transformers.ViTForImageClassification(config))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "encoder": lambda: Folder(transformers.BertModel(transformers.BertConfig(num_hidden_layers=LAYERS))),
    "decoder": Decoder,
    "vit": vit,
    "resnet50": lambda: Folder(transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))),
    "mobilenet": mobilenet,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "efficientnet": lambda: Folder(
        transformers.EfficientNetForImageClassification(
            transformers.EfficientNetConfig(
                width_coefficient=1.0, depth_coefficient=1.0, image_size=224, hidden_dim=1280, num_labels=1000
            )
        )
    ),
    "speech": lambda: Folder(transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(num_hidden_layers=LAYERS))),
    "unet": UNet,
}


def inputs(model: str, case: str) -> list[Any]:
    """Return the arrays of a case."""
    rng, sizes = np.random.default_rng([len(case), *case.encode()]), sizes_of(case)
    if model == "encoder":
        return [rng.integers(0, 1000, sizes)]
    if model == "decoder":
        n, m = sizes
        past = [rng.standard_normal((2, 1, HEADS, m, WIDTH // HEADS), np.float32) for _ in range(LAYERS)]
        return [rng.integers(0, WORDS, (1, n)), *past]
    if model in ("lstm", "gru"):
        return [rng.standard_normal((*sizes, 256), np.float32)]
    if model == "unet":
        return [rng.standard_normal((1, 3, *sizes), np.float32)]
    if model == "speech":
        return [rng.standard_normal((1, sizes[0]), np.float32)]
    return [rng.standard_normal((sizes[0], 3, 224, 224), np.float32)]


def dims(model: str) -> Mapping[str, Mapping[int, str]]:
    """Return the dynamic dims of each input of the ONNX file."""
    if model == "decoder":
        return {"x": {1: "n"}, **{f"past{k}": {3: "m"} for k in range(LAYERS)}}
    by_model = {"encoder": {0: "b", 1: "n"}, "lstm": {0: "n", 1: "b"}, "unet": {2: "h", 3: "w"}, "speech": {1: "n"}}
    return {"x": by_model.get("lstm" if model == "gru" else model, {0: "b"})}


def module_of(model: str) -> nn.Module:
    """Return a model with weights from a seed, and statistics of normalisation from it."""
    torch.manual_seed(0)
    module = MODELS[model]().eval()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_var, 0.5, 1.5)
    return module


def prepare(name: str, folder: Path) -> None:
    """Write the ONNX files and the arrays of all cases."""
    model = plain_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    held = {f"{case}/{k}": a for case in CASES[name] for k, a in enumerate(inputs(model, case))}
    np.savez(folder / "cases.npz", **held)
    axes = dims(model)
    example = {"encoder": "2x16", "decoder": "5x7", "lstm": "9x2", "gru": "9x2", "unet": "64x72", "speech": "4000"}
    given = tuple(map(torch.from_numpy, inputs(model, example.get(model, "2"))))
    options: Any = {"input_names": list(axes), "dynamic_axes": axes, "dynamo": False, "opset_version": 18}
    with torch.no_grad():
        torch.onnx.export(module_of(model), given, str(folder / "model.onnx"), **options)
    if name != model:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(folder / "model.onnx", folder / "int8.onnx", weight_type=QuantType.QInt8)


def caller(peer: str, name: str, folder: Path) -> Callable[[Sequence[Any]], Any]:
    """Return a function of arrays to arrays."""
    file = str(folder / ("model.onnx" if name == plain_name(name) else "int8.onnx"))
    if peer == "onnxruntime":
        import onnxruntime

        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        return lambda given: session.run(None, dict(zip(names, given, strict=True)))
    if peer == "openvino":
        import openvino

        hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
        request = openvino.Core().compile_model(file, "CPU", hints).create_infer_request()
        return lambda given: list(request.infer(list(given), share_inputs=True).values())
    module = module_of(plain_name(name))
    called: Any = torch.compile(module, dynamic=True) if peer == "torch-compile" else module

    def run(given: Sequence[Any]) -> Any:
        with torch.no_grad():
            output = called(*map(torch.from_numpy, given))
        return [t.numpy() for t in (output if isinstance(output, tuple) else (output,))]

    return run


def answers(
    peer: str, name: str, folder: Path
) -> Callable[[str], tuple[Callable[[], Any], Callable[[], Sequence[float]]]]:
    """Return what `contenders.serve` calls."""
    run = caller(peer, name, folder)

    def answer(case: str) -> tuple[Callable[[], Any], Callable[[], Sequence[float]]]:
        given, results = inputs(plain_name(name), case), list[Any]()

        def once() -> None:
            results[:] = run(given)

        return once, lambda: head(results)

    return answer


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(sys.argv[2], Path(sys.argv[3]))
    else:
        serve(answers(sys.argv[2], sys.argv[3], Path(sys.argv[4])))
