"""Functions of the three kinds and the module that holds them (paper section 3.1).

Tests: `tests/ir/check/test_verify.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

from numpy.typing import NDArray

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import Expr, Var, free_vars
from relax_tune.ir.core.graph import Function
from relax_tune.ir.core.stmt import Stmt
from relax_tune.summary import Facts, Summarised, counted, listed, span

if TYPE_CHECKING:
    from relax_tune.ir.core.struct_info import CallableInfo

Param = Union[Buffer, Var]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PrimFunc:
    """A tensor function in destination-passing style.

    Attributes:
        params: buffers in call order, the last `outputs` of them written, then explicit scalar parameters (`Var`). Shape symbols that
            occur as a bare dimension of a parameter buffer are read off it; every other symbol must be a scalar parameter.
        allocs: intermediate buffers.
        consts: parameters with the same values at every call (weights); a `prepack` block may lay them out once.
    """

    name: str
    params: tuple[Param, ...]
    outputs: int
    body: Stmt
    allocs: tuple[Buffer, ...] = ()
    consts: tuple[Buffer, ...] = ()

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Parameter buffers in call order."""
        return tuple(p for p in self.params if isinstance(p, Buffer))

    @property
    def input_buffers(self) -> tuple[Buffer, ...]:
        return self.buffers[: len(self.buffers) - self.outputs]

    @property
    def output_buffers(self) -> tuple[Buffer, ...]:
        return self.buffers[len(self.buffers) - self.outputs :]

    @property
    def scalar_params(self) -> tuple[Var, ...]:
        return tuple(p for p in self.params if isinstance(p, Var))

    @property
    def symbols(self) -> tuple[Var, ...]:
        """Shape symbols in order of first appearance in the parameters (buffer dims, then scalar parameters)."""
        dims: list[Expr] = [d for b in self.buffers for d in b.shape]
        return free_vars(*dims, *self.scalar_params)


@dataclass(frozen=True, slots=True, eq=False)
class ExternFunc:
    """A library routine by name, with the signature that deduction uses."""

    name: str
    signature: CallableInfo | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """Declared bounds of a symbol: `lower <= var` and, when `upper` is not None, `var <= upper`.

    Attributes:
        implied: the bounds follow from the bounds of other symbols, which calls check instead.
    """

    var: Var
    lower: int = 0
    upper: int | None = None
    implied: bool = False


AnyFunction = Union[Function, PrimFunc, ExternFunc]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IRModule(Summarised):
    """Named functions of the three kinds, the weights they name, and the declared bounds of the graph's symbols."""

    functions: Mapping[str, AnyFunction]
    constants: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    bounds: tuple[Bound, ...] = ()

    def _summary(self) -> tuple[str, Facts]:
        calls = [
            (name, f"({', '.join(f'{p.name}: {p.info}' for p in f.params)}) -> {f.ret_info}")
            for name, f in self.graphs.items()
        ]
        spans = [span(b.var.name, b.lower, b.upper) for b in self.bounds if not b.implied]
        size = sum(a.nbytes for a in self.constants.values()) / 1e6
        facts = [*calls[:4], ("bounds", listed(spans, 8) or "none")]
        facts.append(("constants", f"{len(self.constants)} ({size:.1f} MB)"))
        kinds = f"{counted(len(self.graphs), 'graph function')} and {counted(len(self.prims), 'tensor function')}"
        return f"IRModule of {kinds}", facts

    @property
    def graphs(self) -> dict[str, Function]:
        """The graph functions by name."""
        return {name: f for name, f in self.functions.items() if isinstance(f, Function)}

    @property
    def prims(self) -> dict[str, PrimFunc]:
        """The tensor functions by name."""
        return {name: f for name, f in self.functions.items() if isinstance(f, PrimFunc)}

    def prim(self, name: str) -> PrimFunc:
        """Return the tensor function `name`.

        Raises:
            KeyError: no such function; lists the known ones.
        """
        prims = self.prims
        if name not in prims:
            raise KeyError(f"expected a tensor function called {name!r}; the module has {', '.join(prims) or 'none'}")
        return prims[name]
