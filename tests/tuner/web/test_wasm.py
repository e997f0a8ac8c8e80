"""The browser's runtime on WebAssembly, in node: results of Python's runtime, caches, errors in words; what the server gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import tiny_decoders
from tests.support.tuner_models import feed_forward
from tests.tuner.dashboard.asking import ask
from tests.tuner.web.pages import served
from tests.tuner.web.wasm_calls import arrays, built, in_node, listed, needs_clang, opened_here

from relax_tune.errors import BuildError, UserError
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.hf.folder import load_hf
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.runtime.artifact import load_artifact, save_artifact
from relax_tune.runtime.hashed_zip import write_file
from relax_tune.runtime.program.program import BufferSpec, Program, Symbol
from relax_tune.tuner.web.server import ServedModel, make_web_app, served_model
from relax_tune.tuner.web.wasm import MODULE, WasmFiles, wasm_files

LENGTHS = (1, 2, 3, 7, 16, 37, 64, 128)
PROMPT = [5, 9, 2, 11]
STEPS = 6
pytest.importorskip("starlette", reason="starlette is not installed (extra dashboard)")
compiled = [pytest.mark.cross, pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """Two linear layers, 1 to 128 rows."""
    needs_clang()
    path = built(feed_forward(), tmp_path_factory.mktemp("wasm") / "layers.rta")
    return ServedModel(path, "search", gpu=False, wasm=wasm_files(load_artifact(path)))


@pytest.fixture(scope="module")
def address(layers: ServedModel) -> Iterator[str]:
    with served(layers) as found:
        yield found


def rows(n: int, width: int = 24) -> np.ndarray[Any, Any]:
    return np.random.default_rng(n).standard_normal((n, width)).astype(np.float32)


def step(function: str, **inputs: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"call": function, "inputs": listed(inputs)}


class TestLayers:
    pytestmark = compiled

    def test_results_equal_python(self, address: str, layers: ServedModel) -> None:
        opened, *found = in_node(address, *(step("main", x=rows(n)) for n in LENGTHS))
        assert opened == ["WebAssembly", 1]
        with opened_here(layers.path) as model:
            for n, answer in zip(LENGTHS, found, strict=True):
                np.testing.assert_allclose(arrays(answer)[0], model.run([rows(n)])[0], atol=1e-4, rtol=0)

    def test_wrong_arguments_are_refused_and_later_calls_go_on(self, address: str, layers: ServedModel) -> None:
        _, beyond, narrow, found = in_node(
            address, step("main", x=rows(129)), step("main", x=rows(2, 23)), step("main", x=rows(3))
        )
        assert "expected n from 1 to 128, got 129" in beyond
        assert "expected 24 in dim 1, got 23" in narrow
        with opened_here(layers.path) as model:
            np.testing.assert_allclose(arrays(found)[0], model.run([rows(3)])[0], atol=1e-4, rtol=0)

    @pytest.mark.parametrize(
        "script, message",
        [
            ("WebAssembly.validate = () => false;", "This browser's WebAssembly has no SIMD"),
            (
                "Object.defineProperty(globalThis, 'crypto', { value: undefined });",
                "verifies no downloads here; open the page from localhost or over https",
            ),
            ("delete globalThis.WebAssembly;", "This browser runs no WebAssembly"),
            (
                "WebAssembly.compile = async () => { throw new Error('forbidden'); };",
                "refuses the model's WebAssembly: forbidden",
            ),
        ],
    )
    def test_missing_webassembly_is_said_in_words(self, address: str, script: str, message: str) -> None:
        (said,) = in_node(address, before=script)
        assert said.startswith("ModelError: ") and message in said

    @pytest.mark.parametrize("part", ["module", "weights"])
    def test_altered_file_is_refused_before_running(self, layers: ServedModel, tmp_path: Path, part: str) -> None:
        assert layers.wasm is not None
        data = bytearray(getattr(layers.wasm, part).read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / part).write_bytes(data)
        files = {"module": layers.wasm.module, "weights": layers.wasm.weights, part: tmp_path / part}
        run = "WebAssembly.instantiate = () => { throw new Error('it runs'); };" if part == "module" else ""
        with served(ServedModel(layers.path, "search", gpu=False, wasm=WasmFiles(**files))) as found:
            (said,) = in_node(found, before=run)
        assert "does not fit its hash" in said

    def test_second_compilation_comes_from_the_cache(
        self, layers: ServedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("relax_tune.tuner.web.wasm._compile", None)
        assert wasm_files(load_artifact(layers.path)) == layers.wasm

    def test_fallback_of_other_functions_is_refused(self, layers: ServedModel, tmp_path: Path) -> None:
        first = artifact(tmp_path / "first.rta", "webgpu", program("prefill"), program("decode"))
        second = artifact(tmp_path / "second.rta", "c:wasm32", program("main"))
        with pytest.raises(UserError, match=r"--fallback .*: .*first.rta, got others"):
            served_model(first, fallback=second)


@pytest.mark.cross
@pytest.mark.process
@pytest.mark.slow
def test_memory_beyond_growth_is_said_in_words(tmp_path: Path) -> None:
    needs_clang()
    g = GraphBuilder()
    n = g.symbol("n", 1, 1 << 20)
    x = g.input("x", (n, 2))
    wide = g.constant("w", np.ones((2, 8192), np.float32))
    module = g.finish(g.call(Matmul(), x, wide))
    path = built(module, tmp_path / "wide.rta")
    with served(ServedModel(path, "search", gpu=False, wasm=wasm_files(load_artifact(path)))) as found:
        calls = [step("main", x=np.ones((n, 2), np.float32)) for n in (70_000, 140_000, 2)]
        _, *refused, small = in_node(found, *calls)
    for said in refused:
        assert "too little memory" in said and "close other tabs" in said, said
    np.testing.assert_allclose(arrays(small)[0], np.full((2, 8192), 2.0))


@pytest.mark.cross
@pytest.mark.process
@pytest.mark.heavy
def test_decoder_keeps_caches_and_gives_tokens_of_python(tmp_path: Path) -> None:
    needs_clang()
    folder, _ = tiny_decoders.write(tmp_path, "llama3")
    path = built(load_hf(folder, bounds={"b": (1, 4)}), tmp_path / "decoder.rta")
    with opened_here(path) as model:
        executor = model.executors["decode"]
        ids, *caches = [spec.name for spec in (executor.program.buffers[i] for i in executor.program.inputs)]
        first, *state = model.run([np.array([PROMPT])], "prefill")
        wanted = []
        for k in range(STEPS):
            token = np.array([[int(first[0, -1].argmax()) if k == 0 else int(wanted[-1][0, -1].argmax())]])
            found, *state = model.run([token, *state], "decode")
            wanted.append(found)
        tokens = [int(first[0, -1].argmax()), *(int(w[0, -1].argmax()) for w in wanted[:-1])]
    opening = {**step("prefill", input_ids=np.array([PROMPT])), "open": "decode", "kept": caches}
    runs = [{"run": True, "inputs": listed({ids: np.array([[t]])})} for t in tokens]
    beyond = {"run": True, "inputs": listed({ids: np.array([[tiny_decoders.VOCABULARY]])})}
    with served(served_model(path)) as found_at:
        _, *answers, refused, again = in_node(found_at, opening, *runs, beyond, runs[-1])
    for answer, logits in zip(answers, wanted, strict=True):
        np.testing.assert_allclose(arrays(answer)[0], logits, atol=1e-4, rtol=0)
    assert f"expected values from 0 to {tiny_decoders.VOCABULARY - 1}" in refused
    assert np.isfinite(arrays(again)[0]).all()


def program(name: str) -> Program:
    """A program that gives its argument back."""
    spec = BufferSpec("input_ids", "int64", (0, 0), "input")
    return Program((Symbol("n", 1, 8),), (1, 0, 0, 0), (), (spec,), (), (), (), (), (0,), (0,), name)


def artifact(path: Path, target: str, *programs: Program) -> Path:
    kind, _, cpu = target.partition(":")
    return save_artifact(path, programs, {}, {"fingerprint": {"cpu": cpu}} if cpu else {}, kind=kind)


def test_missing_clang_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(
        BuildError,
        match=r"no clang and no wasm-ld; .*apt-get install",
    ):
        served_model(artifact(tmp_path / "model.rta", "c:wasm32", program("main")))


@pytest.mark.parametrize("first, second", [("webgpu", "webgpu"), ("c:wasm32", "c:wasm32"), ("c:wasm32", "webgpu")])
def test_fallback_of_other_target_is_refused(tmp_path: Path, first: str, second: str) -> None:
    paths = [artifact(tmp_path / f"{k}.rta", t, program("main")) for k, t in enumerate((first, second))]
    with pytest.raises(UserError, match=r"--fallback .*c:wasm32 of an artifact for webgpu"):
        served_model(paths[0], fallback=paths[1])


def test_artifact_of_another_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"webgpu or c:wasm32, .* one for c"):
        served_model(artifact(tmp_path / "model.rta", "c:x86-64", program("main")))


def test_server_gives_module_and_weights(tmp_path: Path) -> None:
    module = write_file(MODULE, tmp_path / "a.module", {"programs.json": b"[]", "model.wasm": b"code"}, {}, {})
    files = WasmFiles(module, tmp_path / "1234.weights")
    files.weights.write_bytes(b"numbers")
    path = artifact(tmp_path / "model.rta", "c:wasm32", program("main"))
    app = make_web_app(ServedModel(path, "search", gpu=False, wasm=files), None)
    facts = json.loads(ask(app, "/model.json").text)
    assert "url" not in facts and ask(app, "/model.rta").status == 404
    for name, file in (("module", files.module), ("weights", files.weights)):
        part = facts["wasm"][name]
        assert part["bytes"] == file.stat().st_size
        assert part["digest"] == ("1234" if name == "weights" else file.read_bytes()[-64:].decode())
        assert ask(app, f"/{part['url']}").status == 200
    assert "'wasm-unsafe-eval'" in ask(app, "/").headers["content-security-policy"]
    files.weights.unlink()
    assert ask(app, "/model.weights").status == ask(app, "/model.json").status == 503
    both = json.loads(ask(make_web_app(ServedModel(path, "search"), None), "/model.json").text)
    assert both["url"] == "model.rta" and "wasm" not in both
