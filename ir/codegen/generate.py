"""Scheduled tensor functions to source text: the pipeline and its result.

Tests: `tests/ir/codegen/test_codegen.py`, `tests/ir/codegen/test_text.py`, `tests/ir/codegen/test_fused_loops.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Literal

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.loop_effects import ignored_hints
from relax_tune.ir.codegen.lower.affine import Algebra
from relax_tune.ir.codegen.lower.barriers import insert_barriers
from relax_tune.ir.codegen.lower.grid_independence import verify_grid_independence
from relax_tune.ir.codegen.lower.guards import end_loops_at_data
from relax_tune.ir.codegen.lower.index_width import Spans, fits
from relax_tune.ir.codegen.lower.long_sums import split_long_sums
from relax_tune.ir.codegen.lower.lowered import hoist_divmod, lower_blocks, nest_fused_loops, note_ranges
from relax_tune.ir.codegen.lower.overflow import Magnitudes
from relax_tune.ir.codegen.lower.parallel_groups import bind_parallel_loops
from relax_tune.ir.codegen.lower.registers import dead_lanes, register_layouts
from relax_tune.ir.codegen.lower.shrink_buffers import shrink_buffers
from relax_tune.ir.codegen.lower.tails import lower_tails
from relax_tune.ir.codegen.lower.vectors import choose_vectors
from relax_tune.ir.codegen.lower.warp_shuffles import lower_warp_buffers
from relax_tune.ir.codegen.print.c.prelude import CPrelude
from relax_tune.ir.codegen.print.c.printer import CPrinter
from relax_tune.ir.codegen.print.cfamily import CFamilyPrinter
from relax_tune.ir.codegen.print.cuda import CUDAPrelude, CUDAPrinter
from relax_tune.ir.codegen.print.opencl import OpenCLPrelude, OpenCLPrinter
from relax_tune.ir.codegen.print.prelude import Prelude
from relax_tune.ir.codegen.print.wgsl.prelude import SHARED_BYTES, WGSLPrelude
from relax_tune.ir.codegen.print.wgsl.printer import WGSLPrinter
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.core.expr import Expr, Tunable, Var, as_int, free_vars, postorder
from relax_tune.ir.core.function import Param, PrimFunc
from relax_tune.ir.core.stmt import (
    Declare,
    For,
    Stmt,
    accesses,
    blocks,
    loops,
    rewrite,
    seq,
    statements,
    stores,
    substitute_stmt,
    walk,
)
from relax_tune.ir.interp.empty_reductions import complete_empty_reductions

Language = Literal["c", "opencl", "cuda", "webgpu"]
PRELUDES: Mapping[str, type[Prelude]] = MappingProxyType(
    {"c": CPrelude, "opencl": OpenCLPrelude, "cuda": CUDAPrelude, "webgpu": WGSLPrelude}
)
PRINTERS: Mapping[str, type[CFamilyPrinter]] = MappingProxyType(
    {"c": CPrinter, "opencl": OpenCLPrinter, "cuda": CUDAPrinter, "webgpu": WGSLPrinter}
)


@dataclass(frozen=True, slots=True)
class CodeTarget:
    """The target of generated source.

    Attributes:
        language: `c`, `opencl`, `cuda` or `webgpu`.
        lanes: f32 elements of a vector (C: AVX-512 16, AVX2 8; PoCL's wheel 8; CUDA 4; WebGPU 4).
        local_bytes: Shared memory of a work-group; None if unknown (drivers do not always refuse more).
        bindings: Most arrays that a kernel may have; None for any number.
        loop_passes: Total passes of a work-item through its loops after which the device stops them without an error; None if there is
            no such limit.
    """

    language: Language
    lanes: int
    local_bytes: int | None = None
    bindings: int | None = None
    loop_passes: int | None = None

    @property
    def element_bytes(self) -> int:
        """Bytes of the smallest element in shared memory."""
        return SHARED_BYTES if self.language == "webgpu" else 1

    @property
    def grid(self) -> bool:
        """Whether kernels are launched for a grid of groups and items."""
        return self.language != "c"

    @property
    def thread_kinds(self) -> frozenset[str]:
        """Kinds of loops whose iterations have separate storage."""
        return frozenset({"group", "item"} if self.grid else {"parallel", "group"})


@dataclass(frozen=True, slots=True)
class GeneratedKernel:
    """One kernel's source and its launch.

    Attributes:
        buffers: Pointer arguments in order: parameters, then the function's global intermediates.
        scalars: int64 arguments after the pointers. If 32 bits may not hold the kernel's integers, the last one is their upper bound
            (`runtime/device/source.wide_form`).
        grid: Work-groups along each axis; empty for C.
        local: Work-items of a group along each axis; empty for C.
        ignored: A sentence for each kind or mark of a loop that changes nothing in this kernel.
    """

    name: str
    source: str
    buffers: tuple[Buffer, ...]
    scalars: tuple[Expr, ...]
    grid: tuple[Expr, ...]
    local: tuple[int, ...]
    ignored: tuple[str, ...] = ()


def generate(func: PrimFunc, target: CodeTarget) -> GeneratedKernel:
    """Return the source of one scheduled function.

    Raises:
        BuildError: The function has free tunables, local buffers or work-item loops of symbolic extent, float scalar parameters, more
            shared memory than a work-group, barriers that not all work-items reach, groups that depend on each other, or an operation
            that the target cannot express.
    """
    algebra, lanes = Algebra(), lanes_of(func, target)
    reasons: dict[Var, str] = {}
    body = lowered_body(func, target, algebra, reasons)
    layouts = register_layouts(body, algebra, lanes)
    unread = dead_lanes(body, layouts, algebra)
    buffers = (*func.buffers, *(b for b in func.allocs if b.scope == "global"))
    _check_bindings(func, target, buffers)
    written = frozenset(s.buffer for s in stores(body))
    # The printer notes bounds of all integers that it prints, so only a finished text shows whether 32 bits may suffice.
    for narrow in _widths(target, body):
        printer = PRINTERS[target.language](PRELUDES[target.language](), algebra, lanes, layouts)
        printer.spans = Spans(algebra, func.scalar_params, target.language == "webgpu") if narrow else None
        printer.magnitudes = Magnitudes(algebra, func.scalar_params)
        printer.irregular = _irregular(func.body)
        printer.dead_lanes = unread
        name = printer.fresh(func.name)
        source, grid = printer.kernel(name, buffers, written, body)
        if fits(printer.most) is not False:
            break
    if narrow and fits(printer.most) is False:
        raise BuildError(
            f"expected integers of 32 bits in {func.name}, since WGSL has no others, got up to {printer.most!r}; use smaller arrays, or "
            "build for another target"
        )
    # If the bound depends on the sizes of a call, the launch evaluates it; beyond 32 bits it runs the text compiled with wide indices.
    most = () if fits(printer.most) else (printer.most,)
    ignored = ignored_hints(func.body, printer, reasons)
    return GeneratedKernel(name, source, buffers, (*printer.symbols, *most), grid.groups, grid.items, ignored)


def lowered_body(
    func: PrimFunc, target: CodeTarget, algebra: Algebra | None = None, reasons: dict[Var, str] | None = None
) -> Stmt:
    """Return the statement that is printed for a scheduled function, without blocks.

    Args:
        algebra: Receives the ranges of the statement's variables.
        reasons: Receives why vectorized loops are no vectors.

    Raises:
        BuildError: As `generate`.
    """
    _check(func, target)
    algebra, lanes = Algebra() if algebra is None else algebra, lanes_of(func, target)
    body = lower_blocks(complete_empty_reductions(func.body))
    on_groups: tuple[str, ...] = ()
    if target.grid:
        body, on_groups = bind_parallel_loops(body, func.name)
        body = _one_index_per_axis(body)
    # The order matters. Quotients are hoisted first, so that all copies of a body that tails make share them. Tails drop conditions,
    # which lets more loops become vectors; buffers are declared outside of vectors, so they are shrunk after these are chosen. Barriers
    # come last: they depend on the final loops over work-items and on the buffers that these share.
    body = hoist_divmod(body, algebra)
    note_ranges(algebra, body)
    if target.grid:
        verify_grid_independence(body, algebra, on_groups)
    body = lower_warp_buffers(body, algebra, target.language == "cuda")
    body = lower_tails(body, algebra, lanes)
    note_ranges(algebra, body)
    if not loops(body, "item"):  # trip counts of the nest would differ between work-items
        body = nest_fused_loops(body, algebra)
    body = end_loops_at_data(body, algebra)
    body = split_long_sums(body, algebra, bool(loops(body, "item")))
    body = choose_vectors(body, algebra, lanes, reasons)
    body = shrink_buffers(body, algebra, target.thread_kinds)
    _check_shared(func, target, body)
    if target.grid:
        body = insert_barriers(body, algebra)
    return body


def _widths(target: CodeTarget, body: Stmt) -> tuple[bool, ...]:
    """Return the widths of indices to try, in order: True for 32 bits, False for 64.

    32 bits are faster on GPUs and for kernels with work-items, but not on CPUs. WGSL has no 64-bit integers.
    """
    if target.language == "webgpu":
        return (True,)
    return (True, False) if target.language == "cuda" or loops(body, "item") else (False,)


def lanes_of(func: PrimFunc, target: CodeTarget) -> int:
    """Return the lanes of a vector. In CUDA the narrowest stored type decides, so that its accesses are as wide as the others'."""
    stored = [b.dtype.bytes for b in func.buffers if b.dtype is not bool_] if target.language == "cuda" else []
    return target.lanes * 4 // min(4, *stored) if stored else target.lanes


def _irregular(s: Stmt) -> frozenset[Var]:
    """Return the variables of thread loops whose iterations differ in work because extents of inner loops depend on them."""
    return frozenset(
        p.var for p in loops(s, "parallel", "group") if any(p.var in free_vars(q.extent) for q in loops(p.body))
    )


def _check(func: PrimFunc, target: CodeTarget) -> None:
    for b in func.buffers:
        if b.scope != "global":
            raise BuildError(f"parameter {b!r} of {func.name} is in {b.scope} memory; give it global scope")
    for v in func.scalar_params:
        if not v.dtype.is_int:
            raise BuildError(
                f"expected int64 scalar parameters in {func.name}, got {v.name} of {v.dtype}; pass a 0-d buffer instead"
            )
    for s in walk(func.body):
        for v in (e for e in postorder(s.own_exprs) if isinstance(e, Tunable)):
            raise BuildError(f"{func.name} has the free tunable {v.name}; instantiate the sketch first")
    for f in loops(func.body, "item") if target.language == "c" else ():
        raise BuildError(
            f"{func.name} has the work-item loop {f.var.name}, which C does not have; bind it to `parallel`, or generate OpenCL or CUDA"
        )


def _check_shared(func: PrimFunc, target: CodeTarget, body: Stmt) -> None:
    shared = {b for m in walk(body) if isinstance(m, Declare) for b in m.buffers if b.scope == "shared"}
    nbytes = sum(max(b.dtype.bytes, target.element_bytes) * prod(as_int(d) or 0 for d in b.shape) for b in shared)
    if target.local_bytes is not None and nbytes > target.local_bytes:
        names = ", ".join(sorted(b.name for b in shared))
        raise BuildError(
            f"expected at most {target.local_bytes} bytes of shared memory in {func.name}, got {nbytes} for {names}; use smaller tiles"
        )


def _check_bindings(func: PrimFunc, target: CodeTarget, buffers: Sequence[Buffer]) -> None:
    if target.bindings is not None and len(buffers) > target.bindings:
        names = ", ".join(b.name for b in buffers)
        raise BuildError(
            f"expected at most {target.bindings} arrays in a kernel of {func.name}, the limit of the adapter, got {len(buffers)}: "
            f"{names}; fuse fewer operators"
        )


def _one_index_per_axis(n: Stmt) -> Stmt:
    """Give all group (or item) loops over one axis the same variable, since they are the same index of the launch."""
    first: dict[tuple[str, int], Var] = {}
    same: dict[Var, Expr] = {}
    for f in loops(n, "group", "item"):
        var = first.setdefault((f.kind, f.axis), f.var)
        if var is not f.var:
            same[f.var] = var
    if not same:
        return n

    def visit(m: Stmt) -> Stmt:
        return replace(m, var=first[m.kind, m.axis]) if isinstance(m, For) and m.var in same else m

    return rewrite(substitute_stmt(n, same), visit)


def split_kernels(func: PrimFunc) -> tuple[PrimFunc, ...]:
    """Split a function into one function per top-level statement, `prepack` statements first.

    The end of a kernel is the only barrier for the whole device. Single-threaded statements that share local memory stay together. Each
    function has the parameters it uses. Global intermediates that several functions use become parameters (workspaces): inputs if they
    are only read, else outputs. Buffers keep their identity.

    Raises:
        BuildError: Two statements use one local or shared buffer, or a statement mixes roles.
    """
    parts = _together(func)
    users: dict[Buffer, int] = {}
    uses: list[dict[Buffer, bool]] = []
    for p in parts:
        is_written: dict[Buffer, bool] = {}
        for b, _i, written in accesses(lower_blocks(p)):
            is_written[b] = is_written.get(b, False) or written
        uses.append(is_written)
        for b in is_written:
            users[b] = users.get(b, 0) + 1
    for b, count in users.items():
        if b.scope != "global" and count > 1:
            raise BuildError(
                f"{b.scope} buffer {b.name} of {func.name} is used by {count} top-level statements, which become separate kernels; "
                "compute it under their common loop or give it global scope"
            )
    prepare = [k for k, p in enumerate(parts) if _role(func, p) == "prepack"]
    compute = [k for k in range(len(parts)) if k not in prepare]
    if len(parts) == 1 and not prepare:
        return (func,)
    kernels: list[PrimFunc] = []
    for label, group in (("prepare", prepare), ("part", compute)):
        for at, k in enumerate(group):
            name = func.name if label == "part" and len(group) == 1 else f"{func.name}_{label}{at}"
            kernels.append(_part(func, name, parts[k], uses[k], users))
    return tuple(kernels)


def _together(func: PrimFunc) -> tuple[Stmt, ...]:
    """Return the top-level statements, with single-threaded neighbours that share a local buffer merged into one.

    Such statements are the body of a loop of one iteration that simplification has removed.
    """
    merged: list[Stmt] = []
    local: list[set[Buffer] | None] = []  # local buffers of each merged statement; None for parallel ones
    for part in statements(func.body):
        is_parallel = loops(part, "parallel", "group", "item")
        buffers = None if is_parallel else {b for b, _i, _w in accesses(lower_blocks(part)) if b.scope == "local"}
        first = next((k for k, other in enumerate(local) if buffers and other and buffers & other), len(local))
        if None in local[first:]:
            first = len(local)
        merged[first:] = [seq(*merged[first:], part)]
        local[first:] = [None if buffers is None else buffers.union(*(x for x in local[first:] if x))]
    return tuple(merged)


def _role(func: PrimFunc, part: Stmt) -> str:
    roles = {b.role for b in blocks(part)}
    if len(roles) > 1:
        raise BuildError(
            f"expected blocks of one role in each top-level statement of {func.name}, got {sorted(roles)}; move the prepack block to the "
            "top level"
        )
    return next(iter(roles), "compute")


def _part(func: PrimFunc, name: str, body: Stmt, used: dict[Buffer, bool], users: dict[Buffer, int]) -> PrimFunc:
    shared = [b for b in func.allocs if b.scope == "global" and users.get(b, 0) > 1]
    candidates = [b for b in (*func.buffers, *shared) if b in used]
    reads = [b for b in candidates if not used[b]]
    writes = [b for b in candidates if used[b]]
    # symbols that are dims of parameters need no scalar parameter: the caller reads them from the shapes
    dim_vars = {d for b in candidates for d in b.shape if isinstance(d, Var)}
    needed = _symbols(body, [*candidates, *(b for b in func.allocs if b in used)])
    params: tuple[Param, ...] = (*reads, *writes, *(v for v in needed if v not in dim_vars))
    allocs = tuple(b for b in func.allocs if b in used and b not in candidates)
    return PrimFunc(name, params, len(writes), seq(body), allocs, tuple(b for b in func.consts if b in used))


def _symbols(body: Stmt, buffers: list[Buffer]) -> list[Var]:
    """Return the free variables of a statement and of the shapes of its buffers."""
    bound = {f.var for f in loops(body)}
    free: dict[Var, None] = {}
    lowered = lower_blocks(body)
    for m in walk(lowered):
        for e in m.own_exprs:
            free.update(dict.fromkeys(free_vars(e)))
    for b in buffers:
        free.update(dict.fromkeys(free_vars(*b.shape)))
    return [v for v in free if v not in bound]
