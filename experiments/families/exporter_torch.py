"""Files of `exporters.py` that come from torch: two exporters, and the tools that rewrite what they write.

A model's inputs at each of its shapes, and edge inputs, are drawn once and stored beside the files, so that a file is tried without
the package that made it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Make = Callable[[Path, str, Path], None]
"""Writes a file: folder of all files, name of the model, path to write."""
Case = Mapping[str, Array]
OPSET = 17
"""The opset of torch's older exporter, which the tools are tried with."""
HEADS: Mapping[str, tuple[str, int]] = {
    "bert": ("bert", 4), "bert_classic": ("bert", 4), "xlm_roberta": ("bert", 4), "distilbert": ("bert", 4),
    "gpt2": ("gpt2", 4), "gpt2_step": ("gpt2", 4),
    "t5_full": ("t5", 4), "vit": ("vit", 4), "whisper_encoder": ("bart", 4), "whisper_decoder": ("bart", 4), "bart": ("bart", 4),
    "clip_text": ("clip", 4), "swin": ("swin", 2), "phi": ("phi", 4), "llama_step": ("gpt_neox", 4), "qwen3": ("qwen3", 4),
    "unet_nearest": ("unet", 4),
}  # fmt: skip
"""The model type and the heads that onnxruntime.transformers.optimizer is told, by model."""
SOURCES = (
    "mlp", "convnet", "mobilenetv3", "unet_size", "unet_nearest", "lstm", "gru", "lstm_packed", "bert", "bert_classic", "distilbert",
    "xlm_roberta", "gpt2", "gpt2_step", "llama_step", "t5_full", "vit", "swin", "whisper_encoder", "whisper_decoder", "bart", "clip_text",
    "qwen3", "phi", "yolo_topk", "yolo_nms", "yolo_select", "dlrm_bags", "gnn_scatter_add",
)  # fmt: skip


# Sources


def sources() -> dict[str, Any]:
    """Return the source models in torch by name, as `models.Family`."""
    import torch
    from torch import Tensor, nn

    from experiments.families.model_families import families
    from experiments.families.models import BN, IMAGE, Family, ids, image, padded

    class Packed(nn.Module):
        """Rows of several lengths through a bidirectional LSTM and a GRU, with a state of their own."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LSTM(8, 16, bidirectional=True, batch_first=True)
            self.second = nn.GRU(32, 8, batch_first=True)

        def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            found, _ = self.first(x)
            out, last = self.second(found, state)
            return out, last

    class Select(nn.Module):
        """A detector that ends in non-maximum suppression, which torch's older exporter writes as NonMaxSuppression."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 4, 1), nn.ReLU(), nn.Conv2d(16, 5, 3, 2, 1))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            f = self.body(x).flatten(2).transpose(1, 2)
            selected = f[..., 4].sigmoid() > 0.5
            return f[selected], selected.nonzero()

    class Layer(nn.Module):
        """An encoder layer as transformers 4 wrote it, whose attention ONNX Runtime's fusions know."""

        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
            self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)

        def heads(self, x: Tensor) -> Tensor:
            return x.view(x.size(0), x.size(1), 4, 8).permute(0, 2, 1, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
            scores = torch.matmul(q, k.transpose(-1, -2)) / 8**0.5 + mask
            y = torch.matmul(scores.softmax(-1), v).permute(0, 2, 1, 3).contiguous()
            x = self.first(self.out(y.view(y.size(0), y.size(1), 32)) + x)
            return self.second(self.down(nn.functional.gelu(self.up(x))) + x)

    class Classic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.kinds = nn.Embedding(199, 32), nn.Embedding(64, 32), nn.Embedding(2, 32)
            self.norm, self.layers = nn.LayerNorm(32), nn.ModuleList([Layer(), Layer()])

        def forward(self, ids: Tensor, kinds: Tensor, mask: Tensor) -> Tensor:
            places = torch.arange(64)[None, : ids.size(1)]
            x = self.norm(self.words(ids) + self.kinds(kinds) + self.places(places))
            added = (1.0 - mask[:, None, None, :].float()) * -10000.0
            for layer in self.layers:
                x = layer(x, added)
            return x

    def convnet() -> nn.Module:
        block = lambda a, b, s: [nn.Conv2d(a, b, 3, s, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        return nn.Sequential(
            *block(3, 16, 2), nn.MaxPool2d(3, 2, 1, ceil_mode=True), *block(16, 24, 1), nn.AvgPool2d(2), *block(24, 16, 1),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 10), nn.LogSoftmax(-1),
        )  # fmt: skip

    mlp = lambda: nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 5)
    )
    rows = ((2,), (1,), (7,), (16,))
    text = ((2, 9), (1, 1), (3, 7), (5, 20))
    classic = lambda g, s: (ids(g, *s), torch.randint(0, 2, s, generator=g), padded(g, *s))
    packed = lambda g, s: (torch.randn(*s, 8, generator=g), torch.randn(1, s[0], 8, generator=g))
    own = {
        "mlp": Family(mlp, lambda g, s: (torch.randn(*s, 20, generator=g),), ({0: "b"},), rows),
        "convnet": Family(convnet, image, ({0: "b", 2: "h", 3: "w"},), IMAGE),
        "bert_classic": Family(Classic, classic, (BN, BN, BN), text),
        "lstm_packed": Family(Packed, packed, ({0: "b", 1: "n"}, {1: "b"}), text),
        "yolo_select": Family(Select, image, ({0: "b", 2: "h", 3: "w"},), IMAGE),
    }
    every = {**families(), **own}
    return {name: every[name] for name in SOURCES}


def edges(cases: Sequence[Case]) -> list[Case]:
    """Return edge inputs of the first case: floats of zero, floats a hundred times as large, and integers of the least value."""
    first = cases[0]
    floating = lambda change: {k: change(a) if a.dtype.kind == "f" else a for k, a in first.items()}
    least = {
        k: a if a.dtype.kind == "f" or set(np.unique(a)) <= {0, 1} else np.full_like(a, a.min())
        for k, a in first.items()
    }
    return [floating(np.zeros_like), floating(lambda a: a * a.dtype.type(100)), least]


def store_cases(folder: Path, name: str, cases: Sequence[Case]) -> None:
    """Write the inputs of a model, by case and by input."""
    (folder / "cases").mkdir(parents=True, exist_ok=True)
    every = [*cases, *edges(cases)]
    np.savez(
        folder / "cases" / f"{name}.npz", **{f"{k}/{i}": a for k, case in enumerate(every) for i, a in case.items()}
    )  # type: ignore[arg-type]


def torch_file(folder: Path, name: str, path: Path, dynamo: bool, opset: int = OPSET, old: bool = False) -> None:
    """Export a source by torch.

    Args:
        old: weights are inputs, too, as files before IR version 4 have them.
    """
    import torch

    from experiments.families.models import draw

    family = sources()[name]
    torch.manual_seed(0)
    model = draw(family.make())
    for inner in model.modules():
        if family.for_onnx.get("attn") and hasattr(inner, "set_attn_implementation"):
            inner.set_attn_implementation(family.for_onnx["attn"])
    given = [family.inputs(torch.Generator().manual_seed(k), s) for k, s in enumerate(family.shapes[:4])]
    names = [f"input_{i}" for i in range(len(given[0]))]
    cases = [{n: a.numpy() for n, a in zip(names, arrays, strict=True)} for arrays in given]
    store_cases(folder, name, cases)
    places = tuple({a: d.split("*")[-1] for a, d in dims.items()} for dims in family.dynamic)
    with torch.no_grad():
        if dynamo:
            automatic = any("*" in d for dims in family.dynamic for d in dims.values())
            dims: Any = tuple({a: torch.export.Dim.AUTO for a in p} for p in places) if automatic else places
            torch.onnx.export(
                model,
                given[0],
                str(path),
                dynamo=True,
                dynamic_shapes=dims,
                verbose=False,
                external_data=False,
                input_names=names,
            )
        else:
            torch.onnx.export(
                model, given[0], str(path), dynamo=False, opset_version=opset, input_names=names,
                dynamic_axes=dict(zip(names, places)), keep_initializers_as_inputs=old,
            )  # fmt: skip


# Tools


def base(folder: Path, name: str, exporter: str = "torch_script") -> Path:
    """Return the file that tools rewrite, of torch's older exporter where it has one.

    Raises:
        FileNotFoundError: no exporter wrote one.
    """
    for one in (exporter, "torch_script", "torch_dynamo"):
        if (path := folder / one / f"{name}.onnx").exists():
            return path
    raise FileNotFoundError(f"no file of {name} to start from")


def slim(folder: Path, name: str, path: Path, exporter: str) -> None:
    import onnxslim

    onnxslim.slim(str(base(folder, name, exporter)), str(path))


def simplified(folder: Path, name: str, path: Path, exporter: str) -> None:
    import onnx
    import onnxsim

    model, _ = onnxsim.simplify(onnx.load(str(base(folder, name, exporter))))
    onnx.save(model, str(path))


def newer_opset(folder: Path, name: str, path: Path) -> None:
    import onnx
    from onnx import version_converter

    onnx.save(version_converter.convert_version(onnx.load(str(base(folder, name))), 21), str(path))


def optimizer_passes(folder: Path, name: str, path: Path) -> None:
    import onnx
    import onnxoptimizer

    onnx.save(onnxoptimizer.optimize(onnx.load(str(base(folder, name)))), str(path))


def runtime_level(folder: Path, name: str, path: Path, level: str, exporter: str = "torch_script") -> None:
    """Write what ONNX Runtime makes of a file at a level of its optimizer."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(base(folder, name, exporter)), options, providers=["CPUExecutionProvider"])


def runtime_of_quantized(folder: Path, name: str, path: Path, quantized: str) -> None:
    """Write what ONNX Runtime makes of a quantised file at its highest level."""
    runtime_level(folder, name, path, "ORT_ENABLE_ALL", quantized)


def transformer(folder: Path, name: str, path: Path, half: bool, exporter: str = "torch_script") -> None:
    """Fuse by onnxruntime.transformers.optimizer."""
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    kind, heads = HEADS[name]
    options = FusionOptions(kind)
    options.enable_gelu_approximation = half
    fused = optimize_model(
        str(base(folder, name, exporter)),
        kind,
        num_heads=heads,
        hidden_size=32,
        optimization_options=options,
        opt_level=0,
    )
    if half:
        fused.convert_float_to_float16(keep_io_types=True)
    fused.save_model_to_file(str(path))


def packed_attention(folder: Path, name: str, path: Path) -> None:
    """Fuse, and pack the rows."""
    import onnx
    from onnxruntime.transformers.convert_to_packing_mode import PackingMode
    from onnxruntime.transformers.onnx_model import OnnxModel

    packing = PackingMode(OnnxModel(onnx.load(str(folder / "ort_transformers" / f"{name}.onnx"))))
    packing.convert()
    packing.model.save_model_to_file(str(path))


def dynamic(folder: Path, name: str, path: Path, source: str = "torch_script", **options: Any) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(str(base(folder, name, source)), str(path), **options)


class Reader:
    """Calibration data: the cases of a model."""

    def __init__(self, path: Path, cases: Sequence[Case]) -> None:
        import onnx

        self.names = [i.name for i in onnx.load(str(path)).graph.input]
        self.rest: Iterator[Case] = iter(cases)

    def get_next(self) -> Case | None:
        case = next(self.rest, None)
        return None if case is None else dict(zip(self.names, case.values(), strict=True))


def prepared(folder: Path, name: str) -> Path:
    """Return the file after quant_pre_process, made where it is missing."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    path = folder / "prepared" / f"{name}.onnx"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        source = base(folder, name)
        try:
            quant_pre_process(str(source), str(path))
        except Exception:  # its shape inference takes fewer models than its quantizer
            shutil.copy(source, path)
    return path


def static(folder: Path, name: str, path: Path, form: str, activation: str, weight: str, **options: Any) -> None:
    """Quantise with ranges of the model's own cases."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    from experiments.families.exporters import stored_cases

    source = prepared(folder, name)
    quantize_static(
        str(source), str(path), Reader(source, stored_cases(folder, name)[:1]), quant_format=getattr(QuantFormat, form),
        activation_type=getattr(QuantType, activation), weight_type=getattr(QuantType, weight), **options,
    )  # fmt: skip


def blocks(
    folder: Path, name: str, path: Path, form: str, bits: int = 4, exporter: str = "torch_script", **options: Any
) -> None:
    """Quantise weights of products in blocks."""
    import onnx
    from onnxruntime.quantization import QuantFormat
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

    config = DefaultWeightOnlyQuantConfig(block_size=16, quant_format=getattr(QuantFormat, form), bits=bits, **options)
    quantizer = MatMulNBitsQuantizer(onnx.load(str(base(folder, name, exporter))), algo_config=config)
    quantizer.process()
    quantizer.model.save_model_to_file(str(path))


def half_precision(folder: Path, name: str, path: Path, package: str, keep: bool) -> None:
    """Convert floats to 16 bits, by ONNX Runtime's converter or the one of onnxconverter-common."""
    import onnx

    model = onnx.load(str(base(folder, name)))
    if package == "onnxruntime":
        from onnxruntime.transformers.float16 import convert_float_to_float16
    else:
        from onnxconverter_common.float16 import convert_float_to_float16
    onnx.save(convert_float_to_float16(model, keep_io_types=keep), str(path))


@dataclass(frozen=True)
class Exporter:
    """A way to write files.

    Attributes:
        make: writes the file of one model.
        models: the models it is tried with.
        packages: the modules it needs.
    """

    make: Make
    models: Sequence[str]
    packages: Sequence[str] = ("torch", "onnx", "onnxscript", "transformers", "experiments.families.model_families")


FEW = ("mlp", "convnet", "mobilenetv3", "lstm_packed", "bert", "gpt2_step", "vit", "yolo_topk", "unet_size", "t5_full")
PRODUCTS = ("mlp", "bert", "gpt2_step", "llama_step", "vit", "t5_full")
RUNTIME = ("onnx", "onnxruntime")


def _tool(make: Make, models: Sequence[str] = FEW, *packages: str) -> Exporter:
    return Exporter(make, models, (*RUNTIME, *packages))


TORCH: Mapping[str, Exporter] = {
    "torch_dynamo": Exporter(partial(torch_file, dynamo=True), SOURCES),
    "torch_script": Exporter(partial(torch_file, dynamo=False), SOURCES),
    "torch_script_11": Exporter(partial(torch_file, dynamo=False, opset=11, old=True), FEW),
    "onnx_version_converter": _tool(newer_opset),
    "onnxslim": _tool(partial(slim, exporter="torch_script"), FEW, "onnxslim"),
    "onnxslim_dynamo": _tool(partial(slim, exporter="torch_dynamo"), FEW, "onnxslim"),
    "onnxsim": _tool(partial(simplified, exporter="torch_script"), FEW, "onnxsim"),
    "onnxsim_dynamo": _tool(partial(simplified, exporter="torch_dynamo"), FEW, "onnxsim"),
    "onnxoptimizer": _tool(optimizer_passes, FEW, "onnxoptimizer"),
    "ort_basic": _tool(partial(runtime_level, level="ORT_ENABLE_BASIC")),
    "ort_extended": _tool(partial(runtime_level, level="ORT_ENABLE_EXTENDED")),
    "ort_all": _tool(partial(runtime_level, level="ORT_ENABLE_ALL"), (*FEW, "whisper_decoder", "gru", "unet_nearest")),
    "ort_all_dynamo": _tool(partial(runtime_level, level="ORT_ENABLE_ALL", exporter="torch_dynamo")),
    "ort_transformers": _tool(partial(transformer, half=False), [*HEADS]),
    "ort_transformers_dynamo": _tool(partial(transformer, half=False, exporter="torch_dynamo"), [*HEADS]),
    "ort_transformers_half": _tool(partial(transformer, half=True), [*HEADS]),
    "ort_packing": _tool(packed_attention, ("bert_classic",)),
    "quantize_dynamic": _tool(dynamic, (*FEW, "lstm", "bert_classic")),
    "quantize_dynamic_channel": _tool(partial(dynamic, per_channel=True, reduce_range=True), FEW),
    "qdq_u8s8": _tool(partial(static, form="QDQ", activation="QUInt8", weight="QInt8")),
    "qdq_s8_channel": _tool(partial(static, form="QDQ", activation="QInt8", weight="QInt8", per_channel=True)),
    "qdq_16_bits": _tool(partial(static, form="QDQ", activation="QUInt16", weight="QInt16")),
    "qdq_16_by_4_bits": _tool(partial(static, form="QDQ", activation="QUInt16", weight="QInt4"), PRODUCTS),
    "qoperator": _tool(partial(static, form="QOperator", activation="QUInt8", weight="QUInt8")),
    "qoperator_channel": _tool(partial(static, form="QOperator", activation="QUInt8", weight="QInt8", per_channel=True)),
    "fused_dynamic": _tool(partial(dynamic, source="ort_transformers", extra_options={"DefaultTensorType": 1}), ("bert_classic", "gpt2")),
    "ort_all_of_qdq": _tool(partial(runtime_of_quantized, quantized="qdq_u8s8")),
    "ort_all_of_dynamic": _tool(partial(runtime_of_quantized, quantized="quantize_dynamic")),
    "nbits_4": _tool(partial(blocks, form="QOperator", is_symmetric=True), PRODUCTS),
    "nbits_4_zero_points": _tool(partial(blocks, form="QOperator", is_symmetric=False, accuracy_level=4), PRODUCTS),
    "nbits_4_qdq": _tool(partial(blocks, form="QDQ", is_symmetric=False), PRODUCTS),
    "nbits_8": _tool(partial(blocks, form="QOperator", bits=8), PRODUCTS),
    "nbits_4_gather": _tool(
        partial(blocks, form="QOperator", op_types_to_quantize=("MatMul", "Gather")), ("bert", "gpt2_step")
    ),
    "float16": _tool(partial(half_precision, package="onnxruntime", keep=False)),
    "float16_kept": _tool(partial(half_precision, package="onnxruntime", keep=True)),
    "float16_common": _tool(partial(half_precision, package="onnxconverter_common", keep=False), FEW, "onnxconverter_common"),
}  # fmt: skip


def with_models(exporter: Exporter, models: Sequence[str]) -> Exporter:
    return replace(exporter, models=models)
