"""`call_tir_inplace`: outputs in the memory of arguments. It never changes a result, and what it may not overwrite is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ir.passes.memory.test_storage_plans import chain
from tests.runtime.whole_models import chosen
from tests.support.built_modules import executed, job_of, rand
from tests.support.effort import examples
from tests.support.programs import agree, checked, compiled, never, ones, opened, read, refuse, run, same
from tests.support.tuner_models import QUICK, job_dispatching

import relax_tune as rt
from relax_tune.database.store import MemoryStore
from relax_tune.errors import ParseError
from relax_tune.ir.check.inplace import inplace_conflicts
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import f16, f32, i64
from relax_tune.ir.core.expr import Var, const, load, lt
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph import CallTIR, GVar, TupleValue, Value
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, seq
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Concat, Flatten, Permute, Reshape, Slice
from relax_tune.ir.op.math.elementwise import Add, Exp, MulScalar, Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.passes.memory.inplace import inplace_pairs, with_inplace
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.rewrite.emitter import map_graphs
from relax_tune.ir.text.parser import parse_module
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.program.program import Program
from relax_tune.tuner.job.device_job import device_job

pytestmark = pytest.mark.ccompiler


def pointwise(name: str = "half", count: int = 1) -> PrimFunc:
    """z = 0.5 * (x0 + x1 + ...) over rows of 4."""
    n = Var("n")
    b = TensorBuilder(name)
    xs = [b.input(f"x{i}", (n, 4)) for i in range(count)]
    z = b.output("z", (n, 4))
    b.compute(z, lambda i, j: sum((x[i, j] for x in xs[1:]), xs[0][i, j]) * 0.5)
    return b.finish()


def mirrored() -> PrimFunc:
    """z[i, j] = x[i, 3 - j]."""
    n = Var("n")
    b = TensorBuilder("mirrored")
    x, z = b.input("x", (n, 4)), b.output("z", (n, 4))
    b.compute(z, lambda i, j: x[i, 3 - j])
    return b.finish()


def put_rows() -> PrimFunc:
    """z is x, except for the rows `at`, which come from `new`."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("put_rows")
    at, new, x, z = b.input("at", (m,), i64), b.input("new", (m, 4)), b.input("x", (n, 4)), b.output("z", (n, 4))
    b.compute(z, lambda i, j: x[i, j])
    f = b.finish()
    i, j, p, q = Var("vi"), Var("vj"), Var("put_i"), Var("put_j")
    where = (load(at.buffer, (i,)), j)
    iters = (IterVar(i, m), IterVar(j, const(4)))
    put = Block("put", iters, (p, q), BufferStore(z.buffer, where, load(new.buffer, (i, j))))
    return PrimFunc(f.name, f.params, 1, seq(f.body, For(p, m, For(q, const(4), put))))


def rows(g: GraphBuilder, name: str = "n") -> TensorInfo:
    return TensorInfo((g.symbol(name, 0, 40), const(4)), f32)


def storages(program: Program) -> int:
    return len({b.storage for b in program.buffers if b.role == "temp"})


def allocated_arrays(program: Program) -> list[str]:
    """Values between calls, without what kernels need for themselves."""
    return [b.name for b in program.buffers if b.role == "temp" and not b.name.startswith("scratch")]


# -- what it does ------------------------------------------------------------------------------------------------------


def test_a_chain_in_one_storage(device: Device) -> None:
    module = read("""
        n = symbol("n", lower=0)

        @function
        def main(x: Tensor((n, 4), f32), w: Tensor((n, 4), f32)) -> Tensor((n, 4), f32):
            with dataflow():
                a: Tensor((n, 4), f32) = op.exp(x)
                b: Tensor((n, 4), f32) = call_tir_inplace("half", (a, w), out=Tensor((n, 4), f32), inplace=[0])
                flat: Tensor((n * 4,), f32) = op.flatten(b)
                again: Tensor((n, 4), f32) = op.reshape(flat, shape=[n, 4])
                c: Tensor((n, 4), f32) = call_tir_inplace("half", (w, again), out=Tensor((n, 4), f32), inplace=[1])
                d: Tensor((n, 4), f32) = op.softmax(c)
            return d

        @prim_func(outputs=1)
        def half(x: Buffer((n, 4), f32), y: Buffer((n, 4), f32), z: Buffer((n, 4), f32)):
            for i in serial(n):
                for j in serial(4):
                    with block("half"):
                        vi = spatial(n, i); vj = spatial(4, j)
                        z[vi, vj] = (x[vi, vj] + y[vi, vj]) * 0.5
    """)
    agree(module, device, *([np.sin(ones(n, 4)), ones(n, 4) / 9] for n in (0, 1, 5, 33)))
    job = device_job(module, device.info, MemoryStore(), QUICK)
    program = job.build("generic").program
    assert len(allocated_arrays(program)) == 1
    halves = [s for c in program.calls if c.name in "bc" for v in c.variants for s in v.steps]
    assert [len(s.buffers) for s in halves] == [2, 2]  # the other argument, and one pointer for both


@pytest.mark.parametrize("fused", [False, True])
def test_paper_chain_in_place_needs_one_storage(device: Device, fused: bool) -> None:
    job = device_job(chain(), device.info, MemoryStore(), QUICK) if fused else job_of(chain(), device)
    assert storages(job.build("generic").program) == 2
    program = job.build("generic", memory="inplace").program
    assert storages(program) <= 1
    with executed(program, job, device) as executor:
        for n in (0, 1, 7, 100):
            x = np.sin(ones(n, 2, 2))
            same(executor.run([x])[0], run(job.module, x), f"n = {n}")


def test_in_place_scatter_keeps_other_rows(device: Device) -> None:
    g = GraphBuilder()
    info = rows(g)
    m = g.symbol("m", 0, 8)
    f = g.add(put_rows())
    table = g.call(Exp(), g.parameter("x", info))
    args = (g.parameter("at", TensorInfo((m,), i64)), g.parameter("new", TensorInfo((m, const(4)), f32)), table)
    module = checked(g.finish(g.call(Relu(), g.call_tir(f, args, info, inplace=(2,)))))
    x, at, new = rand(9, 4), np.array([2, 0, 7], np.int64), rand(3, 4)
    agree(module, device, [x, at, new])
    program = device_job(module, device.info, MemoryStore(), QUICK).build("generic").program
    (put,) = [c for c in program.calls if c.name == "put_rows"]
    assert [len(v.steps) for v in put.variants] == [1]  # the copy is gone


def test_one_output_of_two_in_place(device: Device) -> None:
    n = Var("n")
    b = TensorBuilder("both")
    x, y, z, s = b.input("x", (n, 4)), b.input("y", (n, 4)), b.output("z", (n, 4)), b.output("s", (n, 4))
    b.compute(z, lambda i, j: x[i, j] + y[i, j])
    b.compute(s, lambda i, j: z[i, 3 - j] * y[i, j])
    g = GraphBuilder()
    info = rows(g)
    value = g.call(Exp(), g.parameter("x", info))
    whole = g.call_tir(g.add(b.finish()), (value, g.parameter("y", info)), (info, info), inplace=(0, None))
    module = checked(g.finish((g.call(Relu(), g.item(whole, 0)), g.item(whole, 1), g.item(whole, 0))))
    agree(module, device, [rand(5, 4), rand(5, 4)], [rand(0, 4), rand(0, 4)])


@pytest.mark.opencl
def test_in_place_on_opencl() -> None:
    g = GraphBuilder()
    info = rows(g)
    value = g.call(Exp(), g.parameter("x", info))
    module = checked(g.finish(g.call(Softmax(), g.call_tir(g.add(pointwise()), (value,), info, inplace=(0,)))))
    with opened("opencl") as device, compiled(module, device) as program:
        for size in (0, 1, 33):
            x = rand(size, 4)
            same(program(x), run(module, x), f"n = {size}")


def test_in_place_unproven_dims_are_compared_at_run_time(device: Device) -> None:
    g = GraphBuilder()
    info, out = rows(g), TensorInfo((g.symbol("m"), const(4)), f32)
    n = Var("n")
    b = TensorBuilder("like")
    a, _, z = b.input("x", (n, 4)), b.input("y", (Var("m"), 4)), b.output("z", (n, 4))
    b.compute(z, lambda i, j: a[i, j] + 1.0)
    value = g.call(Exp(), g.parameter("x", info))
    module = checked(
        g.finish(g.call(Relu(), g.call_tir(g.add(b.finish()), (value, g.parameter("y", out)), out, inplace=(0,))))
    )
    x = rand(3, 4)
    (result,) = agree(module, device, [x, rand(3, 4)])
    same(result, np.exp(x) + np.float32(1), "equal dims")
    refuse(module, device, [ones(3, 4), ones(2, 4)], "2", "3")


# -- what it may not do ------------------------------------------------------------------------------------------------


class Misused:
    """A program around a computed value `made` of parameter `x`; `refused` says that the result it is given is not allowed."""

    def __init__(self) -> None:
        self.g = GraphBuilder()
        self.info = rows(self.g)
        for f in (pointwise(), pointwise("two", 2), mirrored(), row_sums()):
            self.g.add(f)
        self.x = self.g.parameter("x", self.info)
        self.made = self.g.call(Exp(), self.x, hint="made")

    def put(self, *args: Value, callee: str = "half", at: int = 0) -> GVar:
        return self.g.call_tir(callee, args, self.info, inplace=(at,))

    def refused(self, result: Value | tuple[Value, ...], *words: str) -> None:
        module = self.g.finish(result)
        never(lambda: verify(module), "call_tir_inplace", *words)


def row_sums() -> PrimFunc:
    """z[i, j] = the sum over k of x[i, j]: j times what stands there."""
    n = Var("n")
    b = TensorBuilder("row_sums")
    x, z = b.input("x", (n, 4)), b.output("z", (n, 4))
    b.reduce(z, (4,), const(0.0), lambda acc, i, j, k: acc + x[i, j])
    return b.finish()


def test_in_place_write_to_foreign_value_is_refused() -> None:
    p = Misused()
    p.refused(p.put(p.x), "x is not computed by this function", "parameter")
    p = Misused()
    view = p.g.call(Reshape(p.info.shape or ()), p.g.call(Flatten(), p.x), hint="again")
    p.refused(p.put(view), "again is not computed by this function", "parameter")
    p = Misused()
    w = p.g.constant("w", ones(3, 4))
    p.refused(p.g.call_tir("half", (w,), w.info, inplace=(0,)), "w is not computed by this function", "weight")


def test_in_place_write_to_value_used_later_is_refused() -> None:
    p = Misused()
    p.refused(p.g.call(Add(), p.put(p.made), p.made), "made is used here", "half")
    p = Misused()
    p.refused((p.put(p.made), p.made), "made is used here")
    p = Misused()
    flat = p.g.call(Flatten(), p.made)
    p.refused((p.put(p.made), p.g.call(Relu(), flat)), "made is used here")
    p = Misused()
    pair = p.g.emit(TupleValue((p.made, p.x)))
    p.refused((p.put(p.made), pair), "made is used here")
    p = Misused()
    p.refused(p.g.call(Add(), p.put(p.made), p.put(p.made)), "made is used here")
    p = Misused()
    p.refused(p.g.call(Relu(), p.put(p.put(p.put(p.made)), p.made, callee="two")), "made is used here")


def test_in_place_non_elementwise_loops_are_refused() -> None:
    p = Misused()
    p.refused(p.put(p.made, callee="mirrored"), "x[vi, 3 - vj]", "z[vi, vj]")
    p = Misused()
    p.refused(p.put(p.made, callee="row_sums"), "reduces")
    p = Misused()  # the other argument is the same memory, read at other indices
    n = Var("n")
    b = TensorBuilder("against_itself")
    x, y, z = b.input("x", (n, 4)), b.input("y", (n, 4)), b.output("z", (n, 4))
    b.compute(z, lambda i, j: x[i, j] + y[i, 3 - j])
    p.g.add(b.finish())
    p.refused(p.put(p.made, p.made, callee="against_itself"), "y[vi, 3 - vj]")
    p = Misused()
    twice = p.put(p.made, p.made, callee="two")  # both read the element that is written: fine
    checked(p.g.finish(p.g.call(Relu(), twice)))


def test_in_place_write_in_branch_to_outer_value_is_refused() -> None:
    p = Misused()
    assert p.info.shape is not None
    chosen = p.g.branch(lt(p.info.shape[0], 3), lambda: p.put(p.made), lambda: p.g.call(Relu(), p.made))
    p.refused(chosen, "made is allocated outside this side of the branch")
    p = Misused()
    assert p.info.shape is not None
    inner = p.g.branch(lt(p.info.shape[0], 3), lambda: p.put(p.g.call(Exp(), p.x)), lambda: p.g.call(Relu(), p.made))
    module = checked(p.g.finish(inner))
    for size in (2, 5):
        assert run(module, ones(size, 4) / 9).shape == (size, 4)


@pytest.mark.parametrize(
    ("out", "places", "words"),
    [
        (TensorInfo((const(3), const(4)), f32), (1,), ("0..0", "got 1")),
        (TensorInfo((const(3), const(4)), f32), (0, None), ("each of 1 outputs", "got 2")),
        (TensorInfo((const(3), const(4)), f16), (0,), ("got Tensor((n, 4), f32)",)),
        (TensorInfo((const(12),), f32), (0,), ("expected 1 dims, got 2",)),
    ],
)
def test_in_place_misfitting_arguments_are_refused(
    out: TensorInfo, places: tuple[int | None, ...], words: tuple[str, ...]
) -> None:
    p = Misused()
    never(lambda: p.g.call_tir("half", (p.made,), out, inplace=places), "half", *words)


def test_memory_of_another_size_is_refused() -> None:
    half = TensorInfo((const(3), const(4)), f32)
    g = GraphBuilder()
    value = g.call(Exp(), g.input("x", (g.symbol("n", 5), 4)))
    g.add(pointwise())
    never(lambda: g.call_tir("half", (value,), half, inplace=(0,)), "dim 0", "3")
    p = Misused()
    text = print_text(p.g.finish(p.put(p.x)))
    never(lambda: verify(parse_module(text, OPERATORS)), "x is not computed by this function")
    for wrong in (text.replace("inplace=[0]", "inplace=[x]"), text.replace(", inplace=[0]", "")):
        with pytest.raises(ParseError, match="the position of an argument, or None"):
            parse_module(wrong, OPERATORS)


# -- marking what can be in place --------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> IRModule:
    """Elementwise calls, products with something added to them, permutations and views; several results."""
    g = GraphBuilder()
    n = g.symbol("n", 0, 20)
    info = TensorInfo((n, const(4)), f32)
    two = g.add(pointwise("two", 2))
    weight = g.constant("w", np.eye(4, dtype=np.float32) * 0.5)
    pool = [g.call(Exp(), g.parameter("x", info)), g.parameter("y", info)]
    for _ in range(draw(st.integers(2, 10))):
        a, b = (pool[draw(st.integers(0, len(pool) - 1))] for _ in range(2))
        kind = draw(st.integers(0, 6))
        if kind == 0:
            pool.append(g.call(MulScalar(0.5), a))
        elif kind == 1:
            pool.append(g.call_tir(two, (a, b), info))
        elif kind == 2:
            pool.append(g.call(Add(), g.call(Matmul(), a, weight), b))
        elif kind == 3:
            pool.append(g.call(Permute((1, 0)), g.call(Permute((1, 0)), a)))
        elif kind == 4:
            pool.append(g.call(Reshape((n, const(4))), g.call(Flatten(), a)))
        elif kind == 5:
            pool.append(g.call(Softmax(), a))
        else:
            pool.append(g.call(Slice(0, const(0), n), g.call(Concat(0), a, b)))
    return g.finish((pool[-1], pool[draw(st.integers(0, len(pool) - 1))]))


def in_place(module: IRModule) -> IRModule:
    """Write outputs into the memory of dead arguments wherever possible."""
    return map_graphs(module, lambda f, _: with_inplace(f, inplace_pairs(f, module)))


@settings(max_examples=examples(5), deadline=None)
@given(programs(), st.booleans())
def test_marking_changes_no_result(device: Device, module: IRModule, fused: bool) -> None:
    job = device_job(module, device.info, MemoryStore(), QUICK) if fused else job_of(module, device)
    marked = checked(in_place(job.lowered.module))
    assert in_place(marked) is marked
    plain, program = job.build("generic").program, job.build("generic", memory="inplace").program
    assert len(allocated_arrays(program)) <= len(allocated_arrays(plain))
    with executed(program, job, device) as one, executed(plain, job, device) as other:
        for n in (0, 1, 13):
            x, y = np.sin(ones(n, 4)), np.cos(ones(n, 4))
            for a, b in zip(one.run([x, y]), other.run([x, y]), strict=True):
                np.testing.assert_array_equal(a, b)
            expected = run(module, x, y)
            same(tuple(one.run([x, y])), expected, f"n = {n}")


def test_in_place_write_in_branch_to_inner_value_is_planned() -> None:
    g = GraphBuilder()
    info = rows(g)
    half, x = g.add(pointwise()), g.parameter("x", info)
    value = g.call(Exp(), x)

    def short() -> Value:
        halved = g.call_tir(half, (g.call(Relu(), value),), info, inplace=(0,))
        return g.emit(TupleValue((g.call(Softmax(), halved), value)))

    assert info.shape is not None
    chosen = g.branch(lt(info.shape[0], 3), short, lambda: g.emit(TupleValue((g.call(MulScalar(2.0), value), x))))
    module = checked(g.finish((g.item(chosen, 0), g.item(chosen, 1), x)))
    built = rt.build(module, target="c", db=MemoryStore(), policy="generic", memory="inplace")
    assert not built.notes
    with built.open() as model:
        for n in (2, 5, 0, 1, 9):
            given = rand(n, 4)
            same(tuple(model.run([given])), run(module, given), f"n = {n}")


def residual() -> IRModule:
    """relu(x w + r) in the memory of r: every variant of a product with an epilogue."""
    g = GraphBuilder()
    n = g.symbol("n", 1, 64)
    r = g.call(Exp(), g.input("x", (n, 24)))
    w = g.constant("w", np.random.default_rng(3).standard_normal((24, 24)).astype(np.float32))
    for _ in range(2):
        r = g.call(Relu(), g.call(Add(), g.call(Matmul(), g.call(Softmax(), r), w), r))
    return g.finish(g.call(Softmax(), r))


def test_in_place_product_variants_overwrite_addend(device: Device) -> None:
    job = job_dispatching(device.info, residual(), lambda choices, number: chosen(choices, 3, number))
    marks = [
        b.value.inplace for b in in_place(job.lowered.module).functions["main"].bindings if isinstance(b.value, CallTIR)
    ]  # type: ignore[union-attr]
    assert sum(any(p is not None for p in m) for m in marks) >= 2
    built = job.build(memory="inplace")
    assert any(len(c.variants) > 2 for c in built.program.calls)
    assert len(allocated_arrays(built.program)) < len(allocated_arrays(job.build().program)) or built.notes
    with executed(built.program, job, device) as executor:
        for n in (1, 2, 7, 16, 33, 64):
            x = rand(n, 24) / 4
            same(executor.run([x])[0], run(job.module, x), f"n = {n}")


def test_in_place_mark_invalidated_by_pass_is_dropped_with_note(device: Device) -> None:
    """As after common subexpression elimination: the overwritten value is now read again."""
    p = Misused()
    module = p.g.finish(p.g.call(Add(), p.put(p.made), p.made))
    lowered = lower(module)
    assert len(list(inplace_conflicts(lowered.functions["main"], lowered.module))) == 1
    job = device_job(module, device.info, MemoryStore(), QUICK)
    built = job.build("generic")
    assert any("half: not written in place" in note and "made is used here" in note for note in built.notes)
    with executed(built.program, job, device) as executor:
        x = rand(5, 4)
        same(executor.run([x])[0], run(module, x), "in memory of its own")
