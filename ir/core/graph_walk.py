"""Walks over graph functions: their blocks, bindings, values and callees.

Tests: `tests/ir/passes/test_graph_passes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from relax_tune.ir.core.graph import (
    AnyBinding,
    AnyBlock,
    BindingBlock,
    Body,
    Call,
    CallFunction,
    CallHost,
    DataflowBlock,
    Function,
    FunctionRef,
    GVar,
    If,
    Value,
)
from relax_tune.ir.core.graph_base import Operator
from relax_tune.ir.core.struct_info import (
    CallableInfo,
)

O = TypeVar("O", bound="Operator")  # noqa: E741


def all_blocks(f: Function | Body) -> Iterator[AnyBlock]:
    """Yield every block in `f`; the sides of an `if` come before the block that branches."""
    for block in f.blocks:
        for b in block.bindings:
            for side in b.value.bodies:
                yield from all_blocks(side)
        yield block


def all_bindings(f: Function | Body) -> Iterator[AnyBinding]:
    """Yield every binding in `f`, each after the bindings that it reads. The sides of an `if` come before the `if`."""
    for b in f.bindings:
        for side in b.value.bodies:
            yield from all_bindings(side)
        yield b


def all_uses(f: Function) -> Iterator[Value]:
    """Yield everything that reads variables: the values of bindings and the result of `f`.

    For an `if` they include its condition and the results of its sides.
    """
    for b in all_bindings(f):
        yield from (b.value.cond, b.value.then.ret, b.value.orelse.ret) if isinstance(b.value, If) else (b.value,)
    yield f.ret


def callees(f: Function | Body) -> tuple[str, ...]:
    """Return the names of the graph functions that `f` mentions, in order, each once."""
    return tuple(dict.fromkeys(v.name for v in nested_values(f) if isinstance(v, FunctionRef)))


def entries(functions: Mapping[str, object]) -> dict[str, Function]:
    """Return the graph functions that a built model offers by name: `main`, and those without a caller."""
    graphs = {n: f for n, f in functions.items() if isinstance(f, Function)}
    called = {callee for n, f in graphs.items() for callee in callees(f) if callee != n}
    return {n: f for n, f in graphs.items() if n not in called or n == "main"}


def nested_values(f: Function | Body) -> Iterator[Value]:
    """Yield every value in `f`, operands and branches included."""
    stack: list[Value] = [f.ret, *(b.value for b in reversed(f.bindings))]
    while stack:
        v = stack.pop()
        yield v
        if isinstance(v, If):
            stack.append(v.cond)
            for body in (v.orelse, v.then):
                stack += [body.ret, *(b.value for b in reversed(body.bindings))]
        else:
            stack.extend(reversed(v.operands))


def is_impure(value: Value) -> bool:
    """Return whether computing `value` may have side effects, judged by its own annotation."""
    if isinstance(value, CallHost):
        return not value.pure
    if isinstance(value, CallFunction):
        info = value.callee.info
        return isinstance(info, CallableInfo) and not info.pure
    return any(is_impure(b.value) for side in value.bodies for b in side.bindings)


def regions(blocks: Sequence[AnyBlock]) -> tuple[tuple[bool, tuple[AnyBinding, ...]], ...]:
    """Return (dataflow, bindings) of each region. Neighbouring binding blocks are one region; empty regions are left
    out.
    """
    regions_of_block: list[tuple[bool, tuple[AnyBinding, ...]]] = []
    for block in blocks:
        dataflow = isinstance(block, DataflowBlock)
        if not dataflow and regions_of_block and not regions_of_block[-1][0]:
            regions_of_block[-1] = (False, regions_of_block[-1][1] + block.bindings)
        elif dataflow or block.bindings:
            regions_of_block.append((dataflow, block.bindings))
    return tuple(regions_of_block)


def into_blocks(bindings: Sequence[AnyBinding]) -> tuple[AnyBlock, ...]:
    """Split bindings into blocks: one for each branch or side effect, and dataflow blocks for the bindings in between."""
    blocks: list[AnyBlock] = []
    plain: list[AnyBinding] = []
    for b in bindings:
        if b.value.bodies or is_impure(b.value):
            if plain:
                blocks.append(DataflowBlock(tuple(plain)))
                plain = []
            blocks.append(BindingBlock((b,)))
        else:
            plain.append(b)
    if plain or not blocks:
        blocks.append(DataflowBlock(tuple(plain)))
    return tuple(blocks)


def used_vars(value: Value) -> tuple[GVar, ...]:
    """Return the distinct graph variables of a value."""
    if isinstance(value, GVar):
        return (value,)
    return tuple(dict.fromkeys(v for o in value.operands for v in used_vars(o)))


def operator_of(value: object, *kinds: Callable[..., O]) -> O | None:
    """Return the operator of a call if it is of one of the classes, which may be abstract. None for any other value."""
    return cast(O, value.op) if isinstance(value, Call) and isinstance(value.op, cast(Any, kinds)) else None
