"""Programs over several devices: right results, few copies, work side by side, lost devices."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.tuner_models import opened

from relax_tune.database.store import MemoryStore
from relax_tune.errors import (
    ArtifactError,
    BuildError,
    MeasureError,
    MemoryLack,
    ModelStateError,
    RelaxTuneError,
    UserError,
)
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.devices import HintOnDevice, ToDevice
from relax_tune.ir.op.indexing.movement import Split, Take
from relax_tune.ir.op.math.elementwise import Add, MulScalar, Tanh
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.runtime.artifact import Artifact, load, load_artifact
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.model import Model
from relax_tune.runtime.program.placement import Placement, placement_from_json
from relax_tune.runtime.vm.machine import DeviceEvent, VirtualMachine, after_reads
from relax_tune.runtime.vm.policy import PlacementOptions
from relax_tune.runtime.vm.queues import Pending
from relax_tune.tuner.emit.build import BuildResult
from relax_tune.tuner.emit.emit_placed import PlacementPlan
from relax_tune.tuner.job.job import Job, job_for, placed_artifact
from relax_tune.tuner.settings import Settings

pytestmark = [pytest.mark.opencl, pytest.mark.ccompiler]
SETTINGS = Settings(self_test=False)


@pytest.fixture(scope="module")
def devices() -> Any:
    with opened("c") as c, opened("opencl") as opencl:
        yield {"c": c, "opencl": opencl}


def job_of(module: IRModule, devices: Mapping[str, Device]) -> Job:
    return job_for(module, {kind: d.info for kind, d in devices.items()}, MemoryStore(), SETTINGS)


def built(module: IRModule, devices: Mapping[str, Device]) -> Artifact:
    job = job_of(module, devices)
    return job.artifact(job.build("generic"))


def check(model: Model, module: IRModule, args: Sequence[Any]) -> None:
    wanted = run_function(module, "main", list(args))
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    found = model.run(list(args))
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def two_nodes() -> IRModule:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 64), 8))
    h = g.call(HintOnDevice("opencl"), g.call(Matmul(), x, g.constant("w", np.eye(8, dtype=np.float32) * 2)))
    return g.finish(g.call(HintOnDevice("c"), g.call(Tanh(), h)))


def normal(*shape: int) -> Any:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def test_two_nodes_on_two_devices_give_the_interpreters_results(
    devices: Mapping[str, Device], spared: tuple[IRModule, Artifact], tmp_path: Path
) -> None:
    module, artifact = spared
    assert artifact.device_kind == "c,opencl"
    again = load_artifact(artifact.save(tmp_path / "m.rta"))
    assert again.save(tmp_path / "m2.rta").read_bytes() == (tmp_path / "m.rta").read_bytes()
    with again.open(devices) as model:
        for n in (1, 7, 64):
            check(model, module, [normal(n, 8)])
        nbytes = (1 + 7 + 64) * 8 * 4
        assert model.placed.copied == Counter({("c", "opencl"): nbytes, ("opencl", "c"): nbytes})
        with pytest.raises(UserError, match="expected 1 <= n <= 64"):
            model.run([normal(65, 8)])


def random_module(rng: np.random.Generator) -> IRModule:
    """Products, which do not fuse, sums and fields of tuples."""
    g = GraphBuilder()
    n = g.symbol("n", 1, 16)
    values: list[Any] = [g.input("x", (n, 4)), g.input("y", (n, 4))]
    for number in range(5):
        a, b = (values[i] for i in rng.integers(len(values), size=2))
        left, right = (g.item(g.call(Split(2, 1), a), i) for i in (0, 1))
        sums = g.call(Add(), g.call(Matmul(), left, g.constant(f"v{number}", normal(2, 4))), b)
        values += [sums, g.call(Matmul(), right, g.constant(f"u{number}", normal(2, 4)))]
    return g.finish(values[-3:])


def placed_as(job: Job, built: Mapping[str, BuildResult], places: Callable[[int], str]) -> Artifact:
    """The artifact of one placement, a device for each call by its number."""
    (f,) = job.lowered.functions.values()
    chosen = {b.var: places(i) for i, b in enumerate(f.bindings)}
    found = job.emit(built, {f.name: PlacementPlan((chosen,))})
    return placed_artifact(job.lowered, found, Placement(found.parts), {})


@pytest.mark.slow
def test_copied_bytes_of_a_chain_are_minimal(devices: Mapping[str, Device]) -> None:
    g = GraphBuilder()
    x: Any = g.input("x", (g.symbol("n", 1, 64), 4))
    for number in range(4):
        x = g.call(Matmul(), x, g.constant(f"w{number}", normal(4, 4) + number))
    module = g.finish(x)
    job = job_of(module, devices)
    built = {k: j.build("generic") for k, j in job.parts.items()}
    for places in (["opencl"] * 4, ["c", "opencl"] * 2, ["c", "c", "opencl", "c"]):
        with placed_as(job, built, places.__getitem__).open(devices) as model:
            check(model, module, [normal(5, 4)])
            path = ["c", *places, "c"]
            wanted = Counter((a, b) for a, b in itertools.pairwise(path) if a != b)
            assert model.placed.copied == Counter({way: times * 5 * 4 * 4 for way, times in wanted.items()})


@pytest.mark.slow
def test_random_placements_of_a_graph_give_the_interpreters_results(devices: Mapping[str, Device]) -> None:
    rng = np.random.default_rng(7)
    module = random_module(rng)
    job = job_of(module, devices)
    built = {k: j.build("generic") for k, j in job.parts.items()}
    for _ in range(3):
        with placed_as(job, built, lambda _: str(rng.choice(["c", "opencl"]))).open(devices) as model:
            check(model, module, [normal(3, 4), normal(3, 4) + 1])


def test_an_order_for_a_device_outside_the_build_is_refused(devices: Mapping[str, Device]) -> None:
    for after in (Tanh(), None):
        g = GraphBuilder()
        y = g.call(ToDevice("cuda"), g.input("x", (4,)))
        module = g.finish(g.call(after, y) if after else y)
        with pytest.raises(BuildError, match=r"devices .*c, opencl, got .*to_device\(cuda\)"):
            built(module, devices)


def test_an_index_outside_is_refused_on_another_device(devices: Mapping[str, Device]) -> None:
    g = GraphBuilder()
    found = g.call(Take(), g.constant("table", normal(5, 4)), g.input("i", (g.symbol("n", 1, 8),), i64))
    module = g.finish(g.call(HintOnDevice("opencl"), found))
    with built(module, devices).open(devices) as model:
        check(model, module, [np.array([4, 0, 2])])
        with pytest.raises(UserError, match="5"):
            model.run([np.array([4, 5, 2])])


class Meeting:
    """A device whose launches wait until those of another have begun too; without it they would wait for ever."""

    def __init__(self, device: Device, barrier: threading.Barrier) -> None:
        self._device, self._barrier = device, barrier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def bind(self, *args: Any) -> Callable[[], None]:
        launch = self._device.bind(*args)

        def met() -> None:
            self._barrier.wait(timeout=30)
            launch()

        return met

    def record(self, launches: Any) -> None:
        return None


def test_independent_nodes_run_side_by_side_on_two_devices(devices: Mapping[str, Device]) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 64), 8))
    sides = [g.call(HintOnDevice(d), g.call(Matmul(), x, g.constant(d, normal(8, len(d))))) for d in devices]
    module = g.finish(sides)
    artifact = built(module, devices)
    barrier = threading.Barrier(2)
    meeting = {kind: Meeting(device, barrier) for kind, device in devices.items()}
    with artifact.open(meeting) as model:  # type: ignore[arg-type]
        events: list[DeviceEvent] = []
        model.placed.observe = events.append
        check(model, module, [normal(5, 8)])
    parts = [e for e in events if e.what == "part"]
    assert {e.device for e in parts[:2]} == {"c", "opencl"} and [e.when for e in parts[:2]] == ["start", "start"]


class Losing(Meeting):
    """A device that is lost after some launches."""

    def __init__(self, device: Device, after: int, error: type[MeasureError] = MeasureError) -> None:
        super().__init__(device, threading.Barrier(1))
        self.left, self.error = after, error

    def bind(self, *args: Any) -> Callable[[], None]:
        launch = self._device.bind(*args)

        def lost() -> None:
            self.left -= 1
            if self.left < 0:
                raise self.error("unplugged")
            launch()

        return lost


@pytest.fixture(scope="module")
def spared(devices: Mapping[str, Device]) -> tuple[IRModule, Artifact]:
    module = two_nodes()
    artifact = built(module, devices)
    assert [a.devices for a in artifact.placement.functions[0].alternatives] == [("c", "opencl"), ("c",), ("opencl",)]
    return module, artifact


def test_a_lost_device_fails_the_call_in_words(
    devices: Mapping[str, Device], spared: tuple[IRModule, Artifact]
) -> None:
    module, artifact = spared
    given: Any = {**devices, "opencl": Losing(devices["opencl"], 1)}
    with artifact.open(given) as model:
        check(model, module, [normal(5, 8)])
        for _ in range(2):  # no placement without it is taken unasked
            with pytest.raises(MeasureError, match=r"main: .*opencl failed .*unplugged; open"):
                model.run([normal(5, 8)])


def test_a_device_without_memory_for_a_call_is_not_lost(
    devices: Mapping[str, Device], spared: tuple[IRModule, Artifact]
) -> None:
    module, artifact = spared
    short = Losing(devices["opencl"], 0, MemoryLack)
    with artifact.open({**devices, "opencl": short}, placing=PlacementOptions(when_lost="move")) as model:  # type: ignore[dict-item]
        with pytest.raises(MemoryLack, match="unplugged"):
            model.run([normal(5, 8)])
        assert not model.placed.chooser.lost
        short.left = 9
        check(model, module, [normal(5, 8)])


def test_closing_in_a_call_refuses_the_rest_of_the_call(
    devices: Mapping[str, Device], spared: tuple[IRModule, Artifact]
) -> None:
    module, artifact = spared
    with artifact.open(devices) as model:
        check(model, module, [normal(5, 8)])
        machine = model.placed
        machine.observe = lambda e: machine.close() if (e.what, e.device, e.when) == ("part", "opencl", "end") else None
        for _ in range(2):  # the second finds the queues shut down
            with pytest.raises(ModelStateError, match=r"main: expected an open model, .*closed"):
                model.run([normal(5, 8)])


def test_a_call_goes_on_without_a_lost_device_if_the_user_says_so(
    devices: Mapping[str, Device], spared: tuple[IRModule, Artifact]
) -> None:
    module, artifact = spared
    given: Any = {**devices, "opencl": Losing(devices["opencl"], 1)}
    with artifact.open(given, placing=PlacementOptions(when_lost="move")) as model:
        check(model, module, [normal(5, 8)])
        with pytest.warns(UserWarning, match=r"main: .*opencl failed \(unplugged\); .*without it"):
            check(model, module, [normal(6, 8)])
        events: list[DeviceEvent] = []
        model.placed.observe = events.append
        check(model, module, [normal(7, 8)])
        assert {e.device for e in events} == {"c"} and model.placed.chooser.lost == {"opencl": "unplugged"}


@pytest.mark.parametrize("policy", ["c", "opencl", "main_placed0", "load"])
def test_every_policy_gives_the_same_results(
    devices: Mapping[str, Device], spared: tuple[IRModule, Artifact], policy: str
) -> None:
    module, artifact = spared
    with artifact.open(devices, placing=PlacementOptions(policy)) as model:
        events: list[DeviceEvent] = []
        model.placed.observe = events.append
        for n in (1, 9, 9, 64):
            check(model, module, [normal(n, 8)])
        if policy in devices:
            assert {e.device for e in events if e.what == "part"} == {policy}


def test_checked_value_keeps_the_device(devices: Mapping[str, Device]) -> None:
    """A check between two devices waits for the value, and does not forget where it is."""
    machine = VirtualMachine.__new__(VirtualMachine)
    machine.observe, machine.copied = None, Counter()
    check = SimpleNamespace(reads=(0,))
    machine._reads = {id(check): check.reads}
    future: Future[Any] = Future()
    future.set_result(np.ones(3, np.float32))
    held = Pending(future, "opencl")
    frame = SimpleNamespace(registers=[held])
    seen: list[Any] = []
    after_reads(lambda vm, i, frame: seen.append(frame.registers[0]))(machine, check, frame)  # type: ignore[arg-type]
    assert isinstance(seen[0], np.ndarray) and frame.registers[0] is held


def test_names_of_devices_may_have_spaces(devices: Mapping[str, Device], spared: tuple[IRModule, Artifact]) -> None:
    module, artifact = spared
    with artifact.open("c, opencl") as model:
        check(model, module, [normal(5, 8)])
    with pytest.raises(RelaxTuneError, match="nowhere"):
        artifact.open("c, opencl:nowhere")


def test_opening_wants_devices_of_the_kinds_of_the_artifact(
    devices: Mapping[str, Device], spared: tuple[IRModule, Artifact]
) -> None:
    _, artifact = spared
    with pytest.raises(UserError, match="by kind, c, opencl, got one"):
        artifact.open(devices["c"])
    with pytest.raises(UserError, match="kinds c, opencl, got cuda"):
        artifact.open({"cuda": "cuda"})
    with artifact.open("opencl,c") as model, pytest.raises(UserError, match="without branches"):
        model.session([])


def test_a_manifest_with_a_wrong_placement_is_refused(
    devices: Mapping[str, Device], spared: tuple[IRModule, Artifact], tmp_path: Path
) -> None:
    _, artifact = spared
    data = artifact.placement.fields()["placement"]
    for change, message in (
        ({"parts": [{"program": "main", "device": "tpu"}]}, "one of c, opencl, cuda"),
        ({"parts": data["parts"] * 2}, "each program once"),
        ({"functions": [{**data["functions"][0], "points": [[1, 2]]}]}, "1 values at each point"),
        ({"functions": [{**data["functions"][0], "calls": ["matmul"]}]}, "a device for each call"),
    ):
        with pytest.raises(ArtifactError, match=message):
            placement_from_json({"placement": {**data, **change}})
    assert load(artifact.save(tmp_path / "m.rta"), devices).functions == ("main",)


def test_results_keep_names_of_one_device(devices: Mapping[str, Device]) -> None:
    g = GraphBuilder()
    x = g.input("x", (4,))
    y = g.call(HintOnDevice("opencl"), g.call(MulScalar(2.0), x))
    module = g.finish(g.call(HintOnDevice("opencl"), g.call(Tanh(), y)))
    artifact = built(module, devices)
    assert [s.name for s in artifact.outputs] == ["tanh"] and [s.name for s in artifact.inputs] == ["x"]
