"""Artifacts as C: compiled by gcc, results equal to the artifact's to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.decoder_families import write_family
from tests.support.tuner_models import QUICK, attention, feed_forward
from tests.tuner.export.c_exports import agree, exported

from relax_tune.database.store import MemoryStore
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.op.indexing.movement import Reshape, Take
from relax_tune.ir.op.math.elementwise import Add, Mul, MulScalar
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.runtime.artifact import Artifact, load_artifact
from relax_tune.runtime.device import c_compiler
from relax_tune.runtime.device.registry import open_device
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.settings import Settings

pytestmark = [pytest.mark.ccompiler, pytest.mark.process]
RNG = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def quick_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Artifacts are compiled with the flags of `c_exports.build`."""
    monkeypatch.setattr(c_compiler, "BASE_FLAGS", (*c_compiler.BASE_FLAGS, "-O1"))


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def built(
    module: IRModule, folder: Path, settings: Settings = QUICK, policy: Any = "predicted", pack: bool = False
) -> Artifact:
    device = open_device("c")
    job = device_job(module, device.info, MemoryStore(), settings)
    device.close()
    return load_artifact(job.artifact(job.build(policy), pack).save(folder / "model.rta"))


def shares_memory() -> IRModule:
    """Results that are an argument, a weight, another result under other dims, and one twice."""
    g = GraphBuilder()
    n = g.symbol("n", 1, 64)
    x, y = g.input("x", (n, 4)), g.input("y", (n, 4))
    w = g.constant("w", floats(4, 3))
    s = g.call(Add(), x, y)
    return g.finish((s, x, g.call(Reshape((n * 4,)), s), w, g.call(Matmul(), s, w), s, g.call(Reshape((n * 2, 2)), y)))


def looked_up() -> IRModule:
    """Rows of a table by ids, and those of squared ids."""
    g = GraphBuilder()
    n = g.symbol("n", 0, 50)
    ids = g.input("ids", (n,), i64)
    table = g.constant("table", floats(16, 5))
    return g.finish((g.call(Take(), table, ids), g.call(Take(), table, g.call(Mul(), ids, ids))))


def unbounded(upper: int | None = None) -> IRModule:
    g = GraphBuilder()
    n = g.symbol("n", upper=upper)
    x = g.input("x", (n, 24))
    h = g.call(Matmul(), x, g.constant("w", floats(24, 24)))
    return g.finish(g.call(Matmul(), g.call(MulScalar(2.0), h), g.constant("v", floats(24, 8))))


@pytest.mark.parametrize("pack", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_feed_forward_in_c_equals_artifact(tmp_path: Path, pack: bool) -> None:
    artifact = built(feed_forward(), tmp_path, pack=pack)
    with artifact.open("c") as model:
        made = exported(artifact, tmp_path / "c")
        agree(artifact, model, made, "main", *([floats(n, 24)] for n in (1, 2, 7, 16, 31, 128)))
        made.close()


@pytest.mark.heavy
def test_attention_in_c_equals_artifact(tmp_path: Path) -> None:
    artifact = built(attention(), tmp_path)
    with artifact.open("c") as model:
        made = exported(artifact, tmp_path / "c")
        calls = [[floats(b, n, 16) for _ in range(3)] for b, n in ((1, 1), (2, 13), (3, 40))]
        agree(artifact, model, made, "main", *calls)
        made.close()


def test_results_in_the_memory_of_others_in_c(tmp_path: Path) -> None:
    artifact = built(shares_memory(), tmp_path, policy="generic")
    with artifact.open("c") as model:
        made = exported(artifact, tmp_path / "c")
        agree(artifact, model, made, "main", *([floats(n, 4), floats(n, 4)] for n in (1, 5, 64)))
        made.close()


def test_decoder_in_c_extends_caches(tmp_path: Path) -> None:
    folder, _ = write_family(tmp_path, "llama_yarn")
    artifact = built(load_model(folder), tmp_path, policy="generic")
    tokens = np.array([[3, 1, 4], [1, 5, 9]], np.int64)
    with artifact.open("c") as model:
        made = exported(artifact, tmp_path / "c")
        ((logits, *caches),) = agree(artifact, model, made, "prefill", [tokens])
        for _ in range(3):
            ((logits, *caches),) = agree(artifact, model, made, "decode", [logits[:, -1:].argmax(-1), *caches])
        made.close()


def test_token_beyond_vocabulary_in_c_is_refused(tmp_path: Path) -> None:
    artifact = built(looked_up(), tmp_path, Settings(target="c", checks=True), policy="generic")
    with artifact.open("c") as model:
        made = exported(artifact, tmp_path / "c")
        agree(artifact, model, made, "main", [np.array([3, 0, 1])], [np.array([], np.int64)])
        program = artifact.program
        with pytest.raises(ValueError, match=r"parameter ids: .*0 to 15, .*16 at element 1"):
            made.run(0, program, [2], [np.array([0, 16])])
        with pytest.raises(ValueError, match=r"below 16, got 25 at element 2"):
            made.run(0, program, [3], [np.array([0, 2, 5])])
        with pytest.raises(ValueError, match=r"main: expected n <= 50, got 51"):
            made.run(0, program, [51], [np.zeros(51, np.int64)])
        with pytest.raises(ValueError, match=r"below 1, got 7"):
            made.run(7, program, [1], [np.zeros(1, np.int64)])
        made.close()


def test_symbol_without_bound_in_c_wants_reserved_memory(tmp_path: Path) -> None:
    artifact = built(unbounded(), tmp_path, policy="generic")
    with artifact.open("c") as model:
        made = exported(artifact, tmp_path / "c")
        with pytest.raises(ValueError, match=r"bytes of workspace, .*call net_reserve"):
            made.run(0, artifact.program, [9], [floats(9, 24)])
        for n in (9, 3, 200):
            agree(artifact, model, made, "main", [floats(n, 24)])
        with pytest.raises(ValueError, match=r"expected n <= 2147483647, got 2147483648"):
            made.reserve(0, [2**31])
        made.close()


def test_size_in_c_beyond_64_bits_is_refused(tmp_path: Path) -> None:
    made = exported(built(unbounded(upper=2**61), tmp_path, policy="generic"), tmp_path / "c")
    with pytest.raises(ValueError, match=r"at least 0 and within 64 bits"):
        made.reserve(0, [2**60])
    made.close()
