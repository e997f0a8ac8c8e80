"""What schedules take from a device's limits."""

from __future__ import annotations

from relax_tune.schedules.target import Machine


def test_lanes_are_capped_by_what_the_compiler_bears() -> None:
    limits = {"vector_bits": 512, "max_vector_lanes": 8, "workers": 4, "registers": 32, "l1_bytes": 1, "l2_bytes": 2}
    machine = Machine.from_limits("opencl", limits)
    assert (machine.lanes, machine.workers, machine.registers, machine.groups) == (8, 4, 32, True)
    assert (machine.l1_bytes, machine.l2_bytes) == (1, 2)
    assert Machine.from_limits("c", {**limits, "max_vector_lanes": 16}).lanes == 16


def test_a_device_that_says_nothing_gets_a_modest_machine() -> None:
    machine = Machine.from_limits("c", {})
    assert (machine.language, machine.lanes, machine.workers, machine.groups) == ("c", 8, 1, False)


def test_named_opencl_devices_are_opencl() -> None:
    assert Machine.from_limits("opencl:oclgrind", {}).language == "opencl"
