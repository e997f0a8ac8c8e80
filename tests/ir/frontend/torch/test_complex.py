"""Recorded programs of complex numbers and Fourier transforms, against NumPy in float64 at many sizes."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy import fft

from relax_tune.database.memory_store import MemoryStore
from relax_tune.errors import ParseError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, Function
from relax_tune.ir.frontend.torch.importer import import_program
from relax_tune.ir.frontend.torch.program import Ref, TorchCall, TorchProgram, TorchTensor, from_json, to_json
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.passes.pipeline import lower
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.executor import Executor
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.settings import Settings

DATA = Path(__file__).parents[3] / "data"
Array = np.ndarray[Any, Any]
RECORDED: dict[str, Any] = dict(json.loads((DATA / "torch_spectra.json").read_text()))
SIZES = ((3, 16), (1, 1), (2, 2), (1, 7), (4, 31), (2, 60))
ODD = ((3, 16), (1, 17), (2, 31), (1, 60))
"""Sizes of programs with windows."""
LOST = {"rotary": 1e-5, "fnet": 1e-5}
FORMATS = {"narrow": np.dtype([("real", "f2"), ("imag", "f2")]), "wide": np.dtype([("real", "f8"), ("imag", "f8")])}


def parts(*found: Array) -> list[Array]:
    return [np.stack([z.real, z.imag], -1) for z in found]


def sgn(z: Array) -> Array:
    return np.where(z == 0, 0, z / np.abs(z))


def layer_norm(x: Array) -> Array:
    return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5))


def gelu(x: Array) -> Array:
    return np.asarray(x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2)


def padded(window: Array, size: int) -> Array:
    left = (size - len(window)) // 2
    return np.pad(window, (left, size - len(window) - left))


def short_time(a: Array, size: int, step: int, window: Array, centre: bool = True, full: bool = False) -> Array:
    """(batch, frequencies, windows), as torch.stft."""
    a = np.pad(a, [(0, 0), (size // 2, size // 2)], "reflect") if centre else a
    starts = range(0, a.shape[1] - size + 1, step)
    frames = np.stack([a[:, s : s + size] * padded(window, size) for s in starts], 2)
    return np.asarray((fft.fft if full else fft.rfft)(frames, axis=1))


def back(z: Array, size: int, step: int, window: Array, length: int | None) -> Array:
    """As torch.istft, centred."""
    window, count = padded(window, size), z.shape[2]
    total = size + step * (count - 1)
    found, weight = np.zeros((len(z), total)), np.zeros(total)
    for k in range(count):
        found[:, k * step : k * step + size] += fft.irfft(z[:, :, k], size, axis=1) * window
        weight[k * step : k * step + size] += window**2
    begin, end = size // 2, total - size // 2 if length is None else size // 2 + length
    found = found[:, begin:end] / weight[begin:end]
    return found if length is None else np.pad(found, [(0, 0), (0, length - found.shape[1])])


def raised(size: int, high: float, low: float, periodic: bool = True) -> Array:
    return high - low * np.cos(2 * np.pi * np.arange(size) / (size if periodic else size - 1))


def rotary(x: Array, freqs: Array) -> list[Array]:
    turn = np.exp(1j * np.outer(np.arange(x.shape[1]), freqs))
    pairs = x[..., ::2] + 1j * x[..., 1::2]
    turned = pairs * turn[:, None]
    return [np.stack([turned.real, turned.imag], -1).reshape(x.shape)]


def fnet(x: Array, w: Array, v: Array) -> list[Array]:
    x = layer_norm(x + fft.fft2(x, axes=(-1, -2)).real)
    return [layer_norm(x + gelu(x @ w) @ v)]


def planes(a: Array) -> list[Array]:
    twice = fft.ifft2(a + 2j * a, norm="ortho")
    return parts(fft.fft2(a), fft.rfft2(a), twice, fft.fft(a, axis=0), fft.fftshift(fft.fft(a)))


def fixed(a: Array) -> list[Array]:
    real = [fft.irfft(fft.rfft(a, 12)), fft.irfft(fft.rfft(a, 7), 7, norm="ortho"), fft.hfft(fft.ihfft(a, 8), 8)]
    return [*parts(fft.fft(a, 7), fft.rfft(a, 5), fft.fft(a, 12), (a + 2j * a).mean(1)), *real]


def windows(a: Array) -> list[Array]:
    x = np.arange(7) / 7
    kaiser = np.i0(5 * np.sqrt(1 - (2 * x - 1) ** 2)) / np.i0(5)
    blackman = 0.42 - 0.5 * np.cos(2 * np.pi * x) + 0.08 * np.cos(4 * np.pi * x)
    hamming = raised(7, 0.54, 0.46), raised(7, 0.6, 0.4, False)
    return [a + w for w in (raised(7, 0.5, 0.5), *hamming, blackman, np.bartlett(7), kaiser)]


def moves(a: Array, b: Array) -> list[Array]:
    z, y = a + 1j * b, b + 1j * a
    return parts(
        z.reshape(-1), z[:, None], z[0], z[:, -1:], np.concatenate([z, a], 1), np.stack([z, y], 1), z[:, ::-1],
        np.where(a > b, z, a), np.where(a > b, z, 1j), np.pad(z, [(0, 0), (1, 2)], constant_values=2.5), np.stack([z, z]),
        z[[0, 0]], np.concatenate([z, z]), z[:, [0, 0]], np.where(a > 0, 0.5, z), z[:, :1], z[:, 1:],
    )  # fmt: skip


def functions(a: Array, b: Array) -> list[Array]:
    z = a + 1j * b
    real = [np.abs(z), np.angle(z), a, b, -b, np.sqrt((np.abs(z) ** 2).sum(1)), a.var(1) + b.var(1)]
    return [*parts(np.exp(z), np.log(z), np.abs(a) * np.exp(1j * b)), *real]


def matrices(a: Array, b: Array) -> list[Array]:
    z, y = a + 1j * b, b + 1j * a
    return parts(z @ y.conj().T, z @ z.T, z @ y.T, z.sum(0), (z @ z.T)[None], z @ y.T, np.outer(z[0], y[0]))


def made(a: Array) -> list[Array]:
    like = np.ones(a.shape, np.complex128)
    return parts(np.full(len(a), 1 + 2j), like, like * 0, a + 0j, like * -1j, like)


def short(a: Array) -> list[Array]:
    ones = np.ones(5)
    first = short_time(a, 8, 3, raised(6, 0.54, 0.46), False)
    return [np.abs(first) / np.sqrt(8), *parts(short_time(a, 5, 2, ones, False, True))]


def short_back(a: Array) -> list[Array]:
    hann, hamming = raised(8, 0.5, 0.5), raised(5, 0.54, 0.46)
    return [
        back(short_time(a, 8, 2, hann), 8, 2, hann, None),
        back(short_time(a, 6, 2, hamming), 6, 2, hamming, 15),
    ]


def sums(a: Array, b: Array) -> list[Array]:
    z, y = a + 1j * b, b + 1j * a
    return parts(z + a, a - z, z + 1, 3 - z, z + 2j, z + 2 * y, -z, z.sum(1), np.cumsum(z, 1))


def products(a: Array, b: Array) -> list[Array]:
    z, y = a + 1j * b, b + 1j * a
    return parts(z * y, a * z, z * 2j, z * 2, z.conj() * z, z**2, z**3, z * z)


def quotients(a: Array, b: Array) -> list[Array]:
    z, y = a + 1j * b, b + 1j * a
    return parts(z / y, a / z, z / a, z / 4, 1 / z, 1 / z, sgn(z))


def truths(a: Array, b: Array) -> list[Array]:
    z = a + 1j * b
    return [a == b, z != a, np.isnan(z), np.isinf(z), np.isfinite(z), z == 1j, a != 1j, z == z]


def transforms(a: Array, b: Array) -> list[Array]:
    z = a + 1j * b
    return parts(fft.fft(a), fft.ifft(z), fft.rfft(a, norm="ortho"), fft.fft(z, norm="forward"), fft.ihfft(a))


def weights(x: Array) -> list[Array]:
    z = {k: v["real"].astype("f8") + 1j * v["imag"] for k, v in complex_weights().items()}
    return parts(x * z["weight"], x * z["turned"], x * z["wide"], x * z["narrow"])


WANTED: Mapping[str, tuple[Sequence[tuple[int, int]], Callable[..., list[Array]]]] = {
    "sums": (SIZES, sums), "products": (SIZES, products), "quotients": (SIZES, quotients), "functions": (SIZES, functions),
    "truths": (SIZES, truths), "matrices": (SIZES, matrices), "moves": (ODD, moves), "made": (SIZES, made),
    "transforms": (SIZES, transforms), "real_transforms": (SIZES, lambda a: [a, a]), "planes": (SIZES, planes),
    "fixed": (SIZES[:2], fixed),
    "long": (((2, 0), (1, 0)), lambda a: [*parts(fft.fft(a), fft.rfft(a)), a]),
    "prime": (((1, 0),), lambda a: [*parts(fft.rfft(a)), a]), "windows": (SIZES[:2], windows),
    "short_time": (ODD, short), "short_time_back": (ODD, short_back), "rotary": (SIZES, rotary), "fnet": (SIZES, fnet),
    "spectrogram": (ODD, lambda a: [np.abs(short_time(a, 10, 3, raised(10, 0.5, 0.5)))]), "weights": (((3, 4),), weights),
}  # fmt: skip


def complex_weights() -> dict[str, Array]:
    """The weights of the program `weights`, as the reader gives them."""
    z = np.sin(np.arange(24.0)).astype("f4").reshape(3, 4, 2)
    found = {}
    for name in ("weight", "turned", "wide", "narrow"):
        found[name] = np.zeros((3, 4), FORMATS.get(name, np.dtype([("real", "f4"), ("imag", "f4")])))
        found[name]["real"], found[name]["imag"] = z[..., 0], -z[..., 1] if name == "turned" else z[..., 1]
    return found


def program(name: str) -> TorchProgram:
    return from_json(json.dumps(RECORDED[name]), complex_weights() if name == "weights" else {})


def inputs_of(recorded: TorchProgram, n: int, m: int) -> list[Array]:
    random = np.random.default_rng([n, m])
    sizes = {s.name: n if s.name == "n" else m for s in recorded.symbols}
    dims = ([sizes.get(d, d) for d in meta.dims] for _, meta in recorded.inputs)
    return [random.standard_normal(d).astype(np.float32) for d in dims]


def as_tuple(found: Any) -> tuple[Array, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_complex_programs_give_numpy_s_results(name: str) -> None:
    recorded = program(name)
    module = import_program(recorded)
    verify(module)
    sizes, wanted = WANTED[name]
    for form in (module, lower(module).module):
        for n, m in sizes:
            inputs = inputs_of(recorded, n, m)
            right = wanted(*(x.astype(np.float64) for x in inputs))
            for f, w in zip(as_tuple(evaluate_function(form, inputs)), right, strict=True):
                assert f.shape == w.shape
                np.testing.assert_allclose(f, w, rtol=1e-5, atol=2e-6 * max(1.0, float(np.abs(w).max())))


@pytest.mark.ccompiler
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("name", ("transforms", "real_transforms", "rotary", "fnet", "spectrogram", "short_time_back"))
def test_complex_programs_compiled_lose_few_digits(name: str) -> None:
    """One artifact for every size; the largest error is a few units in the last place of the largest result.

    Angles of far positions, in 32 bits, and norms lose more."""
    recorded = program(name)
    module = import_program(recorded)
    sizes, wanted = WANTED[name]
    device = open_device("c")
    try:
        executor = built(module, device)
        for n, m in (*sizes, (1, 211)):
            inputs = inputs_of(recorded, n, m)
            right = wanted(*(x.astype(np.float64) for x in inputs))
            for f, w in zip(executor.run(inputs), right, strict=True):
                assert np.abs(f - w).max() <= LOST.get(name, 2e-6) * np.abs(w).max()
        executor.close()
    finally:
        device.close()


def built(module: IRModule, device: Any) -> Executor:
    job = device_job(module, device.info, MemoryStore(), Settings(target="c"))
    made = job.build("generic").program
    names = {b.name for b in made.buffers if b.role == "const"}
    return Executor(
        made, device, {n: np.asarray(a, order="C") for n, a in job.lowered.module.constants.items() if n in names}
    )


def test_recording_of_complex_programs_is_lossless() -> None:
    for name in RECORDED:
        recorded = program(name)
        assert from_json(to_json(recorded), recorded.weights) == recorded


def test_long_transform_with_factors_is_split() -> None:
    """1200 = 30 * 40: no matrix of 1200 rows; a prime length has one."""
    rows = {}
    for name in ("long", "prime"):
        main = import_program(program(name)).functions["main"]
        assert isinstance(main, Function)
        calls = [b.value for b in main.bindings if isinstance(b.value, Call) and isinstance(b.value.op, Matmul)]
        rows[name] = {int(c.args[1].info.shape[-2].value) for c in calls}  # type: ignore[union-attr]
    assert rows["long"] == {30, 40}
    assert 1031 in rows["prime"]


def test_tables_of_transforms_are_one_constant() -> None:
    assert sorted(n for n in import_program(program("short_time_back")).constants if n.startswith("dft")) == [
        "dft_cos_6_4_6", "dft_cos_8_5_8", "dft_sin_6_4_6", "dft_sin_8_5_8", "dft_twice_6", "dft_twice_8",
    ]  # fmt: skip


def changed(recorded: TorchProgram, name: str, **fields: Any) -> TorchProgram:
    return replace(recorded, nodes=tuple(replace(c, **fields) if c.name == name else c for c in recorded.nodes))


def test_complex_inputs_and_results_are_refused_by_name() -> None:
    recorded = program("spectrogram")
    node = next(c for c in recorded.nodes if c.op == "aten.stft.default")
    with pytest.raises(ParseError, match=r"output 'output': .* return torch.view_as_real"):
        import_program(replace(recorded, outputs=(("output", Ref(node.name)),)))
    given = TorchTensor(recorded.inputs[0][1].dims, None, "torch.complex64")
    with pytest.raises(ParseError, match=r"input args_0: .* got torch.complex64; .* torch.view_as_complex"):
        import_program(replace(recorded, inputs=((recorded.inputs[0][0], given),)))


def test_unsupported_complex_operators_are_refused_by_name() -> None:
    recorded = program("functions")
    node = next(c for c in recorded.nodes if c.op == "aten.exp.default")
    with pytest.raises(
        ParseError, match=rf"node '{node.name}', operator aten.tanh.default .*: complex .*of the real parts"
    ):
        import_program(changed(recorded, node.name, op="aten.tanh.default"))
    power = next(c for c in program("products").nodes if c.op == "aten.pow.Tensor_Scalar")
    with pytest.raises(ParseError, match=r"aten.pow.Tensor_Scalar .* power of 2 or 3"):
        import_program(changed(program("products"), power.name, args=(power.args[0], 2.5)))


def test_complex_operands_of_branches_are_refused_by_name() -> None:
    recorded = program("functions")
    node = next(c for c in recorded.nodes if c.op == "aten.exp.default")
    call = TorchCall(node.name, "higher_order.cond", node.args, {}, node.result)
    changed_nodes = tuple(call if c.name == node.name else c for c in recorded.nodes)
    with pytest.raises(ParseError, match=r"operator higher_order.cond .* supported for complex tensors"):
        import_program(replace(recorded, nodes=changed_nodes))
