"""Built programs with branches, calls, host routines and sizes that depend on data."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.test_artifact import forged
from tests.support.programs import agree, compiled, ones, opened, read, refuse, run, same

from relax_tune.database.store import MemoryStore
from relax_tune.errors import ArtifactError, BuildError, UserError
from relax_tune.ir.passes.pipeline import lower
from relax_tune.runtime.artifact import load_artifact
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.vm.machine import MAX_DEPTH
from relax_tune.tuner.api import build

pytestmark = pytest.mark.ccompiler
yes, no = np.array(True), np.array(False)


SIDES = """
    @function
    def main(c: Tensor((), bool), x: Tensor((n, 4), f32), w: Tensor((m, 4), f32)) -> Tensor(None, f32, ndim=2):
        with dataflow():
            a: Tensor((n, 4), f32) = op.exp(x)
        y: Tensor(None, f32, ndim=2)
        if c:
            with dataflow():
                b: Tensor((n, 4), f32) = op.add(a, x)
            y = b
        else:
            with dataflow():
                d: Tensor((m + n, 4), f32) = op.concat(w, a, axis=0)
                e: Tensor((m + n, 4), f32) = op.tanh(d)
            y = e
        with dataflow():
            z: Tensor(None, f32, ndim=2) = op.relu(y)
        return z
"""


@pytest.mark.parametrize("kind", ["c", pytest.param("opencl", marks=pytest.mark.opencl)])
def test_sides_of_different_sizes(kind: str) -> None:
    with opened(kind) as device:
        calls = [[c, ones(n, 4) / 9, ones(m, 4) / 9] for c in (yes, no) for n, m in ((2, 3), (0, 1), (5, 0))]
        agree(read(SIDES), device, *calls)


def test_branches_in_branches_and_in_callees(device: Device) -> None:
    module = read("""
        @function
        def pick(c: Tensor((), bool), x: Tensor((k,), f32)) -> Tensor(None, f32, ndim=1):
            y: Tensor(None, f32, ndim=1)
            if c:
                with dataflow():
                    a: Tensor((k + k,), f32) = op.concat(x, x, axis=0)
                y = a
            else:
                y = x
            return y

        @function
        def main(c: Tensor((), bool), d: Tensor((), bool), x: Tensor((n,), f32)) -> Tensor(None, f32, ndim=1):
            with dataflow():
                u: Tensor(None, f32, ndim=1) = call("pick", c, x)
            y: Tensor(None, f32, ndim=1)
            if d:
                z: Tensor(None, f32, ndim=1)
                if prim(n <= 2):
                    with dataflow():
                        v: Tensor(None, f32, ndim=1) = call("pick", c, u)
                        e: Tensor(None, f32, ndim=1) = op.exp(v)
                    z = e
                else:
                    z = u
                y = z
            else:
                with dataflow():
                    t: Tensor(None, f32, ndim=1) = op.tanh(u)
                y = t
            return y
    """)
    result = agree(module, device, *([c, d, ones(n) / 9] for c in (yes, no) for d in (yes, no) for n in (0, 2, 3)))
    assert [f.shape[0] for f in result] == [0, 8, 6, 0, 4, 6, 0, 2, 3, 0, 2, 3]


def test_checks_of_branch_run_only_when_taken(device: Device) -> None:
    module = read("""
        k = symbol("k", lower=0, upper=4)

        @function
        def small(x: Tensor((k,), f32)) -> Tensor((k,), f32):
            with dataflow():
                y: Tensor((k,), f32) = op.exp(x)
            return y

        @function
        def main(c: Tensor((), bool), x: Tensor((n,), f32), w: Tensor((m,), f32)) -> Tensor((n,), f32):
            y: Tensor((n,), f32)
            if c:
                with dataflow():
                    v: Tensor((n,), f32) = match_cast(w, Tensor((n,), f32))
                    a: Tensor((n,), f32) = op.add(x, v)
                y = a
            else:
                with dataflow():
                    s: Tensor((n,), f32) = call("small", x)
                y = s
            return y
    """)
    agree(module, device, [yes, ones(6), ones(6)], [no, ones(4), ones(6)])
    refuse(module, device, [yes, ones(6), ones(5)], "match_cast of w", "dim 0", "6", "5")
    refuse(module, device, [no, ones(6), ones(6)], "k <= 4", "6")


def test_a_condition_is_a_scalar_of_bool(device: Device) -> None:
    module = read("""
        @function(pure=False)
        def main(x: Tensor((n,), f32)) -> Tensor((n,), f32):
            c: Object() = call_host("ask", (x,), out=Object())
            y: Tensor((n,), f32)
            if c:
                y = x
            else:
                with dataflow():
                    a: Tensor((n,), f32) = op.exp(x)
                y = a
            return y
    """)
    with compiled(module, device, {"ask": lambda x: x.shape[0] == 2}) as program:
        same(program(ones(2)), ones(2), "then")
        same(program(ones(3)), np.exp(ones(3)), "else")
    for answer, result in ((1, "the number 1"), (np.array([True]), r"an array of bool .*\(1,\)"), (None, "None")):
        says = f"main: expected a scalar of bool as the condition of an `if`, got {result}" + r"[\s\S]*if c:[\s\S]*\^"
        with (
            compiled(module, device, {"ask": lambda x, answer=answer: answer}) as program,
            pytest.raises(UserError, match=says),
        ):
            program(ones(2))


LOOP = """
    @function
    def grow(x: Tensor((n,), f32), limit: Tensor((), f32)) -> Tensor((n,), f32):
        with dataflow():
            s: Tensor((), f32) = op.sum(x, axes=(0,), keepdims=False)
            enough: Tensor((), bool) = op.less(limit, s)
        y: Tensor((n,), f32)
        if enough:
            y = x
        else:
            with dataflow():
                d: Tensor((n,), f32) = op.{step}(x, {by})
                r: Tensor((n,), f32) = call("grow", d, limit)
            y = r
        return y

    @function
    def main(x: Tensor((n,), f32), limit: Tensor((), f32)) -> Tensor((n,), f32):
        with dataflow():
            e: Tensor((n,), f32) = op.relu(x)
            r: Tensor((n,), f32) = call("grow", e, limit)
            t: Tensor((n,), f32) = op.tanh(r)
        return t
"""


def test_loop_with_data_dependent_end(device: Device) -> None:
    module = read(LOOP.format(step="add", by="x"))
    limits = [np.array(v, np.float32) for v in (-1, 5, 1e6)]
    agree(module, device, *([ones(n), limit] for n in (1, 3) for limit in limits), [ones(0), limits[0]])
    long = read(LOOP.format(step="add_scalar", by="value=1.0"))
    limit = np.array(200, np.float32)
    with compiled(long, device) as program:
        same(program(ones(1), limit), run(long, ones(1), limit), "long")


def test_recursion_too_deep_is_refused(device: Device) -> None:
    module = read("""
        @function
        def main(x: Tensor((n,), f32), steps: Prim(i64, k)) -> Tensor((n,), f32):
            y: Tensor((n,), f32)
            if prim(k <= 0):
                y = x
            else:
                with dataflow():
                    r: Tensor((n,), f32) = call("main", x, prim(k - 1))
                    d: Tensor((n,), f32) = op.add(r, x)
                y = d
            return y
    """)
    agree(module, device, [ones(2), 0], [ones(2), 7], [ones(0), 3])
    with compiled(module, device) as program:
        same(program(ones(1), 150), np.array([151], np.float32), "deep")
        with pytest.raises(UserError, match=f"main: expected at most {MAX_DEPTH} calls"):
            program(ones(1), MAX_DEPTH + 1)
        same(program(ones(1), 2), 3 * ones(1), "after")


def test_mutually_recursive_functions(device: Device) -> None:
    text = """
        @function
        def {name}(x: Tensor((n,), f32), k: Prim(i64, j)) -> Tensor(None, f32, ndim=1):
            y: Tensor(None, f32, ndim=1)
            if prim(j < 1):
                y = x
            else:
                with dataflow():
                    a: Tensor({dims}, f32) = op.{step}
                    r: Tensor(None, f32, ndim=1) = call("{other}", a, prim(j - 1))
                y = r
            return y
    """
    main = """
        @function
        def main(x: Tensor((n,), f32), k: Prim(i64, j)) -> Tensor(None, f32, ndim=1):
            with dataflow():
                y: Tensor(None, f32, ndim=1) = call("longer", x, k)
            return y
    """
    longer = text.format(name="longer", dims="(n + n,)", step="concat(x, x, axis=0)", other="higher")
    higher = text.format(name="higher", dims="(n,)", step="add(x, x)", other="longer")
    result = agree(read(longer + higher + main), device, *([ones(2), k] for k in range(5)))
    assert [f.shape[0] for f in result] == [2, 4, 4, 8, 8]


def test_functions_chosen_by_a_branch(device: Device) -> None:
    module = read("""
        @function
        def double(x: Tensor((k,), f32)) -> Tensor((k,), f32):
            with dataflow():
                y: Tensor((k,), f32) = op.add(x, x)
            return y

        @function
        def raised(x: Tensor((k,), f32)) -> Tensor((k,), f32):
            with dataflow():
                y: Tensor((k,), f32) = op.exp(x)
            return y

        @function
        def main(c: Tensor((), bool), x: Tensor((n,), f32)) -> Tensor((n,), f32):
            f: Callable((Tensor((k,), f32),), Tensor((k,), f32))
            if c:
                f = fn("double")
            else:
                f = fn("raised")
            with dataflow():
                y: Tensor((n,), f32) = call(f, x)
                z: Tensor((n,), f32) = call(f, y)
            return z
    """)
    agree(module, device, [yes, ones(3)], [no, ones(3) / 9], [no, ones(0)])


def test_shapes_scalars_and_tuples_are_arguments_and_results(device: Device) -> None:
    given = "s: Shape([n, m]), k: Prim(i64, j), t: Tuple(Tensor((n * m,), f32), Shape(None, ndim=2)), b: Prim(bool)"
    given_back = (
        "Tensor((n, m), f32), Shape([m, n + j]), Tuple(Prim(i64, n * j), Tensor(None, f32, ndim=2)), Prim(bool)"
    )
    module = read(f"""
        @function
        def main({given}) -> Tuple({given_back}):
            with dataflow():
                x: Tensor((n * m,), f32) = t[0]
                u: Shape(None, ndim=2) = t[1]
                y: Tensor((n, m), f32) = op.reshape(x, shape=(n, m))
                e: Tensor((n, m), f32) = op.exp(y)
                z: Tensor(None, f32, ndim=2) = op.reshape_to(x, u)
                v: Tensor(None, f32, ndim=2) = op.tanh(z)
                p: Tuple(Prim(i64, n * j), Tensor(None, f32, ndim=2)) = (prim(n * j), v)
                q: Shape([m, n + j]) = shape(m, n + j)
            return (e, q, p, b)
    """)
    expected = run(module, (2, 3), 5, (ones(6) / 9, (3, 2)), True)
    with compiled(module, device) as program:
        e, q, number, v, b = program((2, 3), 5, (ones(6) / 9, (3, 2)), True)
        same((e, v), (expected[0], expected[2][1]), "tensors")
        assert (q, number, b) == (expected[1], expected[2][0], expected[3]) == ((3, 7), 10, True)
        same(program(np.array([2, 3]), np.array(5), [ones(6) / 9, [3, 2]], yes)[0], e, "as a file of arrays holds them")
        for args, says in (
            (((2, 4), 5, (ones(6), (3, 2)), True), "parameter t, field 0: expected .* dim 0 .*equal to 8, got 6"),
            (((2, 3, 1), 5, (ones(6), (3, 2)), True), r"parameter s: expected Shape\(\[n, m\]\), got \(2, 3, 1\)"),
            (((-2, -3), 5, (ones(6), (3, 2)), True), "arguments: expected 0 <= n, got n = -2"),
            (((2, 3), 0.5, (ones(6), (3, 2)), True), r"parameter k: expected Prim\(i64, j\), got the number 0.5"),
            (((2, 3), 5, (ones(6), (3, 2)), 1), r"parameter b: expected Prim\(bool\), got the number 1"),
            (((2, 3), 5, (ones(6),), True), "parameter t: expected Tuple.*got a tuple of 1"),
            (((2, 3), 5, (ones(6), (4, 2)), True), "reshape_to: expected 6 elements, got dims"),
            (((2, 3), 5), "expected 4 arguments"),
        ):  # fmt: skip
            with pytest.raises(UserError, match=f"main: {says}"):
                program(*args)


def test_parameters_of_unknown_dims(device: Device) -> None:
    module = read("""
        @function
        def main(x: Tensor(None, f32, ndim=2), w: Tensor((n,), f32)) -> Tensor(None, f32, ndim=1):
            with dataflow():
                e: Tensor(None, f32, ndim=2) = op.exp(x)
                f: Tensor(None, f32, ndim=1) = op.flatten(e)
                c: Tensor((n,), f32) = match_cast(f, Tensor((n,), f32))
                y: Tensor((n,), f32) = op.add(c, w)
            return y
    """)
    agree(module, device, [ones(2, 3) / 9, ones(6)], [ones(0, 3), ones(0)])
    refuse(module, device, [ones(2, 3), ones(5)], "match_cast of f", "dim 0", "5", "6")
    refuse(module, device, [ones(6), ones(6)], "parameter x", "1")
    unknown = read("""
        @function
        def main(x: Tensor(None, f32)) -> Tensor(None, f32):
            with dataflow():
                e: Tensor(None, f32) = op.exp(x)
            return e
    """)
    with pytest.raises(BuildError, match=r"main: e: .*to lower exp[\s\S]*add a match_cast"):
        lower(unknown)


HOSTS = """
    @function(pure=False)
    def main(x: Tensor((n,), f32)) -> Tuple(Tensor((n,), f32), Shape(None, ndim=1)):
        a: Object() = call_host("log", (x, prim(n)), out=Object())
        with dataflow():
            y: Tensor((n,), f32) = op.add(x, x)
        b: Object() = call_host("log", (y, prim(const(0.5, f32))), out=Object())
        z: Tensor((n,), f32) = call_host("tools.grow", (y,), out=Tensor((n,), f32))
        with dataflow():
            e: Tensor((n,), f32) = op.exp(z)
        s: Shape(None, ndim=1) = call_host("size", (e,), out=Shape(None, ndim=1))
        return (e, s)
"""


def test_host_routines_are_called_in_order(device: Device) -> None:
    calls: list[Any] = []
    hosts: dict[str, Any] = {
        "log": lambda v, n: calls.append((float(v[0]), n)), "tools.grow": lambda v: v / 9, "size": lambda v: list(v.shape),
    }  # fmt: skip
    module = read(HOSTS)
    (expected,) = agree(module, device, [ones(2)], hosts=hosts | {"size": lambda v: v.shape})
    calls.clear()
    with compiled(module, device, hosts) as program:
        actual = program(ones(2))
    same(actual[0], expected[0], "grown")
    assert actual[1] == expected[1] == (2,) and calls == [(1, 2), (2, 0.5)]


@pytest.mark.parametrize(
    ("name", "routine", "says"),
    [
        ("size", None, "host routine 'size'; given: log, tools.grow; .*host="),
        ("tools.grow", lambda v: v[:1], r"'tools.grow': .*dim 0 \(n\) equal to 2, got 1"),
        ("tools.grow", lambda v: v.astype("f8"), "host routine 'tools.grow': expected .*got float64"),
        ("tools.grow", lambda v: list(v), "host routine 'tools.grow': expected .*got a tuple of 2"),
        ("size", lambda v: 3, "host routine 'size': expected .*got the number 3"),
    ],
)  # fmt: skip
def test_host_routine_with_undeclared_result_is_refused(device: Device, name: str, routine: Any, says: str) -> None:
    hosts = {"log": lambda *_: None, "tools.grow": lambda v: v, "size": lambda v: v.shape, name: routine}
    given = {k: v for k, v in hosts.items() if v is not None}
    with compiled(read(HOSTS), device, given) as program, pytest.raises(UserError, match=says):
        program(ones(2))


def test_error_of_host_routine_names_caller(device: Device) -> None:
    def broken(v: Any, n: int) -> None:
        v[0] = 3  # it is not its own

    with (
        compiled(read(HOSTS), device, {"log": broken}) as program,
        pytest.raises(ValueError, match="read-only") as caught,
    ):
        program(ones(2))
    assert caught.value.__notes__ == ["in the host routine 'log', called by main"]


def test_data_dependent_sizes(device: Device) -> None:
    module = read("""
        m = symbol("m", lower=0, upper=4)

        @function
        def main(x: Tensor((n, 2), f32), w: Tensor((3,), f32)) -> Tuple(Tensor((m,), f32), Tensor(None, f32, ndim=1), Shape([m])):
            with dataflow():
                a: Tensor((n, 2), f32) = op.relu(x)
                u: Tensor(None, f32, ndim=1) = op.unique(a)
                e: Tensor(None, f32, ndim=1) = op.exp(u)
                c: Tensor((m,), f32) = match_cast(e, Tensor((m,), f32))
                d: Tensor((m + 3,), f32) = op.concat(c, w, axis=0)
                v: Tensor(None, f32, ndim=1) = op.unique(d)
                t: Tensor(None, f32, ndim=1) = op.tanh(v)
                s: Shape([m]) = op.shape_of(c)
            return (c, t, s)
    """)
    three = np.array([[1, 2], [-1, 1], [2, 2]], np.float32)
    agree(module, device, [three, ones(3)], [np.zeros((0, 2), np.float32), ones(3)], [three * 0, ones(3)])
    refuse(module, device, [ones(3, 2), ones(3)], "match_cast of e", "m <= 4", "6")


def test_branch_computes_needed_values_in_largest_parts(device: Device) -> None:
    """One part before the branch, one on each side that computes, one after."""
    names = sorted(n for n in lower(read(SIDES)).functions if n != "main")
    assert names == ["main_part0", "main_part1", "main_part2", "main_part3"]


def test_an_artifact_holds_host_programs_and_subgraphs(tmp_path: Path, device: Device) -> None:
    module = read(LOOP.format(step="add", by="x"))
    saved = build(module, target="c", policy="generic", db=MemoryStore()).save(tmp_path / "loop.rta")
    again = build(module, target="c", policy="generic", db=MemoryStore()).save(tmp_path / "again.rta")
    assert saved.read_bytes() == again.read_bytes()
    artifact = load_artifact(saved)
    assert artifact.functions == ("main",) and artifact.save(tmp_path / "copy.rta").read_bytes() == saved.read_bytes()
    assert [str(s) for s in artifact.inputs] == ["x: float32 (n,)", "limit: float32 ()"]
    assert [str(s) for s in artifact.outputs] == ["t: float32 (n,)"]
    args = [ones(3), np.array(50, np.float32)]
    with artifact.open(device) as model:
        same(model.run(args)[0], run(module, *args), "in order")
        same(model.run({"limit": args[1], "x": args[0]})[0], run(module, *args), "by name")
        with pytest.raises(UserError, match="main: expected an array for parameter limit"):
            model.run({"x": args[0]})


def test_artifact_with_altered_host_programs_is_refused(tmp_path: Path) -> None:
    saved = build(read(SIDES), target="c", policy="generic", db=MemoryStore()).save(tmp_path / "sides.rta")
    original = saved.read_bytes()
    (host_program,) = json.loads(zipfile.ZipFile(saved).read("drivers.json"))
    attempts: list[tuple[object, str]] = [
        ([host_program, host_program], "distinct names in their order"),
        ([host_program | {"name": "main_part0"}], "names that no program has"),
        ([host_program | {"registers": 3}], "the index of a register"),
        ([host_program | {"schema": 9}], "expected schema 1, got 9"),
        ({"x": 1}, "host_programs: expected a list"),
    ]
    for value, says in attempts:
        saved.write_bytes(original)
        with pytest.raises(ArtifactError, match=says):
            load_artifact(forged(saved, {"drivers.json": json.dumps(value).encode()}))
    saved.write_bytes(original)
    forged(saved, {"drivers.json": b"\xff"})
    with pytest.raises(ArtifactError, match=r"drivers\.json: expected UTF-8"):
        load_artifact(saved)


def test_fields_of_one_call_go_different_ways(device: Device) -> None:
    module = read("""
        @function
        def main(c: Tensor((), bool), x: Tensor((n, 4), f32)) -> Tensor(None, f32, ndim=2):
            with dataflow():
                t: Tuple(Tensor((n, 2), f32), Tensor((n, 2), f32)) = op.split(x, parts=2, axis=1)
                a: Tensor((n, 2), f32) = t[0]
            y: Tensor(None, f32, ndim=2)
            if c:
                with dataflow():
                    b: Tensor((n, 2), f32) = t[1]
                    d: Tensor((n + n, 2), f32) = op.concat(a, b, axis=0)
                y = d
            else:
                y = a
            return y
    """)
    agree(module, device, [yes, ones(3, 4)], [no, ones(3, 4)], [yes, ones(0, 4)])
