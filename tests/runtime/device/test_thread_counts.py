"""The number of threads of target `c`: of the device's name, of `rt.load`, of settings, and of several models in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import relax_tune as rt
from relax_tune.errors import UserError
from relax_tune.ir.op.math.elementwise import Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.runtime.device import host
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.registry import open_device
from relax_tune.tuner.settings import Settings

pytestmark = pytest.mark.ccompiler


def module() -> rt.IRModule:
    g = rt.GraphBuilder()
    n = g.symbol("n", 1, 256)
    weight = g.constant("w", np.random.default_rng(0).standard_normal((64, 64), np.float32))
    return g.finish(g.call(Relu(), g.call(Matmul(), g.input("x", (n, 64)), weight)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    artifact = rt.build(module(), target="c", policy="generic", db="memory://", self_test=False, libraries=False)
    return Path(artifact.save(tmp_path_factory.mktemp("threads") / "m.rta"))


def test_device_name_states_threads() -> None:
    with_three = open_device("c:threads=3")
    assert dict(with_three.info.limits)["workers"] == 3 and dict(with_three.info.fingerprint)["threads"] == "3"
    assert dict(open_device("c").info.limits)["workers"] == host.worker_threads()


@pytest.mark.parametrize("number", ["0", "-1", "1025", "two", ""])
def test_wrong_number_of_threads_is_refused(number: str) -> None:
    with pytest.raises(UserError, match="expected 1 to 1024 threads"):
        open_device(f"c:threads={number}")


@pytest.mark.filterwarnings("ignore:.*was tuned on another device")
def test_models_of_different_numbers_of_threads_share_a_process(saved: Path) -> None:
    x = np.random.default_rng(1).standard_normal((200, 64), np.float32)
    with rt.load(saved, threads=1) as one, rt.load(saved, threads=4) as four, rt.load(saved) as usual:
        (expected,) = usual.run([x])
        for _ in range(3):
            for model, threads in ((one, 1), (four, 4), (usual, host.worker_threads())):
                (result,) = model.run([x])
                np.testing.assert_array_equal(result, expected)
                assert CDevice._taking_part == threads


def test_another_number_than_the_tuned_one_is_named(saved: Path) -> None:
    with pytest.warns(UserWarning, match=r"another device \(threads differ\)"):
        rt.load(saved, threads=host.worker_threads() + 1).close()


def test_threads_go_with_the_processor_alone(saved: Path) -> None:
    with pytest.raises(UserError, match="expected an artifact for target c"):
        rt.load(saved, open_device("c"), threads=2)
    with pytest.raises(UserError, match="--threads expects --target c, got 'opencl'"):
        Settings(target="opencl", threads=2)


def test_setting_becomes_part_of_the_target() -> None:
    chosen = Settings(target="c", threads=2)
    assert chosen.target == "c:threads=2" and replace(chosen, trials=3).target == chosen.target
    assert Settings(target="opencl, c", threads=2).target == "opencl,c:threads=2"


def test_build_records_the_number_of_threads() -> None:
    artifact = rt.build(module(), target="c", threads=1, policy="generic", db="memory://", libraries=False)
    assert artifact.manifest["extra"]["fingerprint"]["threads"] == "1"
