"""Packing of weights at build time, instead of on the device each time a program is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import TRUE, Expr, loads, postorder
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.plain_loops import with_blocks
from relax_tune.ir.core.stmt import blocks
from relax_tune.ir.interp.reference import evaluate_prim
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.program.program import LaunchStep, Program

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class PackingStep:
    """One step of `Program.prepare`: `func` writes `target`.

    Attributes:
        sources: Arrays of its other parameters.
        result: Array of `target`.
    """

    func: PrimFunc
    target: Buffer
    sources: tuple[int, ...]
    result: int


@dataclass(frozen=True)
class PackedWeights:
    """Weights in the layouts of kernels.

    Attributes:
        programs: Programs over the packed weights.
        constants: The weights that they name.
        recipe: How the packed weights are computed from others, as `read_recipe` reads it: texts of functions, and for each weight
            the number of its function, the position of the result among its parameters, and the names of the others.
    """

    programs: tuple[Program, ...]
    constants: dict[str, Array]
    recipe: dict[str, Any]


def pack_weights(
    programs: Sequence[Program], packings: Mapping[str, Sequence[PackingStep | None]], constants: Mapping[str, Array]
) -> PackedWeights:
    """Run the packing steps that only move weights.

    Results are bit-identical. A step that computes with floats stays in its program, since devices round differently.

    Args:
        packings: Every step of `prepare`, in order, by program; None for a library's own step, which depends on the machine.
    """
    packed_weights: dict[str, Array] = {}
    texts, steps = dict[str, int](), dict[str, dict[str, Any]]()
    repacked: list[Program] = []
    for program in programs:
        arrays = {i: constants[b.name] for i, b in enumerate(program.buffers) if b.role == "const"}
        buffers, prepare = list(program.buffers), list[LaunchStep]()
        for step, packing in zip(program.prepare, packings[program.name], strict=True):
            if packing is None or not all(i in arrays for i in packing.sources):
                prepare.append(step)
                continue
            array = packed(packing, [arrays[i] for i in packing.sources])
            if array is None:
                prepare.append(step)
                continue
            # Named by kernel and sources: programs that pack a weight in the same way share the packed array in the
            # artifact.
            names = " ".join((step.target, *(buffers[i].name for i in packing.sources)))
            name = f"packed.{hashlib.blake2b(names.encode(), digest_size=8).hexdigest()}"
            packed_weights[name] = arrays[packing.result] = array
            text = print_text(packing.func, normalise=True)
            sources = [buffers[i].name for i in packing.sources]
            target = packing.func.buffers.index(packing.target)
            steps[name] = {"function": texts.setdefault(text, len(texts)), "target": target, "sources": sources}
            buffers[packing.result] = replace(buffers[packing.result], name=name, role="const")
        repacked.append(_without_unread(replace(program, buffers=tuple(buffers), prepare=tuple(prepare))))
    # Weights that only packing read are left out: the artifact would otherwise hold them twice.
    named = {b.name for p in repacked for b in p.buffers if b.role == "const"}
    remaining = {n: a for n, a in {**constants, **packed_weights}.items() if n in named}
    return PackedWeights(tuple(repacked), remaining, {"functions": list(texts), "steps": steps} if steps else {})


@dataclass(frozen=True, eq=False)
class RecipeStep:
    """How a packed weight is computed.

    Attributes:
        func: Moves elements from its other parameters to the parameter number `target`.
        sources: Names of the weights that these parameters are.
    """

    func: PrimFunc
    target: int
    sources: tuple[str, ...]

    @property
    def inputs(self) -> dict[str, Buffer]:
        """The parameters by the names of the weights that they are."""
        others = [b for k, b in enumerate(self.func.buffers) if k != self.target]
        return dict(zip(self.sources, others, strict=True))


def read_recipe(data: Mapping[str, Any]) -> dict[str, RecipeStep]:
    """Return the steps of `PackedWeights.recipe` by the weight that each computes.

    Raises:
        ParseError, KeyError, IndexError, TypeError or ValueError: The data are something else.
    """
    functions = [parse_prim_func(text) for text in data.get("functions", ())]
    steps = {
        str(name): RecipeStep(functions[step["function"]], int(step["target"]), tuple(map(str, step["sources"])))
        for name, step in dict(data.get("steps", {})).items()
    }
    for step in steps.values():
        if not 0 <= step.target < len(step.func.buffers) or len(step.inputs) != len(step.func.buffers) - 1:
            raise ValueError(f"{step.func.name}: expected a target and a source for each other parameter")
    return steps


def packed_again(recipe: Mapping[str, RecipeStep], constants: Mapping[str, Array]) -> dict[str, Array]:
    """Return the weights of a recipe, packed from constants. Raises KeyError for a constant that is missing."""
    result: dict[str, Array] = {}
    for name, step in recipe.items():
        arrays = [result[source] if source in result else constants[source] for source in step.sources]
        array = packed(PackingStep(step.func, step.func.buffers[step.target], (), 0), arrays)
        if array is None:
            raise ValueError(f"{name}: expected a function that moves elements, got one that computes")
        result[name] = array
    return result


def packed(packing: PackingStep, sources: Sequence[Array]) -> Array | None:
    """Compute the result of a packing step in NumPy; None if it does more than move values."""
    func, target = packing.func, packing.target
    compute_blocks = [replace(b, role="compute") for b in blocks(func.body)]
    moves = all(b.init is None and b.predicate is TRUE and _moves(b.body.value) for b in compute_blocks)
    # Only moves, because NumPy and a device may round arithmetic differently, and the result must not depend on where
    # a weight was packed. A scalar parameter is a size, which is unknown at build time.
    if not moves or func.scalar_params:
        return None
    inputs = tuple(b for b in func.buffers if b is not target)
    plain = with_blocks(PrimFunc(func.name, (*inputs, target), 1, func.body), compute_blocks)
    (array,) = evaluate_prim(plain, sources)
    return np.ascontiguousarray(array.astype(target.dtype.numpy))


def _moves(value: Expr) -> bool:
    """Return True if a value is a load or literal, unchanged, possibly selected by position."""
    # Arithmetic within indices chooses which element moves; it does not change the element.
    indices = {i for n in loads(value) for i in postorder(n.indices)}
    computed = [n for n in postorder((value,)) if n.op not in ("", "select") and n not in indices]
    return not loads(*computed)


def _without_unread(program: Program) -> Program:
    """Return the program without constants and kernels that are no longer used."""
    steps = [*program.prepare, *(s for c in program.calls for v in c.variants for s in v.steps)]
    read = {i for s in steps for i in s.buffers} | {*program.inputs, *program.outputs}
    read |= {b.base for b in program.buffers if b.base is not None} | {c.buffer for c in program.checked}
    used_buffers = [i for i, b in enumerate(program.buffers) if i in read or b.role not in ("const", "packed")]
    at = {old: new for new, old in enumerate(used_buffers)}

    def moved(step: LaunchStep) -> LaunchStep:
        return replace(step, buffers=tuple(at[i] for i in step.buffers))

    calls = tuple(
        replace(c, variants=tuple(replace(v, steps=tuple(map(moved, v.steps))) for v in c.variants))
        for c in program.calls
    )
    used = {s.target for s in steps}
    buffers = (program.buffers[i] for i in used_buffers)
    return replace(
        program,
        buffers=tuple(b if b.base is None else replace(b, base=at[b.base]) for b in buffers),
        kernels=tuple(k for k in program.kernels if k.name in used),
        prepare=tuple(map(moved, program.prepare)),
        calls=calls,
        inputs=tuple(at[i] for i in program.inputs),
        outputs=tuple(at[i] for i in program.outputs),
        ranges=tuple(replace(r, buffer=at[r.buffer]) for r in program.ranges),
        checked=tuple(replace(c, buffer=at[c.buffer]) for c in program.checked),
    )
