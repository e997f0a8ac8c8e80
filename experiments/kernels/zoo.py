"""The kernels that experiments time: each as a one-operator model, with the same in torch.

Sizes are those of the tables. With `symbolic`, the dims named in `dims` are symbols from 1 to their size; all other dims are constant.
Weights are constants of the model, as they are when a model is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.kernels.model import Kernel, Model, Torch
from experiments.kernels.more import conv, kinds
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.op.indexing.movement import Permute, Take
from relax_tune.ir.op.math.elementwise import Add, Gelu, Mul, Relu, Sigmoid
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.neural.decoder import RmsNorm
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm, MeanPool, Softmax, Sum


def _matmul(
    name: str, n: int, k: int, m: int, constant: bool = False, bar: Mapping[str, float] | None = None
) -> Kernel:
    def make(g: Model) -> GVar:
        return g(Matmul(), g.input("x", "n", k), g.weight("w", k, m) if constant else g.input("w", k, m))

    return Kernel(
        name, {"n": n}, make, lambda t, v: v["x"] @ v["w"], 2.0 * n * k * m, 4.0 * (n * k + k * m + n * m), bar or {}
    )  # fmt: skip


def _dense_gelu(n: int, k: int, m: int) -> Kernel:
    def make(g: Model) -> GVar:
        y = g(Add(), g(Matmul(), g.input("x", "n", k), g.weight("w", k, m)), g.weight("bias", m))
        return g(Gelu(), y)

    def torch(t: Any, v: Mapping[str, Any]) -> Any:
        return t.nn.functional.gelu(t.addmm(v["bias"], v["x"], v["w"]))

    return Kernel(f"dense_gelu_{n}x{k}x{m}", {"n": n}, make, torch, 2.0 * n * k * m, 4.0 * (n * k + k * m + n * m))


def _softmax(rows: int, width: int, c: float, opencl: float, torch_us: float) -> Kernel:
    return _rows_softmax(f"softmax_{rows}x{width}", rows, width, {"c": c, "opencl": opencl, "torch": torch_us})


def _rows_softmax(name: str, rows: int, width: int, bar: Mapping[str, float] | None = None) -> Kernel:
    return Kernel(
        name,
        {"n": rows},
        lambda g: g(Softmax(), g.input("x", "n", width)),
        lambda t, v: t.softmax(v["x"], -1),
        bytes=8.0 * rows * width,
        bar=bar or {},
    )


def _layer_norm(g: Model, width: int, residual: bool) -> GVar:
    x = g.input("x", "n", width)
    x = g(Add(), x, g.input("r", "n", width)) if residual else x
    return g(LayerNorm(), x, g.weight("gamma", width), g.weight("beta", width))


def _layer_norm_torch(t: Any, v: Mapping[str, Any]) -> Any:
    x = v["x"] + v["r"] if "r" in v else v["x"]
    return t.nn.functional.layer_norm(x, x.shape[-1:], v["gamma"], v["beta"])


def _rms_norm_torch(t: Any, v: Mapping[str, Any]) -> Any:
    return t.nn.functional.rms_norm(v["x"], v["x"].shape[-1:], v["gamma"], 1e-6)


def _unary(name: str, make: Callable[[Model, GVar], GVar], torch: Torch, bar: Mapping[str, float]) -> Kernel:
    size = 4 << 20
    return Kernel(f"{name}_4M", {"n": size}, lambda g: make(g, g.input("x", "n")), torch, bytes=8.0 * size, bar=bar)


def _silu(g: Model, x: GVar) -> GVar:
    return g(Mul(), x, g(Sigmoid(), x))


def _mean_pool_torch(t: Any, v: Mapping[str, Any]) -> Any:
    mask = v["mask"].unsqueeze(-1)
    return (v["x"] * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


def _gemv(bits: int, bar: Mapping[str, float], rows: int = 1) -> Kernel:
    name = ("gemv" if rows == 1 else f"batch{rows}") + ("_f32" if bits == 32 else f"_int{bits}")
    return _transposed(name, rows, 4096, 11008, bits, bar)


def _transposed(
    name: str, n: int, k: int, m: int, bits: int = 32, bar: Mapping[str, float] | None = None
) -> Kernel:  # fmt: skip
    """(n, k) times the transposition of a weight (m, k)."""

    def make(g: Model) -> GVar:
        return g(Matmul(True), g.input("x", "n", k), g.weight("w", m, k))

    return Kernel(
        name, {"n": n}, make, lambda t, v: v["x"] @ v["w"].T, 2.0 * n * k * m, m * k * bits / 8, bar or {}, bits=bits,
        transposed=True,
    )  # fmt: skip


def _attention(n: int, bar: Mapping[str, float]) -> Kernel:
    heads, d = 12, 64

    def make(g: Model) -> GVar:
        q, k, v = (g.input(part, 1, heads, "n", d) for part in "qkv")
        return g(Attention(d**-0.5), q, k, v)

    def torch(t: Any, v: Mapping[str, Any]) -> Any:
        return t.nn.functional.scaled_dot_product_attention(v["q"], v["k"], v["v"])

    flops, size = 4.0 * heads * n * n * d, 16.0 * heads * n * d
    return Kernel(f"attention_{n}", {"n": n}, make, torch, flops, size, bar)


def _conv_relu(c: int, size: int, out: int) -> Kernel:
    plain = conv("", c, size, out, 3)
    return Kernel(
        f"conv_relu_{c}x{size}",
        plain.dims,
        lambda g: g(Relu(), plain.make(g)),
        lambda t, v: t.relu(plain.torch(t, v)),
        plain.flops,
        plain.bytes,
    )


def _batch_matmul(name: str, batch: int, n: int, k: int | str, m: int | str, transposed: bool) -> Kernel:
    """k or m as "n": of the rows' size."""

    def make(g: Model) -> GVar:
        y = g.input("y", batch, m, k) if transposed else g.input("y", batch, k, m)
        return g(Matmul(transposed), g.input("x", batch, "n", k), y)

    def torch(t: Any, v: Mapping[str, Any]) -> Any:
        return v["x"] @ (v["y"].transpose(1, 2) if transposed else v["y"])

    k_top, m_top = (n if isinstance(d, str) else d for d in (k, m))
    size = 4.0 * batch * (n * k_top + k_top * m_top + n * m_top)
    return Kernel(name, {"n": n}, make, torch, 2.0 * batch * n * k_top * m_top, size, transposed=transposed)


def _kernels() -> Sequence[Kernel]:
    return (
        _matmul("matmul_512", 512, 512, 512),
        _matmul("matmul_1024", 1024, 1024, 1024),
        _matmul("matmul_2048", 2048, 2048, 2048),
        *(_matmul(f"dense_{n}", n, 768, 3072, constant=True) for n in (1, 4, 17, 64, 128, 512)),
        _dense_gelu(128, 768, 3072),
        _batch_matmul("batch_matmul_nt", 12, 128, 64, 128, True),
        _batch_matmul("batch_matmul_nn", 12, 128, 128, 64, False),
        _softmax(1024, 1024, 122, 215, 297),
        _softmax(2048, 512, 129, 212, 306),
        _softmax(256, 4096, 137, 199, 291),
        _softmax(4096, 16, 12, 52, 43),
        _softmax(4096, 17, 37, 51, 70),
        _softmax(4096, 100, 59, 133, 172),
        Kernel(
            "layer_norm", {"n": 512}, lambda g: _layer_norm(g, 1024, False), _layer_norm_torch,
            bytes=8.0 * 512 * 1024, bar={"c": 43, "opencl": 67, "torch": 76},
        ),
        Kernel(
            "rms_norm", {"n": 512}, lambda g: g(RmsNorm(), g.input("x", "n", 1024), g.weight("gamma", 1024)),
            _rms_norm_torch, bytes=8.0 * 512 * 1024, bar={"c": 34, "opencl": 55, "torch": 101},
        ),
        Kernel(
            "add_layer_norm", {"n": 512}, lambda g: _layer_norm(g, 1024, True), _layer_norm_torch,
            bytes=12.0 * 512 * 1024, bar={"c": 58, "torch": 112},
        ),
        _unary("gelu", lambda g, x: g(Gelu(), x), lambda t, v: t.nn.functional.gelu(v["x"]),
               {"c": 819, "opencl": 852, "torch": 1077}),
        _unary("silu", _silu, lambda t, v: t.nn.functional.silu(v["x"]), {"c": 684, "opencl": 597, "torch": 962}),
        Kernel(
            "sum_16M", {"n": 16 << 20}, lambda g: g(Sum((0,)), g.input("x", "n")), lambda t, v: v["x"].sum(),
            bytes=4.0 * (16 << 20), bar={"c": 1104, "opencl": 1472, "torch": 1207},
        ),
        Kernel(
            "transpose", {"n": 512}, lambda g: g(Permute((0, 2, 1, 3)), g.input("x", 8, "n", 12, 64)),
            lambda t, v: v["x"].permute(0, 2, 1, 3).contiguous(),
            bytes=8.0 * 8 * 512 * 768, bar={"c": 253, "opencl": 607, "torch": 310},
        ),
        Kernel(
            "transpose_last", {"n": 2048}, lambda g: g(Permute((1, 0)), g.input("x", "n", 1536)),
            lambda t, v: v["x"].T.contiguous(), bytes=8.0 * 2048 * 1536,
        ),
        Kernel(
            "gather", {"n": 4096},
            lambda g: g(Take(), g.weight("table", 30522, 384), g.input("i", "n", element=i64)),
            lambda t, v: t.nn.functional.embedding(v["i"], v["table"]),
            bytes=8.0 * 4096 * 384, bar={"c": 93, "torch": 116}, index_limit=30522,
        ),
        Kernel(
            "mean_pool", {"n": 128}, lambda g: g(MeanPool(), g.input("x", 32, "n", 384), g.input("mask", 32, "n")),
            _mean_pool_torch, bytes=4.0 * 32 * 128 * 384, bar={"c": 43, "torch": 77},
        ),
        _gemv(32, {"c": 5444, "opencl": 4550, "torch": 7724}),
        _gemv(8, {"c": 1389, "opencl": 1784}),
        _gemv(4, {"c": 1067, "opencl": 2512}),
        *(_gemv(bits, {}, rows=8) for bits in (32, 8, 4)),
        _attention(16, {"c": 9.8, "opencl": 24, "torch": 31}),
        _attention(128, {"c": 264, "opencl": 335, "torch": 438}),
        _attention(512, {"c": 4005, "opencl": 4532, "torch": 5412}),
        conv("conv_64x56", 64, 56, 64, 3),
        _conv_relu(64, 56, 64),
        conv("conv_first", 3, 224, 64, 7, stride=2),
        conv("conv_1x1", 256, 28, 128, 1),
        conv("conv_depthwise", 96, 56, 96, 3, groups=96),
        # tuned over their whole range only (tables 2, 3 and 4, and the regret); DietCode's batch of 192 by ten
        _transposed("dietcode_dense", 2048, 768, 2304),
        _batch_matmul("dietcode_nt", 19, 128, 64, "n", True),
        _batch_matmul("dietcode_nn", 19, 128, "n", 64, False),
        _matmul("mikpoly", 8192, 768, 3072, constant=True),
        _matmul("mikpoly_96x64", 8192, 64, 96, constant=True),
        _matmul("policy_matmul", 4096, 768, 768, constant=True),
        _dense_gelu(512, 768, 3072),
        _matmul("range_matmul", 1024, 768, 768, constant=True),
        _rows_softmax("range_softmax", 4096, 256),
        Kernel(
            "range_layer_norm", {"n": 4096}, lambda g: _layer_norm(g, 768, False), _layer_norm_torch,
            bytes=8.0 * 4096 * 768,
        ),
    )  # fmt: skip


KERNELS: Mapping[str, Kernel] = {k.name: k for k in (*_kernels(), *kinds())}
