"""Weights of built artifacts replaced, against builds of the other model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.ir.frontend.hf.test_adapter import write as write_adapter
from tests.support import tiny_decoders
from tests.support.effort import GENERIC
from tests.tuner.cli.cli_model import make_bert

import relax_tune as rt
from relax_tune.errors import ArtifactError, ModelStateError, RelaxTuneWarning, UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.math.elementwise import Exp, Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.text.parser import parse_module
from relax_tune.runtime.artifact import Artifact
from relax_tune.tuner.job.lowered_model import lowered_module
from relax_tune.tuner.settings import merge_settings

BOUNDS = {"b": (1, 2), "n": (1, 8)}
QUERY = "encoder.layer.0.attention.self.query.weight"
IDS = np.array([[2, 5, 7]])
ROWS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)


def build(model: Any, **options: Any) -> Artifact:
    kernels = {} if options.get("pack") else GENERIC  # only chosen kernels have layouts of their own
    return rt.build(model, target="c", db="memory://", self_test=False, **{**kernels, **options})


def folded(seed: int, bias: float = 0.0) -> Any:
    """A model whose weight is the exponential of a constant, which lowering computes."""
    graph = rt.GraphBuilder()
    x = graph.input("x", (graph.symbol("n", 1, 16), 8))
    weight = graph.constant("weight", np.random.default_rng(seed).standard_normal((8, 40)).astype(np.float32) + bias)
    return graph.finish(graph.call(Relu(), graph.call(Matmul(), x, graph.call(Exp(), weight))))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and another one of the same structure."""
    root = tmp_path_factory.mktemp("models")
    return make_bert(root / "base"), make_bert(root / "tuned", seed=5)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "packed"])
def built(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Artifact:
    return build(folders[0], bounds=BOUNDS, pack=request.param)


def expected(model: Path | IRModule) -> np.ndarray[Any, Any]:
    module = rt.load_model(model, bounds=BOUNDS) if isinstance(model, Path) else model
    return run_function(module, "main", [IDS, np.ones_like(IDS)])  # type: ignore[return-value]


def call(artifact: Artifact, *inputs: Any) -> list[np.ndarray[Any, Any]]:
    with artifact.open() as model:
        return list(model(*inputs))


@pytest.mark.parametrize("pack", [False, True])
def test_folded_and_packed_weights_are_computed_anew(pack: bool) -> None:
    built, other = build(folded(1), pack=pack), folded(2)
    replaced = rt.replace_weights(built, other)
    wanted = build(other, pack=pack)
    assert replaced.programs == built.programs
    assert {n: a.tobytes() for n, a in replaced.constants.items()} == {
        n: a.tobytes() for n, a in wanted.constants.items()
    }
    assert replaced.manifest["extra"]["model"] == wanted.manifest["extra"]["model"]
    weight = other.constants["weight"].astype(np.float64)
    np.testing.assert_allclose(call(replaced, ROWS)[0], np.maximum(ROWS @ np.exp(weight), 0), rtol=1e-5)
    assert np.abs(call(built, ROWS)[0] - call(replaced, ROWS)[0]).max() > 0.1


def test_fine_tuned_folder_replaces_the_weights_of_a_saved_artifact(
    built: Artifact, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_tune.runtime.hashed_zip.BLOCK_BYTES", 4096)  # larger constants are mapped
    path = built.save(tmp_path / "base.rta")
    saved = rt.replace_weights(path, folders[1]).save(tmp_path / "tuned.rta")
    with rt.load(path) as model:
        bound = model.bind([IDS, np.ones_like(IDS)])
        for file, folder in ((saved, folders[1]), (path, folders[0])):
            model.replace_weights(rt.load_artifact(file))
            np.testing.assert_allclose(model(IDS, np.ones_like(IDS))[0], expected(folder), atol=1e-5)
            np.testing.assert_allclose(bound.run()[0], expected(folder), atol=1e-5)


def test_adapter_of_the_model_replaces_weights(built: Artifact, tmp_path: Path) -> None:
    base, adapter, _ = write_adapter(tmp_path, "bert")
    replaced = rt.replace_weights(built, base, adapter=adapter)
    wanted = expected(rt.load_model(base, bounds=BOUNDS, adapter=adapter))
    np.testing.assert_allclose(call(replaced, IDS, np.ones_like(IDS))[0], wanted, atol=1e-5)
    assert np.abs(wanted - expected(base)).max() > 1e-2


def test_both_functions_of_an_open_decoder_get_other_weights(tmp_path: Path) -> None:
    folder, _ = tiny_decoders.write(tmp_path, tiny_decoders.MODELS[0])
    bounds = {"b": (1, 2), "n": (1, 8), "m": (0, 16)}
    built = build(folder, bounds=bounds, pack=True)
    prompt = np.array([[1, 2, 3]])
    with built.open() as model:
        first = rt.generate(model, prompt, max_new_tokens=6)
        tensors = {
            n: a[::-1].copy() if n == "lm_head.weight" else a
            for n, a in load_file(folder / "model.safetensors").items()
        }
        save_file(tensors, folder / "model.safetensors")
        model.replace_weights(rt.replace_weights(built, folder))
        second = rt.generate(model, prompt, max_new_tokens=6)
        (logits, *caches) = model.run([prompt], "prefill")
        following = model.run([logits.argmax(-1), *caches], "decode")[0]
    module = rt.load_model(folder, bounds=bounds)
    wanted = run_function(module, "prefill", [prompt])
    np.testing.assert_allclose(logits, wanted[0], atol=1e-4)
    wanted = run_function(module, "decode", [logits.argmax(-1), *wanted[1:]])
    np.testing.assert_allclose(following, wanted[0], atol=1e-4)
    assert not np.array_equal(first, second)


def test_arrays_replace_weights_by_name(built: Artifact, folders: tuple[Path, Path]) -> None:
    module, other = rt.load_model(folders[0], bounds=BOUNDS), np.full((32, 32), 0.125, np.float32)
    replaced = rt.replace_weights(built, {QUERY: other})
    wanted = expected(replace(module, constants={**module.constants, QUERY: other}))
    np.testing.assert_allclose(call(replaced, IDS, np.ones_like(IDS))[0], wanted, atol=1e-5)
    assert replaced.manifest["extra"]["model"] != built.manifest["extra"]["model"]


@pytest.mark.parametrize("arrays, message", [
    ({QUERY: np.zeros((32, 31), np.float32)}, rf"weight {QUERY}: expected float32 \(32, 32\), got shape \(32, 31\)"),
    ({QUERY: np.zeros((32, 32))}, rf"weight {QUERY}: expected .*float32.*, got .*float64"),
    ({QUERY.replace("query", "quarry"): np.zeros((32, 32), np.float32)}, f"the nearest are .*{QUERY}"),
    ({"hidden": np.ones((), np.int64)}, "weight hidden: expected the integers of the artifact"),
])  # fmt: skip
def test_arrays_of_other_shapes_types_and_names_are_refused(
    built: Artifact, arrays: Mapping[str, Any], message: str
) -> None:
    if QUERY not in built.constants and "nearest" in message:
        message = "expected the name of a constant"
    with pytest.raises(UserError, match=message):
        rt.replace_weights(built, arrays)


def test_models_of_another_structure_are_refused(built: Artifact, folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_bert(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(UserError, match=r"another program without the weight encoder\.layer\.1"):
        rt.replace_weights(built, other)
    (other / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(UserError, match="becomes another program; load it as"):
        rt.replace_weights(built, other)
    with pytest.raises(UserError, match="becomes another program"):
        rt.replace_weights(built, folders[0], bounds={"b": (1, 2), "n": (1, 9)})
    with pytest.raises(UserError, match="give them to load_model"):
        rt.replace_weights(built, rt.load_model(folders[0], bounds=BOUNDS), pooling="cls")


def test_artifacts_without_facts_of_lowering_are_refused(built: Artifact, folders: tuple[Path, Path]) -> None:
    extra = built.manifest["extra"]
    for name, message in (("lowering", "it does not say how"), ("packed", "expected how its weights were packed")):
        wrong = {**extra, name: {"steps": {"a": {"function": 3}}}}
        with pytest.raises(ArtifactError, match=message):
            rt.replace_weights(replace(built, manifest={**built.manifest, "extra": wrong}), folders[0])


def test_types_of_weights_are_followed(folders: tuple[Path, Path]) -> None:
    settings = merge_settings("build", None, {"weights": "int8"})
    wanted = lowered_module(rt.load_model(folders[1], bounds=BOUNDS), settings).module.constants
    with pytest.warns(RelaxTuneWarning, match="weights int8"):
        int8 = build(folders[0], bounds=BOUNDS, weights="int8", pack=False)
    replaced = rt.replace_weights(int8, folders[1])
    assert any(a.dtype == np.int8 for a in replaced.constants.values())
    for name, array in replaced.constants.items():
        np.testing.assert_array_equal(array, wanted[name])


def test_open_model_refuses_weights_of_other_programs(built: Artifact) -> None:
    with built.open() as model, pytest.raises(UserError, match="expected an artifact of the same programs"):
        model.replace_weights(build(folded(1)))
    with pytest.raises(ModelStateError, match="got one that was closed"):
        model.replace_weights(built)


BRANCHES = """
module(version=1)

@function
def main(c: Tensor((), bool), x: Tensor((3,), f32)) -> Tensor((3,), f32):
    y: Tensor((3,), f32)
    if c:
        y = const("w", Tensor((3,), f32))
    else:
        with dataflow():
            a: Tensor((3,), f32) = op.add(x, const("w", Tensor((3,), f32)))
        y = a
    return y
"""


def test_weights_returned_by_branches_are_replaced() -> None:
    x, old, new = (np.full(3, v, np.float32) for v in (1, 2, 4))
    built = build(parse_module(BRANCHES, OPERATORS, {"w": old}))
    assert built.host_programs
    with built.open() as model:
        for weights in (old, new):
            model.replace_weights({"w": weights})
            np.testing.assert_array_equal(model(np.True_, x)[0], weights)
            np.testing.assert_array_equal(model(np.False_, x)[0], x + weights)


@pytest.mark.opencl
def test_weights_in_the_memory_of_a_device_are_replaced() -> None:
    built = rt.build(folded(1), target="opencl", db="memory://", self_test=False)
    with built.open() as model:
        model.replace_weights(rt.replace_weights(built, folded(2)))
        weight = folded(2).constants["weight"].astype(np.float64)
        np.testing.assert_allclose(model(ROWS)[0], np.maximum(ROWS @ np.exp(weight), 0), rtol=1e-5)
