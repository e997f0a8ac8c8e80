"""Memory that buffers of a program share."""

from __future__ import annotations

from relax_tune.runtime.program.program import Program


def unshared(program: Program) -> frozenset[int]:
    """Return the inputs and outputs that share memory with no other, or with an index that is checked."""
    given = [*program.inputs, *program.outputs, *{c.buffer for c in program.checked}]
    roots = []
    for index in given:
        while (base := program.buffers[index].base) is not None:
            index = base
        roots.append(index)
    own = [i for i in given if program.buffers[i].role in ("input", "output") and program.buffers[i].storage is None]
    return frozenset(i for i in own if roots.count(i) == 1)
