"""Refusals of transform_layout, storage_align and swizzle, and how aligned and swizzled rows print, lower and stay separate."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support.meaning import assert_same_meaning

from relax_tune.errors import BuildError, ParseError, VerifyError
from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.check.verify import verify
from relax_tune.ir.codegen.generate import CodeTarget, generate
from relax_tune.ir.core.expr import Expr, Tunable, as_int, const
from relax_tune.ir.hardware.swizzle import LINE_BYTES, period, swizzled
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.ir.text.printer import print_text
from relax_tune.schedules.schedule import Schedule, replay
from relax_tune.schedules.sketch import Sketch, instantiate, replay_with


def mapped(index_map: str, *factors: object, buffer: str = "B") -> tuple[str, dict[str, object]]:
    return step("transform_layout", buffer=buffer, index_map=index_map, factors=list(factors))


def aligned(factor: int, offset: int = 0, buffer: str = "B") -> tuple[str, dict[str, object]]:
    return step("storage_align", buffer=buffer, factor=factor, offset=offset)


def turned(vector: int, buffer: str = "B") -> tuple[str, dict[str, object]]:
    return step("swizzle", buffer=buffer, vector=vector)


SHARED = step("set_scope", buffer="B", scope="shared")
REFUSALS = [
    refuse("map an input", make.chain, mapped("i, j -> j, i", buffer="A"), message="called 'A'"),
    refuse("no map", make.chain, mapped("i, j"), message="expects a map such as"),
    refuse("no indices", make.chain, mapped("i, j ->"), message="expects a map such as"),
    refuse("no Python", make.chain, mapped("i, j -> i +"), message="expects a map such as"),
    refuse("too few names", make.chain, mapped("i -> i"), message="a name for each of the 2 dimensions"),
    refuse("one name twice", make.chain, mapped("i, i -> i"), message="a name for each"),
    refuse("a long map", make.chain, mapped("i, j -> i" + "+ 0" * 300), message="a name for each"),
    refuse("a name from nowhere", make.chain, mapped("i, j -> i, k"), message="one of n0, n1, i, j, .* got 'k'"),
    refuse("a call", make.chain, mapped("i, j -> i, abs(j)"), message=r"got 'abs\(j\)'"),
    refuse("a division by nothing", make.chain, mapped("i, j -> i, j // 0"), message="divides by numbers and factors"),
    refuse("a division by a size", make.chain, mapped("i, j -> i, j // n0, j % n0"), message="divides by numbers and factors"),
    refuse("a factor of nothing", make.chain, mapped("i, j -> i, j // f0, j % f0", 0), message="positive factor"),
    refuse("a dimension lost", make.chain, mapped("i, j -> i"), message="different places"),
    refuse("a collision", make.chain, mapped("i, j -> i + j"), message="different places"),
    refuse("a fold", make.chain, mapped("i, j -> i, j % 4"), message="different places"),
    refuse("align an input", make.chain, aligned(4, buffer="A"), message="called 'A'"),
    refuse("align by nothing", make.chain, aligned(0), message="positive factor"),
    refuse("align backwards", make.chain, aligned(4, -1), message="no negative offset"),
    refuse("align a vector", make.stencil, aligned(4), message="expects rows"),
    refuse(
        "take aligned rows to global memory",
        make.chain,
        step("set_scope", buffer="B", scope="local"),
        aligned(4),
        step("set_scope", buffer="B", scope="global"),
        message="before storage_align",
    ),
    refuse("swizzle an input", make.chain, turned(4, "A"), message="called 'A'"),
    refuse("swizzle global memory", make.chain, turned(4), message="rows in shared memory"),
    refuse("swizzle a vector", make.stencil, step("set_scope", buffer="B", scope="shared"), turned(4), message="rows in shared"),
    refuse("swizzle by 12 bytes", make.chain, SHARED, turned(3), message="4, 8, 16 bytes, got 3"),
    refuse("swizzle by no number", make.chain, SHARED, turned(True), message="got True"),
    refuse("swizzle aligned rows", make.chain, SHARED, aligned(4), turned(4), message="not aligned already"),
    refuse("align swizzled rows", make.chain, SHARED, turned(4), aligned(4), message="are swizzled"),
    refuse(
        "take swizzled rows out of shared memory",
        make.chain,
        SHARED,
        turned(4),
        step("set_scope", buffer="B", scope="local"),
        message="before storage_align or swizzle",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_layouts_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)


@pytest.mark.parametrize(
    ("index_map", "shape"),
    [
        ("i, j -> i * n1 + j", "n * m"),
        ("i, j -> j * n0 + i", "m * n"),
        ("i, j -> j // f0, i, j % f0", "(m + (T - 1)) // T, n, T"),
        ("i, j -> i * 2 + 1, j", "n * 2, m"),
        ("i, j -> 0, i, j", "1, n, m"),
    ],
)
def test_transform_layout_keeps_meaning(index_map: str, shape: str) -> None:
    tile = Tunable("T", (1, 3, 4))
    s = Schedule(make.chain())
    s.apply("transform_layout", buffer="B", index_map=index_map, factors=[tile])
    assert ", ".join(map(repr, s.func.allocs[0].shape)) == shape
    for n, m in ((0, 3), (3, 0), (1, 1), (5, 7)):
        assert_same_meaning(make.chain(), s.func, {"n": n, "m": m}, tunables={tile: 3})


def rows(scope: str, factor: int | Tunable) -> Schedule:
    """Tiles of (4, 6) elements in aligned rows."""
    s = Schedule(make.chain())
    i_0, i_1 = s.split("inc_i", [None, 4])
    j_0, _ = s.split("inc_j", [None, 6])
    s.reorder([j_0, i_1])
    s.compute_at("double", j_0)
    s.bind(i_0, "group")
    s.apply("set_scope", buffer="B", scope=scope)
    s.apply("storage_align", buffer="B", factor=factor, offset=1)
    return s


def test_aligned_rows_parse_back_and_take_tunable() -> None:
    tile = Tunable("T", (4, 16))
    s = rows("local", tile)
    assert structural_equal(parse_prim_func(print_text(s.func)), s.func)
    assert not structural_equal(rows("local", 4).func, rows("local", 8).func)
    instance = instantiate(Sketch("aligned", s.func, s.trace, ()), {"T": 16})
    assert structural_equal(instance, replay_with(s.trace, make.chain(), {"T": 16}))
    assert 'scope="local", row_alignment=(16, 1)' in print_text(instance)
    with pytest.raises(ParseError, match="expected a row as"):
        parse_prim_func(print_text(instance).replace("row_alignment=(16, 1)", "row_alignment=(16,)"))
    for wrong in ("row_alignment=(0, 1)", "row_alignment=(16, -1)", "row_alignment=(n, 1)"):
        with pytest.raises(VerifyError, match="rows"):
            verify(parse_prim_func(print_text(instance).replace("row_alignment=(16, 1)", wrong)))
    with pytest.raises(BuildError, match="a constant alignment"):
        generate(replay(s.trace, make.chain()).func, CodeTarget("c", 16))


@pytest.mark.process
@pytest.mark.parametrize(("language", "scope"), [("c", "local"), ("opencl", "shared")])
def test_aligned_rows_grow_after_shrinking(language: str, scope: str) -> None:
    func = rows(scope, 16).func
    device = opened(language)
    run = Compiled(device, language, func)
    # 4 rows of 16 + 1 elements
    assert "B[68]" in run.kernels[0].source
    for n, m in ((1, 1), (5, 13), (4, 6)):
        x = np.random.default_rng(n).standard_normal((n, m), np.float32)
        (y,) = run([x, np.empty_like(x)])
        np.testing.assert_array_equal(y, x * 2 + 1)
    device.close()


def swizzled_tiles(columns: int, vector: int) -> Schedule:
    """Fill tiles of 8 rows and `columns` columns in shared memory, vector by vector."""
    s = Schedule(make.chain())
    i_0, i_1 = s.split("inc_i", [None, 8])
    j_0, j_1 = s.split("inc_j", [None, columns])
    s.reorder([j_0, i_1])
    s.compute_at("double", j_0)
    own = s.inner_loops("double", j_0)
    s.bind(i_0, "group")
    s.apply("set_scope", buffer="B", scope="shared")
    s.apply("swizzle", buffer="B", vector=vector)
    for rows, cells in ((i_1, j_1), (own[0], own[1])):
        s.vectorize(s.split(cells, [None, vector])[1])
        s.bind(rows, "item")
    return s


def test_swizzled_rows_read_back_and_are_checked() -> None:
    func = swizzled_tiles(16, 4).func
    text = print_text(func)
    assert 'scope="shared", row_alignment=(4, 0), swizzle=4)' in text
    assert structural_equal(parse_prim_func(text), func)
    assert not structural_equal(func, swizzled_tiles(16, 2).func)
    for wrong in (
        "row_alignment=(4, 1), swizzle=4",
        "row_alignment=(8, 0), swizzle=4",
        "row_alignment=(3, 0), swizzle=3",
        "swizzle=4",
    ):
        with pytest.raises(VerifyError, match="to swizzle"):
            verify(parse_prim_func(text.replace("row_alignment=(4, 0), swizzle=4", wrong)))


def test_swizzled_rows_keep_meaning() -> None:
    """Rows of four vectors, of three, and of no whole number of them."""
    device = opened("opencl")
    shapes = [swizzled_tiles(columns, 4).func for columns in (16, 12, 10)]
    for columns, run in zip((16, 12, 10), Compiled.together(device, "opencl", shapes), strict=True):
        text = run.kernels[0].source.split("/*end prelude*/")[-1]
        assert "m_local_f32x4(B + " in text, "vectors stay vectors"
        for n, m in ((13, 53), (0, 5), (16, 48)):
            x = np.random.default_rng(n).standard_normal((n, m), np.float32)
            (y,) = run([x, np.full_like(x, np.nan)])
            np.testing.assert_array_equal(y, x * 2 + 1, err_msg=f"{columns} columns")
    device.close()


@pytest.mark.parametrize(("vector", "size"), [(8, 2), (4, 4), (2, 4), (1, 4)])
def test_swizzled_rows_have_no_bank_conflicts(vector: int, size: int) -> None:
    """Rows keep their vectors; one vector's places in as many rows as a line has vectors are in different banks."""
    line = LINE_BYTES // (vector * size)
    for vectors in (1, 2, 3, 4, 5, 8, 12, 16, 64):
        again = value(period(vectors, line))
        for r in range(again):
            assert sorted(value(swizzled(const(r), const(c), vectors, line)) for c in range(vectors)) == [
                *range(vectors)
            ]
            assert swizzled(const(r + again), const(0), vectors, line) is swizzled(const(r), const(0), vectors, line)
        for c in {0, vectors - 1} if vectors & (vectors - 1) == 0 else ():
            spots = {(r * vectors + value(swizzled(const(r), const(c), vectors, line))) % line for r in range(line)}
            assert len(spots) == line, (vectors, c)


def value(e: Expr) -> int:
    number = as_int(e)
    assert number is not None
    return number
