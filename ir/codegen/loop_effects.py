"""Which kinds and marks of a function's loops changed nothing in a kernel's text, and why.

The rules of the search set hints that a target may ignore; `rt.kernel` refuses them in a schedule that a person wrote.

Tests: `tests/ir/codegen/test_loop_kinds.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from relax_tune.ir.codegen.lower.vectors import UNROLL_LIMIT
from relax_tune.ir.codegen.print.cfamily import CFamilyPrinter
from relax_tune.ir.core.expr import Var
from relax_tune.ir.core.stmt import For, Stmt, loops
from relax_tune.ir.hardware.intrinsics import INTRINSICS


def ignored_hints(body: Stmt, printer: CFamilyPrinter, reasons: Mapping[Var, str]) -> tuple[str, ...]:
    """Return a sentence for each kind or mark of a loop without effect.

    Loops that are not in the text, since they never run or have one iteration, are left out.

    Args:
        body: The scheduled function's statement.
        printer: The printer after it has printed the kernel.
        reasons: Why loops are no vectors.
    """
    out = []
    inner = {m.var for loop in loops(body) if loop.marks.intrinsic for m in loops(loop.body)}  # of one call
    for loop in loops(body):
        if loop.var not in printer.printed_loops or loop.var in inner:
            continue
        for hint in _hints(loop):
            if (loop.var, hint) not in printer.effects:
                out.append(
                    f"{_NAMES.get(hint, hint)} of loop {loop.var.name!r}: {_reason(loop, hint, printer, reasons)}"
                )
    return tuple(out)


_NAMES: Mapping[str, str] = {
    "nontemporal": "nontemporal_stores",
    "prefetch_distance": "prefetch",
    "hold_vectors": "hold_vectors",
    "async_copy": "copy_async",
    "intrinsic": "tensorize",
}
"""The primitive that sets a mark."""


def _hints(loop: For) -> Iterator[str]:
    if loop.marks.intrinsic:
        yield "intrinsic"
        return
    if loop.kind in ("parallel", "group", "vectorized", "unrolled"):
        yield loop.kind
    yield from (name for name, _ in loop.marks.settings() if name in _NAMES)


def _reason(loop: For, hint: str, printer: CFamilyPrinter, reasons: Mapping[Var, str]) -> str:
    language = printer.prelude.language
    if hint in ("parallel", "group"):
        return "a loop around it runs on threads, and each runs this one in order; `fuse` the two"
    if hint == "vectorized":
        return f"no vector, since {reasons.get(loop.var, 'its elements are computed one by one')}; leave it serial, or `unroll` it"
    if hint == "unrolled":
        return f"{loop.extent!r} iterations, of at most {UNROLL_LIMIT}; `split` it and unroll the inner loop"
    if hint == "nontemporal":
        return (
            "none of its stores is a whole vector"
            if printer.has_nontemporal
            else f"{language} has no non-temporal stores"
        ) + "; leave it out"
    if hint == "prefetch_distance":
        return (
            "no read below moves with it" if language == "c" else f"{language} kernels do not prefetch"
        ) + "; leave it out"
    if hint == "hold_vectors":
        return (
            "no statement of it reads a vector of floats" if language == "c" else f"compilers of {language} choose"
        ) + "; leave it out"
    if hint == "async_copy":
        only = (
            "its copies are not of 4, 8 or 16 aligned bytes"
            if language == "cuda"
            else f"{language} has no asynchronous copies"
        )
        return f"{only}; leave it out"
    needed = INTRINSICS[loop.marks.intrinsic].language if loop.marks.intrinsic in INTRINSICS else ""
    if needed not in ("", language):
        return f"{loop.marks.intrinsic} is an instruction of {needed}, not of {language}; choose another target"
    return f"the nest is no longer the one of {loop.marks.intrinsic}, or the kernel has other items; tensorize last"
