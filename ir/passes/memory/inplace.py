"""Outputs in the memory of an argument (`call_tir_inplace`, Relax): candidates and rewriting.

A call with an in-place output has another kernel, with one pointer fewer, than the kernel that was measured. Therefore no pass of the
standard pipeline rewrites calls. The build does, and only for variants that do not read ahead of their writes.

Tests: `tests/ir/check/test_inplace.py`, `tests/ir/passes/test_graph_passes.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove_equal
from relax_tune.ir.check.aliasing import AliasSets, AllocatedTensor
from relax_tune.ir.check.inplace import inplace_conflicts, sources_of, why_not_inplace
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, CallDPSLibrary, CallTIR, Function, GVar, TupleValue
from relax_tune.ir.core.graph_walk import all_bindings
from relax_tune.ir.core.struct_info import StructInfo, TensorInfo
from relax_tune.ir.op.base import env_of
from relax_tune.ir.passes.memory.append import Appended
from relax_tune.ir.rewrite.emitter import Emitter, rewrite_function


@dataclass(frozen=True, slots=True)
class InplacePair:
    """An output of a call, and an argument whose memory it may use.

    Attributes:
        var: Variable that the call binds.
        callee: Name of the tensor function.
        output: Position of the output.
        argument: Position of the argument.
        inputs: Positions of all arguments in that memory.
        reason: Why the graph or the loops forbid it; None if they do not.
    """

    var: GVar
    callee: str
    output: int
    argument: int
    inputs: tuple[int, ...]
    reason: str | None = None


def inplace_pairs(f: Function, module: IRModule, find: bool = True) -> tuple[InplacePair, ...]:
    """List the pairs that `call_tir_inplace` states and, with `find`, further candidates; at most one per output.

    The caller, which knows the variants of the tensor functions, must check that none reads ahead of its writes.
    """
    pairs = (*_stated(f), *(_Finder(f, module).pairs() if find else ()))
    conflicts = {(m.var, m.output): m.why for m in inplace_conflicts(with_inplace(f, pairs), module)}
    return tuple(replace(p, reason=conflicts.get((p.var, p.output))) for p in pairs)


def appended_pairs(f: Function, module: IRModule, appended: Sequence[Appended]) -> Iterator[InplacePair]:
    """Yield the calls that extend parameters, which have memory after their last element for the call to write to."""
    if not appended:
        return
    aliases, env = AliasSets(inplace=False), env_of(module.bounds)
    fields = f.ret.fields if isinstance(f.ret, TupleValue) else (f.ret,)
    readers: list[AllocatedTensor] = []
    extending: list[tuple[InplacePair, AllocatedTensor]] = []
    for b in f.bindings:
        readers += aliases.read_tensors(b.value) if isinstance(b.value, (CallTIR, CallDPSLibrary)) else ()
        for at, arg in enumerate(b.value.args if isinstance(b.value, CallTIR) else ()):
            tensors = aliases.tensors_of(arg) if isinstance(arg, GVar) else ()
            for i, info in enumerate(b.value.out if isinstance(b.value, CallTIR) else ()):
                if len(tensors) == 1 and isinstance(b.value, CallTIR) and _extends(info, arg.info, env):
                    extending.append((_pair(b.var, b.value, i, at, aliases), tensors[0]))
        aliases.bind(b.var, b.value)
    extended = {(f.params[a.param], 0): aliases.tensors_of(fields[a.result]) for a in appended}
    for pair, param in extending:
        if extended.get(param) == ((pair.var, pair.output),) and readers.count(param) == 1:
            func = module.prim(pair.callee)
            sources = [func.input_buffers[k] for k in pair.inputs]
            why = next((w for s in sources if (w := why_not_inplace(func, func.output_buffers[pair.output], s))), None)
            yield replace(pair, reason=why)


def _extends(new: TensorInfo, old: StructInfo, env: Env) -> bool:
    """Return whether two tensors have the same dtype and provably equal dims except the outermost."""
    if not isinstance(old, TensorInfo) or old.shape is None or new.shape is None or old.dtype is not new.dtype:
        return False
    pairs = zip(old.shape[1:], new.shape[1:])
    return len(old.shape) == len(new.shape) > 0 and all(prove_equal(a, b, env) is Proof.YES for a, b in pairs)


def with_inplace(f: Function, pairs: Collection[InplacePair]) -> Function:
    """Return `f` with exactly these outputs in the memory of arguments."""
    chosen = {(p.var, p.output): p.argument for p in pairs}

    def visit(out: Emitter, b: AnyBinding) -> None:
        call = b.value
        if isinstance(call, CallTIR) and isinstance(b, Binding):
            arguments = tuple(chosen.get((b.var, i)) for i in range(len(call.out)))
            inplace = arguments if any(at is not None for at in arguments) else ()
            if inplace != call.inplace:
                b = replace(b, value=replace(call, inplace=inplace))
        out.keep(b)

    return rewrite_function(f, visit)


def _stated(f: Function) -> Iterator[InplacePair]:
    """Yield the pairs of `call_tir_inplace`."""
    aliases = AliasSets(inplace=False)
    for b in all_bindings(f):
        if isinstance(b.value, CallTIR):
            for i, at in enumerate(b.value.inplace):
                if at is not None:
                    yield _pair(b.var, b.value, i, at, aliases)
        aliases.bind(b.var, b.value)


def _pair(var: GVar, call: CallTIR, output: int, at: int, aliases: AliasSets) -> InplacePair:
    tensors = set(aliases.tensors_of(call.args[at]))
    inputs = (k for k, arg in enumerate(call.args) if isinstance(arg, GVar) and tensors & set(aliases.tensors_of(arg)))
    return InplacePair(var, call.callee, output, at, tuple(inputs))


class _Finder:
    """Finds arguments with the dims of an output that are computed in the same function and not read afterwards."""

    def __init__(self, f: Function, module: IRModule) -> None:
        self.f, self.module, self.env = f, module, env_of(module.bounds)
        self.aliases = AliasSets(inplace=False)
        self.last: dict[AllocatedTensor, int] = {}
        self.at_step: dict[GVar, int] = {}
        for position, b in enumerate(all_bindings(f)):
            self.at_step[b.var] = position
            self.last.update(dict.fromkeys(self.aliases.read_tensors(b.value), position))
            self.aliases.bind(b.var, b.value)
        # Results are read after the last step, so their memory is never free.
        self.last.update(dict.fromkeys(self.aliases.read_tensors(f.ret), len(self.at_step)))
        self.computed = {b.var for b in f.bindings if isinstance(b.value, CallTIR)}

    def pairs(self) -> Iterator[InplacePair]:
        """Yield a pair for each output that can use the memory of an argument, except in calls that state pairs."""
        for b in self.f.bindings:
            call = b.value
            if not isinstance(call, CallTIR) or not isinstance(b, Binding) or call.inplace:
                continue
            used: set[int] = set()
            for i in range(len(call.out)):
                at = self._argument(call, b.var, i, used)
                if at is not None:
                    used.add(at)
                    yield _pair(b.var, call, i, at, self.aliases)

    def _argument(self, call: CallTIR, var: GVar, i: int, used: Collection[int]) -> int | None:
        """Return the first argument, not among `used`, whose memory output `i` can use; None without any."""
        func = self.module.prim(call.callee)
        for at, arg in enumerate(call.args):
            tensors = self.aliases.tensors_of(arg) if isinstance(arg, GVar) else ()
            # A parameter belongs to the caller, and a constant serves later calls too.
            if at in used or len(tensors) != 1 or tensors[0][0] not in self.computed:
                continue
            if self.last[tensors[0]] != self.at_step[var] or not self._alike(arg.info, call.out[i]):
                continue
            sources = sources_of(func, call, tensors[0], self.aliases)
            if all(why_not_inplace(func, func.output_buffers[i], s) is None for s in sources):
                return at
        return None

    def _alike(self, old: StructInfo, new: TensorInfo) -> bool:
        """Return whether two tensors have the same dtype and provably equal dims."""
        if not isinstance(old, TensorInfo) or old.shape is None or new.shape is None or old.dtype is not new.dtype:
            return False
        return len(old.shape) == len(new.shape) and all(
            prove_equal(a, b, self.env) is Proof.YES for a, b in zip(old.shape, new.shape, strict=True)
        )
