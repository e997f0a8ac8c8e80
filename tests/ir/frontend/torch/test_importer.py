"""Transformers exported by torch.export: recorded programs against what torch said of them, interpreted and compiled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from tests.support.meaning import own_results

from relax_tune.database.memory_store import MemoryStore
from relax_tune.errors import ParseError, UserError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, Function, GVar, TupleValue
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.frontend.torch import export
from relax_tune.ir.frontend.torch.importer import SUPPORTED, import_program
from relax_tune.ir.frontend.torch.program import (
    Ref,
    TorchCall,
    TorchProgram,
    TorchSymbol,
    TorchTensor,
    from_json,
    to_json,
)
from relax_tune.ir.interp.reference import evaluate_function
from relax_tune.ir.op.indexing.movement import BroadcastTo
from relax_tune.ir.op.math.elementwise import Rsqrt
from relax_tune.ir.op.neural.decoder import RmsNorm, Rotary
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.passes.graph.cleanup import DeadCode
from relax_tune.ir.passes.graph.decompose import Decompose
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.text.parser import parse_module
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.executor import Executor
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.settings import Settings

DATA = Path(__file__).parents[3] / "data"
NAMES = ("bert", "gpt2_eager", "llama_cache", "qwen2")
MORE = ("gpt2_cache", "llama_prefill", "qwen2_decode")

Array = np.ndarray[Any, Any]


def recorded(name: str, folder: Path = DATA) -> tuple[TorchProgram, list[tuple[list[Array], list[Array]]]]:
    """A recorded program, and (inputs, torch's results) of every case."""
    with np.load(folder / f"torch_{name}.npz") as found:
        arrays = dict(found)
    weights = {key.removeprefix("w_"): a for key, a in arrays.items() if key.startswith("w_")}
    program = from_json((folder / f"torch_{name}.json").read_text(), weights)

    def listed(kind: str, k: int) -> list[Array]:
        return [arrays[f"{kind}_{k}_{p}"] for p in range(len(arrays)) if f"{kind}_{k}_{p}" in arrays]

    cases = []
    while listed("in", len(cases)):
        cases.append((listed("in", len(cases)), listed("out", len(cases))))
    assert len(cases) >= 4
    return program, cases


def agree(module: IRModule, cases: list[tuple[list[Array], list[Array]]]) -> None:
    """Graph and lowered form give torch's results."""
    for form in (module, lower(module).module):
        for inputs, wanted in cases:
            found = evaluate_function(form, inputs)
            for f, w in zip(own_results(found, module), wanted, strict=True):
                assert f.shape == w.shape
                np.testing.assert_allclose(f, w, atol=1e-5, rtol=1e-4)


def result_names(module: IRModule) -> list[str]:
    ret = main_of(module).ret
    return [f.name for f in (ret.fields if isinstance(ret, TupleValue) else (ret,)) if isinstance(f, GVar)]


def main_of(module: IRModule) -> Function:
    found = module.functions["main"]
    assert isinstance(found, Function)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", (*NAMES, *MORE))
def test_recorded_transformers_give_torch_s_results(name: str) -> None:
    program, cases = recorded(name)
    module = import_program(program)
    verify(module)
    agree(module, cases)


@pytest.mark.ccompiler
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("name", NAMES)
def test_recorded_transformers_compiled(name: str) -> None:
    """One artifact for every batch, length and filling of the cache."""
    program, cases = recorded(name)
    module = import_program(program)
    device = open_device("c")
    try:
        job = device_job(module, device.info, MemoryStore(), Settings(target="c"))
        built = job.build("generic").program
        names = {b.name for b in built.buffers if b.role == "const"}
        weights = {n: np.asarray(a, order="C") for n, a in job.lowered.module.constants.items() if n in names}
        executor = Executor(built, device, weights)
        assert [built.buffers[i].name for i in built.outputs] == result_names(module)
        for inputs, wanted in cases:
            found = executor.run({p.name: a for p, a in zip(main_of(module).params, inputs, strict=True)})
            for f, w in zip(found, wanted, strict=True):
                np.testing.assert_allclose(f, w, atol=1e-4, rtol=1e-4)
        executor.close()
    finally:
        device.close()


def test_names_ranges_and_ties_are_kept() -> None:
    module = import_program(recorded("qwen2")[0])
    assert [(b.var.name, b.lower, b.upper) for b in module.bounds] == [("batch", 1, 8), ("seq", 1, 48)]
    assert [p.name for p in main_of(module).params] == ["input_ids", "attention_mask"]
    assert main_of(module).ret.name == "logits"  # type: ignore[union-attr]
    tied = [n for n, a in module.constants.items() if a.shape == (61, 16)]
    assert tied == ["inner.model.embed_tokens.weight"]
    assert [n for n, a in module.constants.items() if a.shape == (16, 61)] == []
    cache = import_program(recorded("llama_cache")[0], {"past": (0, 8)})
    assert [(b.var.name, b.lower, b.upper) for b in cache.bounds] == [("batch", 1, 8), ("seq", 1, 16), ("past", 0, 8)]
    assert [p.name for p in main_of(cache).params] == ["input_ids", "key_0", "value_0", "key_1", "value_1"]
    fields = main_of(cache).ret.fields  # type: ignore[union-attr]
    assert [f.name for f in fields] == ["logits", "keys_0", "values_0", "keys_1", "values_1"]
    assert [repr(f.info) for f in fields[:2]] == [
        "Tensor((batch, seq, 61), f32)", "Tensor((batch, 2, past + seq, 4), f32)"
    ]  # fmt: skip


def test_grouped_heads_are_not_copied() -> None:
    module = DeadCode()(Decompose()(import_program(recorded("llama_cache")[0])))
    calls = [b.value for b in main_of(module).bindings if isinstance(b.value, Call)]
    ranks = [b.info.ndim for c in calls if isinstance(c.op, Matmul) for b in c.args if isinstance(b.info, TensorInfo)]  # type: ignore[union-attr]
    assert ranks.count(5) == 8  # queries and keys, weights and values of two layers
    assert not any(isinstance(c.op, BroadcastTo) and len(c.op.shape) == 5 for c in calls)


@pytest.mark.parametrize("name", ("llama_cache", "qwen2"))
def test_norms_and_rotations_are_one_operator_each(name: str) -> None:
    found = [type(b.value.op) for b in main_of(import_program(recorded(name)[0])).bindings if isinstance(b.value, Call)]
    assert (found.count(RmsNorm), found.count(Rotary), found.count(Rsqrt)) == (5, 4, 0)  # of two layers and behind them


def test_imported_programs_print_and_parse() -> None:
    module = import_program(recorded("llama_cache")[0])
    assert print_text(parse_module(print_text(module), OPERATORS, module.constants)) == print_text(module)


@pytest.mark.parametrize("name", NAMES)
def test_recording_is_lossless(name: str) -> None:
    program, _ = recorded(name)
    again = from_json(to_json(program), program.weights)
    assert again == program


def test_bounds_within_the_exported_ranges() -> None:
    program, _ = recorded("bert")
    with pytest.raises(UserError, match=r"bounds of n: .* which are batch, seq"):
        import_program(program, {"n": (1, 4)})
    with pytest.raises(UserError, match=r"bound of seq: .* got 1 to 49"):
        import_program(program, {"seq": (1, 49)})
    with pytest.raises(UserError, match=r"bound of batch: .* 0 to 4"):
        import_program(program, {"batch": (0, 4)})
    auto = replace(program, symbols=(TorchSymbol("batch", 2, 8), *program.symbols[1:]))
    with pytest.raises(
        UserError,
        match=r'got 1 to 4; .*torch.export.Dim\("batch", min=1\)',
    ):
        import_program(auto, {"batch": (1, 4)})


def changed(program: TorchProgram, name: str, **fields: Any) -> TorchProgram:
    return replace(program, nodes=tuple(replace(c, **fields) if c.name == name else c for c in program.nodes))


def test_load_torch_unsupported_operator_names_similar() -> None:
    program, _ = recorded("qwen2")
    node = next(c for c in program.nodes if c.op == "aten.silu.default")
    with pytest.raises(ParseError) as error:
        import_program(changed(program, node.name, op="aten.silu_backward.default"))
    text = str(error.value)
    assert text.startswith(f"node '{node.name}', operator aten.silu_backward.default of (matmul")
    assert f"expected one of the {len(SUPPORTED)} supported operators" in text
    assert re.search(r"fed by aten\.linear\.default 'linear_\d+', read by aten\.mul\.Tensor 'mul_\d+'", text)
    assert re.search(r"from \w+\.py:\d+: ", text)
    assert "near in name and supported: aten.silu.default" in text


def test_a_result_unlike_torch_s_is_refused() -> None:
    program, _ = recorded("bert")
    node = next(c for c in program.nodes if c.op == "aten.gelu.default")
    wrong = replace(node.result, element=i64)
    with pytest.raises(ParseError, match=r"expected .*Tensor\(.*, i64\), got .*f32"):
        import_program(changed(program, node.name, result=wrong))


def test_load_torch_unsupported_element_type_is_named() -> None:
    program, _ = recorded("bert")
    name, meta = program.inputs[0]
    given = replace(program, inputs=((name, replace(meta, element=None, spelled="torch.quint8")), program.inputs[1]))
    with pytest.raises(ParseError, match=r"input input_ids: .* element type .* got torch\.quint8"):
        import_program(given)


def limited(low: int, high: int, *conditions: tuple[str, Any, Any], **ranges: tuple[int, int]) -> IRModule:
    """A program of x (n, 3) and y (2 * m, 3) that was exported with limits of `2 * m`, and asserts conditions on dims."""
    x, y = TorchTensor(("n", 3), f32), TorchTensor((["mul", 2, "m"], 3), f32)
    nodes = [
        TorchCall("n", "aten.sym_size.int", (Ref("x"), 0), {}),
        TorchCall("k", "aten.sym_size.int", (Ref("y"), 0), {}),
    ]
    for p, (op, a, b) in enumerate(conditions):
        nodes.append(TorchCall(f"c{p}", f"sym.{op}", (a, b), {}))
        nodes.append(TorchCall(f"a{p}", "aten._assert_scalar.default", (Ref(f"c{p}"), "said so"), {}))
    nodes += [TorchCall(f"{v}_relu", "aten.relu.default", (Ref(v),), {}, t) for v, t in (("x", x), ("y", y))]
    symbols = tuple(TorchSymbol(v, *ranges.get(v, (0, None))) for v in "nm")  # type: ignore[arg-type]
    outputs = (("x_relu", Ref("x_relu")), ("y_relu", Ref("y_relu")))
    made = TorchProgram(symbols, (("x", x), ("y", y)), {}, {}, tuple(nodes), outputs, ((["mul", 2, "m"], low, high),))
    assert from_json(to_json(made), {}) == made
    return import_program(made)


@pytest.mark.ccompiler
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_torch_asserted_dims_are_checked_at_run_time() -> None:
    module = limited(0, 8, ("eq", Ref("n"), Ref("k")), ("le", Ref("n"), 6), ("eq", Ref("n"), Ref("k")))
    verify(module)
    checks = lower(module).checks["main"]
    required = [re.sub(r"\n.*", "", c.message, flags=re.S) for c in checks if "required" in c.message]
    assert [m.partition("got {1} ")[2] for m in required] == [
        "(y_0 // 2 * 2 <= 8) (y_0: dim 0 of parameter y)",
        "(n == y_0 // 2 * 2) (y_0: dim 0 of parameter y)",
        "(n <= 6)",
    ]
    device = open_device("c")
    try:
        executor = Executor(
            device_job(module, device.info, MemoryStore(), Settings(target="c")).build("generic").program, device, {}
        )
        for n, k, wrong in (
            (4, 4, ""),
            (4, 6, r"got 0 \(n == "),
            (8, 8, r"got 0 \(n <= 6"),
            (10, 10, "got 0 .* <= 8"),
        ):
            arrays = [np.ones((size, 3), np.float32) for size in (n, k)]
            if wrong:
                with pytest.raises(UserError, match=wrong):
                    executor.run(arrays)
            else:
                assert [a.shape for a in executor.run(arrays)] == [(n, 3), (k, 3)]
        executor.close()
    finally:
        device.close()


def test_load_torch_limits_implied_unchecked_impossible_refused() -> None:
    decided = lower(limited(0, 8, ("le", Ref("n"), 6), n=(0, 5), m=(0, 4)))
    assert not any("required" in c.message for c in decided.checks["main"])
    with pytest.raises(ParseError, match="expected a condition that can hold"):
        limited(0, 8, ("lt", Ref("n"), Ref("n")))
    with pytest.raises(UserError, match=r"bounds of m \* 2: expected 0 to 8"):
        limited(0, 8, m=(5, 9))


@pytest.mark.parametrize("axes", [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 1, 3)])
def test_load_torch_index_of_any_dims_puts_index_dims_where_torch_does(axes: tuple[int, ...]) -> None:
    x = np.arange(120).reshape(2, 3, 4, 5)
    places = [np.array([[0, 1, 1]]), np.array([[1], [-1]]), np.array([[0, -2, 1]])][: len(axes)]
    at = [slice(None)] * 4
    for axis, i in zip(axes, places):
        at[axis] = i  # type: ignore[call-overload]
    given = [Ref(f"i{axes.index(p)}") if p in axes else None for p in range(axes[-1] + 1)]
    wanted = x[tuple(at)]
    tensors = tuple((f"i{k}", TorchTensor(i.shape, i64)) for k, i in enumerate(places))
    node = TorchCall("y", "aten.index.Tensor", (Ref("x"), given), {}, TorchTensor(wanted.shape, i64))
    inputs = (("x", TorchTensor(x.shape, i64)), *tensors)
    module = import_program(TorchProgram((), inputs, {}, {}, (node,), (("y", Ref("y")),)))
    np.testing.assert_array_equal(evaluate_function(module, [x, *places]), wanted)


def test_load_torch_as_strided_with_symbolic_strides_is_reshape() -> None:
    x = TorchTensor(("n", "m"), f32)
    layout = {"strides": ["m", 1], "first": 0}
    flat = TorchCall(
        "y", "aten.as_strided.default", (Ref("x"), [Ref("k")], [1]), layout, TorchTensor((["mul", "n", "m"],), f32)
    )
    nodes = [TorchCall(v, "aten.sym_size.int", (Ref("x"), p), {}) for p, v in enumerate("nm")]
    nodes += [TorchCall("k", "sym.mul", (Ref("n"), Ref("m")), {}), flat]
    symbols = tuple(TorchSymbol(v, 1, None) for v in "nm")
    made = TorchProgram(symbols, (("x", x),), {}, {}, tuple(nodes), (("y", Ref("y")),))
    assert from_json(to_json(made), {}) == made
    given = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(evaluate_function(import_program(made), [given]), given.ravel())


def test_load_torch_data_dependent_dims_raise() -> None:
    x = TorchTensor(("n",), f32)
    node = TorchCall("y", "aten.relu.default", (Ref("x"),), {}, TorchTensor(("u0",), f32))
    program = TorchProgram((), (("x", TorchTensor((3,), f32)),), {}, {}, (node,), (("y", Ref("y")),))
    with pytest.raises(ParseError, match=r"node 'y', operator aten\.relu\.default.*got u0, .*data"):
        import_program(program)
    with pytest.raises(ParseError, match=r"got n, which depends on data"):
        import_program(replace(program, inputs=(("x", x),)))


def torch_python() -> tuple[str, dict[str, str]]:
    """A Python that has torch and transformers, and the environment in which it finds this package; skips without one."""
    python = os.environ.get("RELAX_TUNE_TORCH_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import torch, transformers"], capture_output=True).returncode:
        pytest.skip("needs torch and transformers (RELAX_TUNE_TORCH_PYTHON names a Python that has them)")
    return python, {**os.environ, "PYTHONPATH": str(DATA.parent.parent / "src")}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.torch
def test_transformers_exported_now(tmp_path: Path) -> None:
    python, environment = torch_python()
    names = ("bert_eager", "gpt2", "llama", "qwen2_eager")
    command = [python, str(DATA / "make_torch_programs.py"), str(tmp_path), *names]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    for name in names:
        program, cases = recorded(name, tmp_path)
        agree(import_program(program), cases)


SAVED = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from make_torch_programs import exported, module
from relax_tune.errors import ParseError
from relax_tune.ir.frontend.load import load_model
program, _ = exported("qwen2")
torch.export.save(program, sys.argv[2])
one, two = load_model(program, {"seq": (1, 9)}), load_model(sys.argv[2], {"input_ids_1": (1, 9)})
print([(b.var.name, b.lower, b.upper) for b in (*one.bounds, *two.bounds)])
print(list(one.constants) == list(two.constants), len(one.functions["main"].bindings) == len(two.functions["main"].bindings))
class Keeps(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(3))
    def forward(self, x):
        self.last.copy_(x)
        return x + 1
kept = load_model(torch.export.export(Keeps(), (torch.ones(3),))).functions["main"]
print([p.name for p in kept.params], len(kept.ret.fields))
open(sys.argv[2], "wb").write(b"no archive")
try:
    load_model(sys.argv[2], trust=True)
except ParseError as error:
    print(error)
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.torch
def test_saved_programs_and_side_effects(tmp_path: Path) -> None:
    python, environment = torch_python()
    command = [python, "-c", SAVED, str(DATA), str(tmp_path / "model.pt2")]
    done = subprocess.run(command, check=True, capture_output=True, env=environment, text=True)
    bounds, same, effect, archive = done.stdout.splitlines()[:4]
    assert bounds == str([("batch", 1, 8), ("seq", 1, 9), ("input_ids_0", 1, 8), ("input_ids_1", 1, 9)])
    assert same == "True True"
    assert effect == "['x', 'b_last'] 2"  # the state is an input and a result
    assert "model.pt2: expected a program saved by torch.export.save, got: " in archive


NAMED = """
import json, re, sys, torch
from relax_tune.errors import ParseError, UserError
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.interp.interp_graph import run_function
class Scored(torch.nn.Module):
    def forward(self, ids, mask):
        return {"scores": torch.softmax(ids * mask[..., None], -1)}
def export(batch, length, rows=2):
    example = torch.randn(rows, 5, 3), torch.ones(rows, 5)
    return torch.export.export(Scored(), example, dynamic_shapes={k: {0: batch, 1: length} for k in ("ids", "mask")})
def said(fn, *args):
    try:
        fn(*args, trust=True)
    except (ParseError, UserError) as error:
        print(error)
    else:
        print("no error")
Dim, path = torch.export.Dim, sys.argv[1]
program = export(Dim("batch", min=1, max=8), Dim("length", min=1, max=48))
names = {k: {0: "batch", 1: "length"} for k in ("ids", "mask")}
for dims in (names, {"ids": names["ids"]}, {"ids": {2: "width"}}, {"ids": {0: "n", 1: "n"}}, {"ids": {0: "n"}, "mask": {0: "b"}}, [], 0):
    torch.export.save(program, path, extra_files={"dims.json": json.dumps(dims)})
    try:
        module = load_model(path, {"length": (1, 9)})
        main = module.functions["main"]
        print([(b.var.name, b.lower, b.upper) for b in module.bounds], [p.name for p in main.params], main.ret.name)
    except ParseError as error:
        print(error)
auto = export(Dim.AUTO, Dim.AUTO)
torch.export.save(auto, path)
said(load_model, path, {"ids_0": (1, 8)})
said(load_model, export(Dim.AUTO, Dim.AUTO, 1), {"ids_0": (1, 8)})
try:
    load_model(path, {"ids_0": (1, 8)}, trust=True)
except UserError as error:
    advised = eval("torch.export." + re.search(r"Dim\\(.*?\\)", str(error))[0])
module = load_model(export(advised, Dim("length", min=1)), {"ids_0": (1, 8)})
x = torch.randn(1, 1, 3)
found = run_function(module, "main", [x.numpy(), torch.ones(1, 1).numpy()])
print(float(abs(torch.from_numpy(found) - torch.softmax(x, -1)).max()) < 1e-6)
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.torch
def test_saved_names_of_dims_and_advice_for_batch_1(tmp_path: Path) -> None:
    python, environment = torch_python()
    command = [python, "-W", "ignore", "-c", NAMED, str(tmp_path / "model.pt2")]
    done = subprocess.run(command, check=True, capture_output=True, env=environment, text=True)
    named, some, fixed, twice, both, listed, number, auto, static, right = done.stdout.splitlines()
    assert named == some == "[('batch', 1, 8), ('length', 1, 9)] ['ids', 'mask'] scores"
    assert "expected inputs of the program and axes whose dims are dynamic, got 'ids[2]'" in fixed
    assert "expected one name for each dim that differs, and one dim for n, got 'ids[1]'" in twice
    assert "expected one name for each dim that differs, and one dim for b, got 'mask[0]'" in both
    assert "expected an object of the names of dims by input and axis, got []" in listed
    assert "expected an object of the names of dims by input and axis, got 0" in number
    assert 'export it with torch.export.Dim("ids_0", min=1) and an example in which this dim is 2 or more' in auto
    assert 'ids[0] is 1: for a dim there, export with torch.export.Dim("ids_0", min=1) and an example' in static
    assert right == "True"


FLOAT8 = """
import numpy as np, torch
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.interp.interp_graph import run_function
x = torch.cat([torch.tensor([464.0, 465.0, 1e9, -1e9, float("nan"), float("inf"), 0.3, -0.0, 1e-40]), torch.randn(90) * 99])
for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"):
    class Casts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("w", torch.randn(3, 2).to(getattr(torch, name)))
        def forward(self, x):
            y = x.to(getattr(torch, name))
            return y.reshape(-1, 1), y.to(torch.float16), self.w.to(torch.float32)
    program = torch.export.export(Casts(), (x,), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    made, *got = run_function(load_model(program), "main", [x.numpy()])
    said, *expected = program.module()(x)
    assert made.dtype == name and made.shape == tuple(said.shape)
    np.testing.assert_array_equal(made.astype(np.float32), said.float().numpy())
    for f, w in zip(got, expected, strict=True):
        np.testing.assert_array_equal(f, w.numpy())
    print(name)
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.torch
def test_float8_casts_give_torch_s_results() -> None:
    python, environment = torch_python()
    done = subprocess.run([python, "-c", FLOAT8], check=True, capture_output=True, env=environment, text=True)
    assert len(done.stdout.splitlines()) == 5


def test_torch_export_failing_decomposition_is_a_parse_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class ExportedProgram:
        __module__ = "torch.export.exported_program"
        graph = SimpleNamespace(nodes=[])

        def run_decompositions(self, table: Any) -> Any:
            raise IndexError("tuple index out of range\nmore")

    monkeypatch.setattr(export, "require_torch", MagicMock)
    with pytest.raises(ParseError, match="core ATen operators, got IndexError: tuple index"):
        export.plain_program(ExportedProgram())


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    file = tmp_path / "model.pt2"
    file.write_bytes(b"")
    with pytest.raises(UserError, match=r"the torch package .* 'relax-tune\[torch\]'"):
        load_model(file, trust=True)
