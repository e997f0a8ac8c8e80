"""`Model.swap`: another artifact takes the place of the open one between two calls; its memory is freed when nothing uses it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relax_tune.errors import BuildError, ModelStateError, UserError
from relax_tune.runtime.artifact import Artifact, new_artifact
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.model import Model
from relax_tune.runtime.opened import OpenedArtifact
from relax_tune.runtime.shapes import ShapeProfile


def artifact_of(device: Device, small: Any, bias: float) -> Artifact:
    """An artifact of the program whose rows sums are those of relu(2x) plus three times the bias."""
    return new_artifact(small.program(device.info.kind), {"bias": np.full(3, bias, np.float32)})


@pytest.fixture
def model(device: Device, small: Any) -> Iterator[Model]:
    with artifact_of(device, small, 1.0).open(device) as opened:
        yield opened


ZEROS = np.zeros((5, 3), np.float32)


def test_swap_runs_the_other_artifact_from_the_next_call_on(model: Model, device: Device, small: Any) -> None:
    assert model.run([ZEROS])[0].tolist() == [3.0] * 5
    before = model.executors["small"]
    other = artifact_of(device, small, 2.0)
    model.swap(other)
    assert model.run([ZEROS])[0].tolist() == [6.0] * 5 and model.artifact is other
    assert before.refusal and not model.executors["small"].refusal
    with pytest.raises(ModelStateError, match="small"):
        before.run([ZEROS])


def test_swap_under_calls_of_threads_loses_none_and_mixes_none(model: Model, device: Device, small: Any) -> None:
    artifacts = [artifact_of(device, small, bias) for bias in (1.0, 2.0)]
    ended, calls, wrong = threading.Event(), [0] * 4, list[Any]()

    def call(thread: int) -> None:
        sizes = np.random.default_rng(thread)
        while not ended.is_set():
            n = int(sizes.integers(14, 400))
            try:
                (sums,) = model.run([np.zeros((n, 3), np.float32)])
            except Exception as error:  # a lost call
                wrong.append(error)
                return
            if set(sums.tolist()) not in ({3.0}, {6.0}) or sums.shape != (n,):
                wrong.append(sums)
            calls[thread] += 1

    threads = [threading.Thread(target=call, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for number in range(30):
        model.swap(artifacts[(number + 1) % 2])
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong and min(calls) > 0
    assert not model._earlier


def test_swap_in_threads_leaves_one_of_the_artifacts(model: Model, device: Device, small: Any) -> None:
    artifacts = [artifact_of(device, small, float(bias)) for bias in range(4)]
    threads = [threading.Thread(target=model.swap, args=(a,)) for a in artifacts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (chosen,) = (number for number, artifact in enumerate(artifacts) if artifact is model.artifact)
    assert model.run([ZEROS])[0].tolist() == [3.0 * chosen] * 5


def test_bound_call_after_swap_runs_the_earlier_programs(model: Model, device: Device, small: Any) -> None:
    bound, earlier = model.bind([ZEROS]), model.executors["small"]
    model.swap(artifact_of(device, small, 2.0))
    assert bound.run()[0].tolist() == [3.0] * 5 and not earlier.refusal
    assert model.run([ZEROS])[0].tolist() == [6.0] * 5
    assert len(model._earlier) == 1
    del bound
    gc.collect()
    assert earlier.refusal and not model._earlier


def test_close_after_swap_refuses_earlier_bound_calls(device: Device, small: Any) -> None:
    model = artifact_of(device, small, 1.0).open(device)
    bound = model.bind([ZEROS])
    model.swap(artifact_of(device, small, 2.0))
    model.close()
    with pytest.raises(ModelStateError, match="small"):
        bound.run()
    with pytest.raises(ModelStateError, match="closed"):
        model.swap(artifact_of(device, small, 2.0))


def test_swap_of_an_owned_device_reuses_the_device(device: Device, small: Any) -> None:
    with artifact_of(device, small, 1.0).open(device.info.kind) as model:
        own = model.executors["small"].device
        for bias in (2.0, 3.0):
            model.swap(artifact_of(device, small, bias))
            assert model.run([ZEROS])[0].tolist() == [3 * bias] * 5
        assert model.executors["small"].device is own


@pytest.mark.ccompiler
def test_swap_opens_a_device_for_compiled_objects(small: Any) -> None:
    device = open_device("c")
    plain, compiled = artifact_of(device, small, 1.0), artifact_of(device, small, 2.0).compiled_for(["native"])
    with plain.open() as model:
        model.swap(compiled)
        assert model.run([ZEROS])[0].tolist() == [6.0] * 5
        model.swap(plain)
        assert model.run([ZEROS])[0].tolist() == [3.0] * 5
    device.close()


def test_swap_counts_calls_in_the_same_profile(device: Device, small: Any) -> None:
    profile = ShapeProfile()
    with artifact_of(device, small, 1.0).open(device, shapes=profile) as model:
        model.run([ZEROS])
        model.swap(artifact_of(device, small, 2.0))
        model.run([ZEROS])
    assert profile.histograms["small"]["n"].total == 2


def test_swap_refuses_another_signature_and_narrower_bounds(model: Model, device: Device, small: Any) -> None:
    kind, constants = device.info.kind, small.constants
    program = small.program(kind)
    renamed = replace(program, buffers=(replace(program.buffers[0], name="rows"), *program.buffers[1:]))
    cases = [
        (new_artifact(small.program(kind, 64), constants), "4096"),
        (new_artifact(renamed, constants), "rows"),
        (new_artifact(replace(program, name="main"), constants), "main"),
    ]
    for other, subject in cases:
        with pytest.raises(UserError, match=subject):
            model.swap(other)
    assert model.run([ZEROS])[0].tolist() == [3.0] * 5
    model.swap(new_artifact(small.program(kind, None), constants))  # wider bounds


def test_failed_swap_leaves_the_present_programs(
    model: Model, device: Device, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = small.program(device.info.kind)
    broken = replace(program.kernels[1], source=program.kernels[1].source + "\nthis is no kernel\n")
    kernels = tuple(broken if k.name == broken.name else k for k in program.kernels)
    other = new_artifact(replace(program, kernels=kernels), small.constants)
    with pytest.raises(BuildError):
        model.swap(other)
    assert model.run([ZEROS])[0].tolist() == [3.0] * 5


def test_swap_warms_the_new_programs_first(model: Model, device: Device, small: Any) -> None:
    def warm(executors: Any) -> None:
        assert executors["small"].run([ZEROS])[0].tolist() == [6.0] * 5
        assert model.run([ZEROS])[0].tolist() == [3.0] * 5

    model.swap(artifact_of(device, small, 2.0), warm)
    assert model.run([ZEROS])[0].tolist() == [6.0] * 5
    opened: list[Any] = []

    def broken(executors: Any) -> None:
        opened.append(executors["small"])
        raise ValueError("no such shape")

    with pytest.raises(ValueError, match="no such shape"):
        model.swap(artifact_of(device, small, 3.0), broken)
    assert opened[0].refusal and model.run([ZEROS])[0].tolist() == [6.0] * 5


def test_close_while_swap_opens_closes_both(
    model: Model, device: Device, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[OpenedArtifact]()
    original = OpenedArtifact.__init__

    def slow(self: OpenedArtifact, *arguments: Any) -> None:
        original(self, *arguments)
        opened.append(self)
        model.close()

    monkeypatch.setattr(OpenedArtifact, "__init__", slow)
    with pytest.raises(ModelStateError, match="closed"):
        model.swap(artifact_of(device, small, 2.0))
    assert opened[0].executors["small"].refusal
