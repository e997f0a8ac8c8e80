"""Proofs that the rows of a batch are independent: a row of a result depends on the same row of each input, in the same way for every row.

A value whose shape mentions the batch symbol `b` has it in one dim, of extent `b * k`; elements `r * k` to `r * k + k - 1` along it are row
`r`. In each block of a tensor function the index of that dim is a loop variable of the same extent. Written as `r * k + w`, every read of
a value with rows must be at row `r`, and nothing else may depend on `r` or `b`. Reshapes are allowed where rows are outermost, since
they then are the same contiguous elements before and after. Everything else leaves rows unproved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_tune.errors import VerifyError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove, prove_equal
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import (
    Expr,
    Load,
    Var,
    add,
    and_,
    const,
    free_vars,
    le,
    lt,
    mul,
    postorder,
    sub,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.graph import (
    AnyBinding,
    Call,
    CallTIR,
    Constant,
    Function,
    GVar,
    MatchCast,
    TupleItem,
    TupleValue,
    Value,
)
from relax_tune.ir.core.plain_loops import plain_blocks
from relax_tune.ir.core.stmt import Block
from relax_tune.ir.core.struct_info import TensorInfo, TupleInfo
from relax_tune.ir.op.indexing.movement import Reshape
from relax_tune.ir.passes.fusion.symbol_interface import bind_symbols
from relax_tune.ir.passes.pipeline import LoweredModule


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where the rows of a value are: their dim, and the elements of each along it."""

    dim: int
    size: Expr


class _Unproved(Exception):
    """Rows that may depend on each other."""


def independent_rows(lowered: LoweredModule) -> dict[str, str]:
    """Return, by function, the name of the batch symbol along which its rows are proved independent.

    The symbol is the first dim of every parameter and result. A function with branches, library calls or checks of computed
    indices has none.
    """
    proofs: dict[str, str] = {}
    for name, function in lowered.functions.items():
        batch = _batch_symbol(function)
        if name not in lowered.entries or batch is None or lowered.index_checks.get(name):
            continue
        checked = [e for check in lowered.checks.get(name, ()) for e in (check.cond, *check.values)]
        checked += [e for r in lowered.ranges.get(name, ()) for e in (r.low, r.high)]
        if batch not in free_vars(*checked) and _are_independent(function, lowered.prims, batch):
            proofs[name] = batch.name
    return proofs


def _batch_symbol(function: Function) -> Var | None:
    """Return the symbol that is the first dim of every parameter and result, and in no other dim."""
    ret = function.ret_info
    results = ret.fields if isinstance(ret, TupleInfo) else (ret,)
    firsts = set[Expr]()
    for info in (*(p.info for p in function.params), *results):
        if not isinstance(info, TensorInfo) or not info.shape:
            return None
        firsts.add(info.shape[0])
        if set(free_vars(info.shape[0])) & set(free_vars(*info.shape[1:])):
            return None
    return next((e for e in firsts if isinstance(e, Var)), None) if len(firsts) == 1 else None


def _are_independent(function: Function, prims: Mapping[str, PrimFunc], batch: Var) -> bool:
    proved: set[tuple[object, ...]] = set()
    try:
        for binding in function.bindings:
            _check_binding(binding, prims, batch, proved)
    except (_Unproved, VerifyError):
        return False
    return True


def _check_binding(
    binding: AnyBinding, prims: Mapping[str, PrimFunc], batch: Var, proved: set[tuple[object, ...]]
) -> None:
    """Raise _Unproved unless a binding computes rows of rows. proved: calls that were proved before"""
    value = binding.value
    if isinstance(binding, MatchCast):
        raise _Unproved
    if isinstance(value, Call) and isinstance(value.op, Reshape):
        infos = (*_tensors(value.args), binding.var.info)
        places = {_place(info, batch) for info in infos}
        if places not in ({None}, {0}):
            raise _Unproved
    elif isinstance(value, CallTIR):
        func = prims[value.callee]
        symbols = bind_symbols(func, _tensors(value.args), value.out, value.scalars)
        key = (value.callee, *symbols.items())
        if key not in proved:
            _check_function(func, symbols, batch)
            proved.add(key)
    elif not isinstance(value, (GVar, Constant, TupleValue, TupleItem)):
        raise _Unproved


def _tensors(values: Sequence[Value]) -> list[TensorInfo]:
    infos = [v.info if isinstance(v, (GVar, Constant)) else None for v in values]
    tensors = [info for info in infos if isinstance(info, TensorInfo)]
    if len(tensors) < len(infos):
        raise _Unproved
    return tensors


def _place(info: object, batch: Var) -> int | None:
    """Return the dim of the rows of a value; None without rows."""
    if not isinstance(info, TensorInfo) or info.shape is None:
        raise _Unproved
    rows = _rows(info.shape, batch)
    return None if rows is None else rows.dim


def _rows(shape: Sequence[Expr], batch: Var) -> _Rows | None:
    """Return where the rows of a shape are; None if it does not mention the batch. Raises _Unproved for another form than `b * k`."""
    dims = [d for d, extent in enumerate(shape) if batch in free_vars(extent)]
    if not dims:
        return None
    size = simplify(substitute(shape[dims[0]], {batch: const(1, i64)}))
    if len(dims) > 1 or prove_equal(shape[dims[0]], mul(batch, size)) is not Proof.YES:
        raise _Unproved
    return _Rows(dims[0], size)


def _check_function(func: PrimFunc, symbols: Mapping[Var, Expr], batch: Var) -> None:
    """Raise _Unproved unless a tensor function computes rows of rows in a call. symbols: values of its symbols in the call"""
    blocks = plain_blocks(func)
    if blocks is None:
        raise _Unproved
    placed: dict[Buffer, _Rows | None] = {}
    for buffer in (*func.buffers, *func.allocs):
        placed[buffer] = _rows([simplify(substitute(d, symbols)) for d in buffer.shape], batch)
    for block in blocks:
        _check_block(block, symbols, placed, batch)


def _check_block(block: Block, symbols: Mapping[Var, Expr], placed: Mapping[Buffer, _Rows | None], batch: Var) -> None:
    row, part = Var("row", i64), Var("part", i64)
    rows = placed[block.body.buffer]
    index = None if rows is None else block.body.indices[rows.dim]
    values, env, is_bound = dict(symbols), Env(), False
    for i in block.iters:
        extent = simplify(substitute(i.extent, symbols))
        if i.var is index and rows is not None and i.kind == "spatial":
            if prove_equal(extent, mul(batch, rows.size)) is not Proof.YES:
                raise _Unproved
            values[i.var] = simplify(add(mul(row, rows.size), part))
            env, is_bound = env.with_loop(part, rows.size), True
        elif batch in free_vars(extent):
            raise _Unproved
        else:
            env = env.with_loop(i.var, extent)
    if is_bound is (rows is None):
        raise _Unproved
    for store in block.own_stores:
        used = [*store.indices, store.value]
        for d, e in enumerate(store.indices):
            if (rows is not None and d == rows.dim) is not (e is index):
                raise _Unproved
        used = [e for e in used if e is not index]
        for access in (e for e in postorder(used) if isinstance(e, Load)):
            _check_load(access, placed[access.buffer], values, env, row, batch)
        _check_rest(used, values, row, batch)


def _check_load(access: Load, rows: _Rows | None, values: Mapping[Var, Expr], env: Env, row: Var, batch: Var) -> None:
    """Raise _Unproved unless a read is at the row that is written, and independent of the row's number otherwise."""
    others = [e for d, e in enumerate(access.indices) if rows is None or d != rows.dim]
    _check_rest(others, values, row, batch)
    if rows is None:
        return
    index = access.indices[rows.dim]
    if any(isinstance(e, Load) for e in postorder([index])):
        raise _Unproved
    inner = simplify(sub(substitute(index, values), mul(row, rows.size)), env)
    if {row, batch} & set(free_vars(inner)):
        raise _Unproved
    if prove(and_(le(0, inner), lt(inner, rows.size)), env) is not Proof.YES:
        raise _Unproved


def _check_rest(exprs: Sequence[Expr], values: Mapping[Var, Expr], row: Var, batch: Var) -> None:
    """Raise _Unproved if an expression depends on the number of the row or on the batch, other than by what it reads."""
    # No expression is rebuilt without its reads: folding could hide the row's number, as in 0 * row.
    pending, outside = list(exprs), set[Var]()
    while pending:
        e = pending.pop()
        if isinstance(e, Var):
            outside.update(free_vars(values.get(e, e)))
        elif not isinstance(e, Load):
            pending += e.children
    if outside & {row, batch}:
        raise _Unproved
