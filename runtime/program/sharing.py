"""Memory that buffers of a program share.

Tests: `tests/runtime/test_resident.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from relax_tune.runtime.program.program import Program


def unshared(program: Program) -> frozenset[int]:
    """Return the inputs and outputs that share memory with no other, or with an index that is checked."""
    roots = list(_roots(program))
    given = [*program.inputs, *program.outputs]
    own = [i for i in given if program.buffers[i].role in ("input", "output") and program.buffers[i].storage is None]
    return frozenset(i for i in own if roots.count(i) == 1)


def viewed_inputs(program: Program) -> Mapping[int, int]:
    """Return the inputs in whose memory exactly one result lies, and nothing else that is read from outside; with the result."""
    roots = list(_roots(program))
    views = {i: base for i in program.outputs if (base := program.buffers[i].base) is not None}
    # Two: the input itself and this one result.
    return {b: i for i, b in views.items() if program.buffers[b].role == "input" and roots.count(b) == 2}


def _roots(program: Program) -> Iterator[int]:
    for index in (*program.inputs, *program.outputs, *{c.buffer for c in program.checked}):
        while (base := program.buffers[index].base) is not None:
            index = base
        yield index


def stored_dims(outer: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the dims of an array as it is stored: the dim `outer` first."""
    return (*shape[outer : outer + 1], *shape[:outer], *shape[outer + 1 :])
