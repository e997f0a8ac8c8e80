"""One small case of every primitive: its text before and after, and the same meaning at sizes 0, 1, a prime, the tile +- 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from tests.support import schedule_functions as make
from tests.support import zoo
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.core.dtype import i8
from relax_tune.ir.core.expr import Tunable
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.ir.text.printer import print_text
from relax_tune.schedules.schedule import PRIMITIVES, Schedule

T = Tunable("T", (2, 4))
Steps = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """`steps` on `func`; the last one is the primitive that is shown."""

    func: Callable[[], PrimFunc]
    steps: Steps


def softmax() -> PrimFunc:
    return zoo.softmax().func


def row_sum() -> PrimFunc:
    return zoo.row_sum().func


CASES: dict[str, Case] = {
    "split": Case(make.chain, [("split", {"loop": "inc_j", "factors": [None, T]})]),
    "fuse": Case(make.chain, [("fuse", {"names": ["inc_i", "inc_j"]})]),
    "reorder": Case(row_sum, [("reorder", {"names": ["row_sum_k", "row_sum_i"]})]),
    "set_kind": Case(make.chain, [("set_kind", {"loop": "inc_i", "kind": "parallel"})]),
    "set_tail": Case(
        make.chain,
        [
            ("split", {"loop": "inc_j", "factors": [None, 4]}),
            ("set_tail", {"loop": "inc_j_0", "tail": "peel"}),
        ],
    ),
    "nontemporal_stores": Case(
        make.chain,
        [
            ("split", {"loop": "inc_j", "factors": [None, 4]}),
            ("set_kind", {"loop": "inc_j_1", "kind": "vectorized"}),
            ("nontemporal_stores", {"loop": "inc_j_1"}),
        ],
    ),
    "copy_async": Case(
        make.chain,
        [
            ("cache_read", {"block": "double", "buffer": "A", "scope": "shared"}),
            ("split", {"loop": "double_j", "factors": [None, 8]}),
            ("compute_at", {"block": "A_cache_copy", "loop": "double_j_0"}),
            ("split", {"loop": "A_cache_copy_j_1", "factors": [None, 4]}),
            ("set_kind", {"loop": "A_cache_copy_j_1_1", "kind": "vectorized"}),
            ("copy_async", {"loop": "A_cache_copy_j_1_1"}),
        ],
    ),
    "prefetch": Case(make.chain, [("prefetch", {"loop": "inc_j", "iterations": 8})]),
    "hold_vectors": Case(make.chain, [("hold_vectors", {"loop": "double_j"})]),
    "fuse_sibling_loops": Case(make.chain, [("fuse_sibling_loops", {"first": "double_i", "second": "inc_i"})]),
    "fuse_block_iters": Case(make.chain, [("fuse_block_iters", {"block": "inc", "names": ["inc_i", "inc_j"]})]),
    "flatten_rows": Case(
        make.windows, [("flatten_rows", {"block": "slide", "names": ["slide_i", "slide_j"], "buffer": "A"})]
    ),
    "partition": Case(
        row_sum,
        [("partition", {"loop": "row_sum_i", "factor": T}), ("partition", {"loop": "row_sum_k", "factor": 4})],
    ),
    "fission": Case(
        row_sum,
        [
            ("split", {"loop": "row_sum_k", "factors": [None, T]}),
            ("rfactor", {"block": "row_sum", "loop": "row_sum_k_0", "scope": "global"}),
            ("fission", {"loop": "row_sum_i", "block": "row_sum_rf"}),
        ],
    ),
    "compute_at": Case(
        make.stencil,
        [("split", {"loop": "pair_i", "factors": [None, 4]}), ("compute_at", {"block": "square", "loop": "pair_i_0"})],
    ),
    "reverse_compute_at": Case(
        lambda: make.matmul(4, 3),
        [
            ("split", {"loop": "mm_i", "factors": [None, T]}),
            ("reverse_compute_at", {"block": "relu", "loop": "mm_i_0"}),
        ],
    ),
    "compute_inline": Case(make.stencil, [("compute_inline", {"block": "square"})]),
    "reverse_compute_inline": Case(
        make.chain,
        [
            ("split", {"loop": "double_j", "factors": [None, T]}),
            ("reorder", {"names": ["double_j_0", "double_i"]}),
            ("reverse_compute_inline", {"block": "inc"}),
        ],
    ),
    "multiply_by_reciprocal": Case(softmax, [("multiply_by_reciprocal", {"block": "div"})]),
    "decompose_reduction": Case(
        row_sum,
        [
            ("split", {"loop": "row_sum_i", "factors": [None, 4]}),
            ("decompose_reduction", {"block": "row_sum", "loop": "row_sum_i_1"}),
        ],
    ),
    "rfactor": Case(
        row_sum,
        [
            ("split", {"loop": "row_sum_k", "factors": [None, 4]}),
            ("rfactor", {"block": "row_sum", "loop": "row_sum_k_1"}),
        ],
    ),
    "hoist_factors": Case(lambda: make.quantised(3, 5, 8), [("hoist_factors", {"block": "matmul"})]),
    "tree_reduce": Case(lambda: make.matmul(3, 5, epilogue=False), [("tree_reduce", {"block": "mm"})]),
    "stream_k": Case(
        lambda: make.matmul(3, 5, epilogue=True),
        [
            ("cache_write", {"block": "mm", "scope": "global"}),
            ("pad", {"block": "mm", "factors": [T, None, None]}),
            ("compute_inline", {"block": "C_local_pad_take"}),
            ("split", {"loop": "mm_i", "factors": [None, T]}),
            ("reorder", {"names": ["mm_i_0", "mm_k", "mm_i_1", "mm_j"]}),
            ("reverse_compute_at", {"block": "C_write", "loop": "mm_i_0"}),
            ("stream_k", {"block": "mm", "tiles": ["mm_i_0"], "steps": "mm_k", "workers": 3}),
        ],
    ),
    "separable_reduce": Case(
        lambda: make.pooled((5, "w"), 3, 2, 1, True),
        [("separable_reduce", {"block": "pool", "loop": "pool_p", "step": "pool_k1"})],
    ),
    "chunk_scan": Case(make.prefix_sums, [("chunk_scan", {"block": "scan", "loop": "scan_j", "factor": T})]),
    "serial_scan": Case(
        make.prefix_sums,
        [
            ("split", {"loop": "scan_i", "factors": [None, T]}),
            ("reorder", {"names": ["scan_i_0", "scan_j", "scan_i_1", "scan_k"]}),
            ("serial_scan", {"block": "scan", "loop": "scan_j"}),
        ],
    ),
    "serial_scatter": Case(make.scattered_rows, [("serial_scatter", {"block": "total_1"})]),
    "quadratic_select": Case(make.top_places, [("quadratic_select", {"block": "find", "factor": T})]),
    "radix_sort": Case(lambda: make.top_places(stored=i8), [("radix_sort", {"block": "find", "digit_bits": 4})]),
    "bitonic_sort": Case(lambda: make.top_places_of(5), [("bitonic_sort", {"block": "find", "size": 8})]),
    "split_k_update": Case(make.weighted, [("split_k_update", {"block": "top", "factor": T})]),
    "pad_softmax_axis": Case(make.weighted, [("pad_softmax_axis", {"block": "top", "factor": T})]),
    "rolling_update": Case(
        make.weighted,
        [
            ("reorder", {"names": ["top_k", "top_i"]}),
            ("reorder", {"names": ["weight_j", "weight_i"]}),
            ("reorder", {"names": ["total_k", "total_i"]}),
            ("reorder", {"names": ["context_k", "context_i"]}),
            ("rolling_update", {"block": "top"}),
        ],
    ),
    "cache_read": Case(lambda: make.matmul(3, 5, epilogue=False), [("cache_read", {"block": "mm", "buffer": "W"})]),
    "reindex": Case(make.windows, [("reindex", {"block": "slide", "buffer": "A", "dims": [1]})]),
    "cache_write": Case(make.chain, [("cache_write", {"block": "double", "readers": ["inc"]})]),
    "set_scope": Case(make.chain, [("set_scope", {"buffer": "B", "scope": "local"})]),
    "store_as": Case(
        lambda: make.quantised(3, 5, 8),
        [("cache_read", {"block": "matmul", "buffer": "q"}), ("store_as", {"buffer": "q_cache", "dtype": "f16"})],
    ),
    "sum_as": Case(
        lambda: make.quantised(3, 64, 8, 32, activations="int8"),
        [
            ("split", {"loop": "matmul_k", "factors": [None, 32]}),
            ("reorder", {"names": ["matmul_i", "matmul_j", "matmul_k_0", "matmul_k_1"]}),
            ("rfactor", {"block": "matmul", "loop": "matmul_k_0"}),
            ("hoist_factors", {"block": "matmul_rf"}),
            ("sum_as", {"block": "matmul_rf", "dtype": "i32"}),
        ],
    ),
    "tile_layout": Case(make.chain, [("tile_layout", {"buffer": "B", "dim": 1, "factor": 4, "order": [1, 0, 2]})]),
    "permute_layout": Case(make.chain, [("permute_layout", {"buffer": "B", "order": [1, 0]})]),
    "transform_layout": Case(
        make.chain,
        [("transform_layout", {"buffer": "B", "index_map": "i, j -> j // f0 * n0 + i, j % f0", "factors": [T]})],
    ),
    "storage_align": Case(make.chain, [("storage_align", {"buffer": "B", "factor": T, "offset": 1})]),
    "swizzle": Case(
        make.chain, [("set_scope", {"buffer": "B", "scope": "shared"}), ("swizzle", {"buffer": "B", "vector": 4})]
    ),
    "pad": Case(lambda: make.matmul(3, 5, epilogue=False), [("pad", {"block": "mm", "factors": [T, None, 4]})]),
    "pad_spatial": Case(make.chain, [("pad_spatial", {"block": "double", "dim": 1, "factor": T})]),
    "software_pipeline": Case(
        lambda: make.matmul(3, 7, epilogue=False),
        [
            ("cache_read", {"block": "mm", "buffer": "W", "scope": "local"}),
            ("split", {"loop": "mm_k", "factors": [None, T]}),
            ("reorder", {"names": ["mm_k_0", "mm_i", "mm_j", "mm_k_1"]}),
            ("compute_at", {"block": "W_cache_copy", "loop": "mm_k_0"}),
            ("software_pipeline", {"block": "W_cache_copy", "loop": "mm_k_0", "stages": 2}),
        ],
    ),
    "tensorize": Case(
        lambda: make.matmul(16, 5, epilogue=False),
        [
            ("pad", {"block": "mm", "factors": [4, None, None]}),
            ("split", {"loop": "mm_i", "factors": [None, 4]}),
            ("reorder", {"names": ["mm_i_0", "mm_k", "mm_i_1", "mm_j"]}),
            ("decompose_reduction", {"block": "mm", "loop": "mm_k"}),
            ("tensorize", {"loop": "mm_i_1", "intrinsic": "outer_f32_4x16"}),
        ],
    ),
    "reuse_output": Case(softmax, [("reuse_output", {"buffer": "e", "output": "y"})]),
    "mark_prepack": Case(
        lambda: make.matmul(3, 5, epilogue=False),
        [("cache_read", {"block": "mm", "buffer": "W"}), ("mark_prepack", {"block": "W_cache_copy"})],
    ),
}


@cache
def run(name: str) -> tuple[PrimFunc, PrimFunc]:
    """Right before the primitive that is shown, and right after."""
    case = CASES[name]
    s = Schedule(case.func())
    before = s.func
    for primitive, args in case.steps:
        before = s.func
        s.apply(primitive, **args)
    return before, s.func


def test_every_primitive_has_a_case() -> None:
    assert set(CASES) == set(PRIMITIVES)
    assert all(case.steps[-1][0] == name for name, case in CASES.items())


@pytest.mark.parametrize("name", PRIMITIVES)
def test_every_primitive_documents_before_after_checks(name: str) -> None:
    text = PRIMITIVES[name].__doc__ or ""
    where = [text.find(word) for word in ("\n    Before: `", "\n    After", "\n    Checks: ")]
    assert 0 < where[0] < where[1] < where[2], text
    # of what it can refuse to take, it speaks
    expected = {p: str(a) for p, a in PRIMITIVES[name].__annotations__.items() if "ExprLike" in str(a)}
    assert all(f"`{p}`" in text or p in text.split("Checks: ")[1] for p in expected), text


@pytest.mark.parametrize("name", CASES)
def test_primitive_text_matches_golden(name: str, golden: Callable[[str, str], None]) -> None:
    before, after = run(name)
    golden(f"schedules/{name}.txt", f"{print_text(before)}\n\n# after\n\n{print_text(after)}")
    read = parse_prim_func(print_text(after))
    assert structural_equal(read, after)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_primitive_keeps_meaning(name: str) -> None:
    start = CASES[name].func()
    _, after = run(name)
    assert not structural_equal(start, after)
    for at, size in enumerate((0, 1, 3, 4, 5, 7, 8, 9)):
        dims = {v.name: size if number == at % 2 else 7 - number for number, v in enumerate(start.symbols)}
        for tile in T.domain:
            assert_same_meaning(start, after, dims, seed=at, tunables={T: tile})


@pytest.mark.parametrize("name", CASES)
def test_primitives_leave_original_untouched(name: str) -> None:
    start = CASES[name].func()
    text = print_text(start)
    s = Schedule(start)
    for primitive, args in CASES[name].steps:
        s.apply(primitive, **args)
    assert print_text(start) == text
