"""The choice of a type for each weight, end to end on a processor, with times that follow from the bytes of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.tuner_models import RecordedRunner, opened

import relax_tune as rt
from relax_tune.database.store import MemoryStore, Store
from relax_tune.errors import UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.math.elementwise import Exp, Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.program.program import Program
from relax_tune.runtime.signature import dim_of
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.devices import device_info
from relax_tune.tuner.quality.choose import Choice, built_choice, read_goal, tuned_choice
from relax_tune.tuner.quality.samples import SplitSamples
from relax_tune.tuner.settings import Settings

Array = np.ndarray[Any, Any]
WIDTH = 64
pytestmark = [pytest.mark.ccompiler, pytest.mark.process]


def by_bytes(program: Program, symbols: Mapping[str, int]) -> float:
    """A nanosecond for each byte of the program's arrays of known size."""
    names = [s.name for s in program.symbols]
    dims = ([dim_of(program.scalars, slot, names) for slot in b.shape] for b in program.buffers)
    sizes = [math.prod(d for d in own if isinstance(d, int)) for own in dims]
    return 1e-9 * sum(n * np.dtype(b.dtype).itemsize for n, b in zip(sizes, program.buffers, strict=True))


def settings_of(folder: Path, bound: str, samples: Array, **more: Any) -> Settings:
    np.savez(folder / "samples.npz", x=samples)
    fast = {"target": "c", "effort": "quick", "trials": 0, "self_test": False, "libraries": False}
    return Settings(**{**fast, "quality": bound, "samples": str(folder / "samples.npz"), **more})


def chosen(module: IRModule, settings: Settings, store: Store | None = None) -> tuple[Choice, DeviceJob]:
    with opened("c") as device:
        info = device.info
    job = device_job(module, info, MemoryStore() if store is None else store, settings)
    goal = read_goal(settings, module)
    assert goal is not None
    found, _ = tuned_choice(job, goal, RecordedRunner(by_bytes, info=info))
    return found, job


def cancelling() -> IRModule:
    """Two products. The second subtracts near numbers, so its weight stands no rounding; that of the first does.

    Columns of the first come in equal pairs; rows of the second in pairs of M + d and -M.
    """
    rng = np.random.default_rng(0)
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 8), WIDTH))
    first = np.repeat(rng.standard_normal((WIDTH, WIDTH // 2)), 2, axis=1).astype("f4")
    difference = rng.standard_normal((WIDTH // 2, 32))
    second = np.stack([4096 + difference, np.full_like(difference, -4096)], axis=1).reshape(WIDTH, 32).astype("f4")
    h = g.call(Relu(), g.call(Matmul(), x, g.constant("first", first)))
    return g.finish(g.call(Matmul(), h, g.constant("second", second)))


def random_samples(count: int = 6, rows: int = 4) -> Array:
    return np.random.default_rng(1).standard_normal((count, rows, WIDTH)).astype("f4")


def results(artifact: Artifact, samples: SplitSamples) -> list[Array]:
    with artifact.open("c") as model:
        return [model.run(s)[0] for s in samples.validation]


def test_sensitive_weight_stays_and_the_other_gets_few_bits(tmp_path: Path) -> None:
    module, settings = cancelling(), settings_of(tmp_path, "cosine>=0.99", random_samples())
    found, exact = chosen(module, settings)
    document = found.built.quality
    assert document is not None and set(document["types"]) == {"first"}
    assert document["types"]["first"] in ("int8", "int4") and document["weights"] == 2
    assert document["samples"] == {"choosing": 3, "held_out": 3}
    points = document["front"]
    assert points[0]["types"] == {} and points[0]["quality"] == {"cosine": 1.0}
    assert all(a["secs"] > b["secs"] and b["quality"]["cosine"] >= 0.99 for a, b in zip(points, points[1:]))
    artifact = found.job.artifact(found.built)
    assert artifact.manifest["extra"]["quality"] == document
    assert artifact.manifest["extra"]["model"] == exact.key
    kinds = {n: str(a.dtype) for n, a in artifact.constants.items()}
    assert kinds["second"] == "float32" and "first" not in kinds and f"first.{document['types']['first']}" in kinds


@pytest.mark.parametrize(
    "bound", ["cosine>=0.9999999", "rmse<=0.05", "max_abs<=3", "top1>=0.8", "cosine>=0.999 and rmse<=0.3"]
)
def test_bound_holds_on_held_out_samples_by_numpy(tmp_path: Path, bound: str) -> None:
    """The quality in the manifest is that of the two artifacts, computed here from their results."""
    rng = np.random.default_rng(5)
    g = GraphBuilder()
    x: Any = g.input("x", (g.symbol("n", 1, 8), WIDTH))
    for name in ("a", "b", "c"):
        x = g.call(
            Relu(), g.call(Matmul(), x, g.constant(name, (rng.standard_normal((WIDTH, WIDTH)) / 8).astype("f4")))
        )
    module, settings = g.finish(x), settings_of(tmp_path, bound, random_samples(10))
    found, job = chosen(module, settings)
    document = found.built.quality
    assert document is not None and document["types"] and document["bound"] == bound
    samples = SplitSamples.read(tmp_path / "samples.npz", module, settings.seed)
    pairs = [
        (a.astype("f8"), b.astype("f8"))
        for a, b in zip(
            results(job.artifact(job.build()), samples), results(found.job.artifact(found.built), samples), strict=True
        )
    ]
    values = {
        "cosine": min(float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())) for a, b in pairs),
        "rmse": max(float(np.sqrt(((a - b) ** 2).mean())) for a, b in pairs),
        "max_abs": max(float(np.abs(a - b).max()) for a, b in pairs),
        "top1": float(np.mean([a.argmax(-1) == b.argmax(-1) for a, b in pairs])),
    }
    for name, value in document["held_out"].items():
        assert value == pytest.approx(values[name], abs=1e-9)
        limit = float(bound.split(name)[1].split()[0][2:])
        assert values[name] >= limit if name in ("cosine", "top1") else values[name] <= limit


def test_failure_on_held_out_samples_steps_back(tmp_path: Path) -> None:
    """Held-out samples read only rows of a weight that are small beside the others, and few bits lose them."""
    rng = np.random.default_rng(2)
    small = rng.standard_normal((WIDTH, WIDTH)).astype("f4")
    small[1::2] *= 1e-4
    module = two_products(small, rng.standard_normal((WIDTH, 32)).astype("f4"))
    settings = settings_of(tmp_path, "cosine>=0.99", random_samples(8))
    found, _ = chosen(module, settings)
    assert found.built.quality is not None
    free = found.built.quality["types"]
    assert free["first"] in ("int8", "int4")  # where all samples read the large rows
    order = np.random.default_rng(settings.seed).permutation(8)
    samples = random_samples(8)
    for number in order[4:]:
        samples[number, :, ::2] = 0
    settings = settings_of(tmp_path, "cosine>=0.99", samples)
    found, _ = chosen(module, settings)
    document = found.built.quality
    assert document is not None and document["chosen"] < len(document["front"]) - 1
    assert document["types"].get("first") not in ("int8", "int4") and document["held_out"]["cosine"] >= 0.99
    samples[order[:4], :, ::2] = 0  # now the choosing samples see it
    seen, _ = chosen(module, settings_of(tmp_path, "cosine>=0.99", samples))
    assert seen.built.quality is not None
    assert seen.built.quality["types"]["first"] in ("bf16", "f16") and seen.built.quality["types"]["second"]


def two_products(first: Array, second: Array) -> IRModule:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 8), first.shape[0]))
    return g.finish(g.call(Matmul(), g.call(Matmul(), x, g.constant("first", first)), g.constant("second", second)))


def test_bound_met_by_nothing_gives_the_exact_artifact(tmp_path: Path) -> None:
    module, store = cancelling(), MemoryStore()
    settings = settings_of(tmp_path, "max_abs<=0", random_samples())
    found, job = chosen(module, settings, store)
    assert found.job is job and found.built.quality is not None and found.built.quality["types"] == {}
    plain = device_job(
        module, job.device, store, Settings(target="c", effort="quick", self_test=False, libraries=False)
    )
    wanted, exact = plain.artifact(plain.build()), job.artifact(found.built)
    extra = {n: v for n, v in exact.manifest["extra"].items() if n != "quality"}
    assert extra == wanted.manifest["extra"] and exact.programs == wanted.programs
    assert {n: a.tobytes() for n, a in exact.constants.items()} == {n: a.tobytes() for n, a in wanted.constants.items()}


def test_build_repeats_the_choice_of_tune(tmp_path: Path) -> None:
    """The same records, samples and seed give the same bytes; without records all stays, and a note says so."""
    module, store = cancelling(), MemoryStore()
    settings = settings_of(tmp_path, "cosine>=0.99", random_samples())
    found, job = chosen(module, settings, store)
    goal = read_goal(settings, module)
    assert goal is not None
    again = built_choice(device_job(module, job.device, store, settings), goal)
    paths = [c.job.artifact(c.built).save(tmp_path / f"{n}.rta") for n, c in enumerate((found, again))]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    empty = built_choice(device_job(module, job.device, MemoryStore(), settings), goal)
    assert empty.built.quality is not None and empty.built.quality["types"] == {}
    assert any(
        note == "int8: no times on record for 2 of 2 groups of weights; run `relax-tune tune --quality` to measure some"
        for note in empty.built.notes
    )


def test_python_build_takes_the_bound_and_the_samples(tmp_path: Path) -> None:
    module, store = cancelling(), MemoryStore()
    settings = settings_of(tmp_path, "cosine>=0.99", random_samples())
    found, _ = chosen(module, settings, store)
    path = tmp_path / "samples.npz"
    artifact = rt.build(
        module,
        target="c",
        effort="quick",
        self_test=False,
        libraries=False,
        db=store,
        quality="cosine>=0.99",
        samples=path,
    )
    assert artifact.manifest["extra"]["quality"] == found.built.quality
    assert artifact.programs == found.job.artifact(found.built).programs


def test_settings_beside_a_bound_are_refused(tmp_path: Path) -> None:
    module = cancelling()
    for more, words in (
        ({"precision": "bf16"}, "--quality chooses a type for each weight, got --precision bf16 for all"),
        ({"scheduler": "tls://127.0.0.1:1"}, "--quality runs the model on this machine, got --scheduler"),
        ({"target": "c:aarch64"}, "got --target c:aarch64; choose such a device"),
        ({"target": "c,opencl"}, "got --target c,opencl; choose such a device"),
    ):
        with pytest.raises(UserError) as found:
            read_goal(settings_of(tmp_path, "cosine>=0.99", random_samples(), **more), module)
        assert words in str(found.value)
    with pytest.raises(UserError, match=r"--quality.*--policy library"):
        read_goal(settings_of(tmp_path, "cosine>=0.99", random_samples()), module, "library")
    for given, missing in (({"quality": "cosine>=0.9"}, "samples"), ({"samples": "s.npz"}, "quality")):
        with pytest.raises(UserError, match=f"expects --{missing} too.*give both"):
            read_goal(Settings(target="c", **given), module)  # type: ignore[arg-type]
    assert read_goal(Settings(), module) is None


def test_infinite_exact_results_are_refused(tmp_path: Path) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 8), WIDTH))
    module = g.finish(g.call(Exp(), g.call(Matmul(), x, g.constant("w", np.full((WIDTH, 4), 1e3, "f4")))))
    settings = settings_of(tmp_path, "cosine>=0.99", np.ones((2, 3, WIDTH), "f4"))
    goal = read_goal(settings, module)
    assert goal is not None
    with pytest.raises(UserError, match="infinity or NaN in result 0"):
        built_choice(device_job(module, device_info("c"), MemoryStore(), settings), goal)
