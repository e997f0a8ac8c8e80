"""Policies of placement by recorded traces: no clock, no device."""

from __future__ import annotations

import pytest

from relax_tune.errors import MeasureError, UserError
from relax_tune.runtime.program.placement import PlacedFunction, PlacementOption
from relax_tune.runtime.vm.policy import DeviceLoad, PlacementChooser, PlacementOptions, nearest_point

POINTS = ((1,), (16,), (256,))


def option(name: str, **secs: float) -> PlacementOption:
    devices = tuple(secs)
    return PlacementOption(name, devices, (devices[0],), "", tuple((s,) * 3 for s in secs.values()), (0.0,) * 3)


MAIN = PlacedFunction("main", ("n",), POINTS, ("matmul",), (option("a", c=1.0), option("b", opencl=2.0)))


def chooser(policy: str = "load", **options: str) -> PlacementChooser:
    return PlacementChooser(PlacementOptions(policy, **options), {"main": MAIN})  # type: ignore[arg-type]


def serve(found: PlacementChooser, secs: dict[str, float], calls: int) -> list[str]:
    """Call with devices that take these seconds; return the placement of every call."""
    trace = []
    for _ in range(calls):
        number = found.choose("main", {"n": 16})
        assert number is not None
        chosen = MAIN.alternatives[number]
        found.observe("main", number, {"n": 16}, {d: secs[d] for d in chosen.devices})
        trace.append(chosen.function)
    return trace


def test_load_leaves_a_device_slowed_fivefold_within_three_calls_and_returns() -> None:
    found = chooser()
    assert serve(found, {"c": 1.0, "opencl": 2.0}, 10) == ["a"] * 10
    slowed = serve(found, {"c": 5.0, "opencl": 2.0}, 12)
    assert slowed[3:] == ["b"] * 9 and slowed[0] == "a"
    again = serve(found, {"c": 1.0, "opencl": 2.0}, 150)
    assert again[-1] == "a"


def test_load_stays_with_noise() -> None:
    found = chooser()
    noise = [1.0, 1.3, 1.1, 1.4, 1.2, 1.05] * 10
    trace = [serve(found, {"c": secs, "opencl": 2.0}, 1)[0] for secs in noise]
    assert set(trace) == {"a"}


def test_load_of_one_shape_tells_nothing_of_the_ratio_of_another() -> None:
    load = DeviceLoad()
    for work, secs in (("small", 1.0), ("large", 100.0)) * 5:
        load.observe(work, {"c": secs})
    assert load.slowdown("c") == 1.0


def test_load_compares_calls_of_many_shapes_by_predictions() -> None:
    secs = tuple(float(p) for (p,) in POINTS)
    f = PlacedFunction("main", ("n",), POINTS, ("matmul",), (PlacementOption("a", ("c",), ("c",), "", (secs,), secs),))
    found = PlacementChooser(PlacementOptions("load"), {"main": f})
    for n in range(1, 257):
        found.observe("main", 0, {"n": n}, {"c": float(n)})
    assert found.load.slowdown("c") == pytest.approx(1.0)
    assert len(found.load.best) == len(POINTS)


def test_plan_leaves_the_choice_to_the_function_until_a_device_is_lost() -> None:
    found = chooser("plan")
    assert found.choose("main", {"n": 3}) is None
    found.lose("c", "unplugged")
    assert found.choose("main", {"n": 3}) == 1
    found.lose("opencl", "unplugged too")
    with pytest.raises(MeasureError, match=r"main: .*without c, opencl, .*lost \(unplugged\)"):
        found.choose("main", {"n": 3})


@pytest.mark.parametrize(("policy", "wanted"), [("opencl", 1), ("c", 0), ("b", 1)])
def test_fixed_policy_names_a_device_or_a_placement(policy: str, wanted: int) -> None:
    assert chooser(policy).choose("main", {"n": 3}) == wanted


def test_chooser_refuses_unknown_policies() -> None:
    with pytest.raises(UserError, match=r"policy .*a, b, c, load, opencl, plan, got 'cuda'"):
        chooser("cuda")
    with pytest.raises(UserError, match="when_lost: expected fail or move, got 'wait'"):
        chooser("plan", when_lost="wait")


def test_nearest_point_is_nearest_by_ratio() -> None:
    assert [nearest_point(MAIN, {"n": n}) for n in (1, 3, 5, 60, 70, 10**6)] == [0, 0, 1, 1, 2, 2]
