"""Minimal programs that fail alike: cut off from above and below, with few inputs, attributes and values; printed as a test."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from tests.fuzz.importers.program import Array, Input, Program

Fails = Callable[[Program], bool]


def minimise(program: Program, output: str, call: int, fails: Fails, secs: float = 20) -> Program:
    """Return a small program that fails. output: the result that differs; call: number of the call."""
    end = time.monotonic() + secs
    small = program.copy(calls=[program.calls[call]])
    if output:
        small = small.copy(outputs=[output]).needed()
    if not fails(small):
        small = program.copy(calls=[program.calls[call]])
        if not fails(small):
            return program
    improved = True
    while improved and time.monotonic() < end:
        improved = False
        for candidate in _smaller(small):
            if time.monotonic() > end:
                break
            if fails(candidate):
                small, improved = candidate, True
                break
    return small


def _smaller(p: Program) -> Iterator[Program]:
    yield from _cuts(p)
    if len(p.outputs) > 1:
        for name in p.outputs:
            yield p.copy(outputs=[o for o in p.outputs if o != name]).needed()
    yield from _plainer(p)
    yield from _parts(p)
    yield from _values(p)


def _cuts(p: Program) -> Iterator[Program]:
    """Replace results of nodes by inputs, the last ones first; let the last results go."""
    try:
        values = p.runs(p.calls[0]).by_name
    except Exception:
        return
    for n in reversed(p.nodes):
        results = [o for o in n.output if o]
        if any(o in p.outputs for o in results) or not all(isinstance(values[o], np.ndarray) for o in results):
            continue
        cut = p.copy(nodes=[m for m in p.nodes if m is not n])
        for o in results:
            cut.inputs[o] = Input(values[o].dtype, values[o].shape)
            cut.calls[0][o] = values[o]
        yield cut.needed()
    for n in reversed(p.nodes):
        if any(o in p.outputs for o in n.output):
            inner = [i for i in n.input if i in values and i not in p.inputs and i not in p.constants]
            for i in inner:
                if isinstance(values[i], np.ndarray):
                    yield p.copy(outputs=[i]).needed()


def _plainer(p: Program) -> Iterator[Program]:
    """Fix dims, make constants inputs, drop attributes."""
    if any(not isinstance(d, int) for i in p.inputs.values() for d in i.dims):
        yield p.copy(inputs={k: Input(i.dtype, p.calls[0][k].shape) for k, i in p.inputs.items()})
    for name, array in p.constants.items():
        others = {k: v for k, v in p.constants.items() if k != name}
        fixed = p.copy(constants=others)
        fixed.inputs[name] = Input(array.dtype, array.shape)
        fixed.calls[0][name] = array
        yield fixed
    for k, n in enumerate(p.nodes):
        for a in n.attribute:
            smaller = onnx.NodeProto()
            smaller.CopyFrom(n)
            del smaller.attribute[:]
            smaller.attribute.extend(b for b in n.attribute if b.name != a.name)
            yield p.copy(nodes=[*p.nodes[:k], smaller, *p.nodes[k + 1 :]])


def _parts(p: Program) -> Iterator[Program]:
    """Halve dims of the same size in all inputs."""
    for size in sorted({d for a in p.calls[0].values() for d in a.shape if d > 1}):
        for low, high in ((0, size // 2), (size // 2, size)):
            part = p.copy()
            for name, a in part.calls[0].items():
                key = tuple(slice(low, high) if d == size else slice(None) for d in a.shape)
                part.calls[0][name] = a[key]
                dims = tuple(
                    high - low if d == size and e == size else e
                    for d, e in zip(a.shape, p.inputs[name].dims, strict=True)
                )
                part.inputs[name] = Input(a.dtype, dims)
            yield part


def _values(p: Program) -> Iterator[Program]:
    """Make half of the values of an input 1, then round them."""
    for name, a in p.calls[0].items():
        flat = a.reshape(-1)
        if a.size > 1:
            for low, high in ((0, a.size // 2), (a.size // 2, a.size)):
                changed = flat.copy()
                changed[low:high] = True if a.dtype.kind == "b" else 1
                if not np.array_equal(changed, flat, equal_nan=a.dtype.kind == "f"):
                    yield _with(p, name, changed.reshape(a.shape))
        if a.dtype.kind == "f":
            with np.errstate(all="ignore"):
                rounded = np.where(np.isfinite(a), np.round(a.astype(np.float64)), a).astype(a.dtype)
            if not np.array_equal(rounded, a, equal_nan=True):
                yield _with(p, name, rounded)


def _with(p: Program, name: str, array: Array) -> Program:
    changed = p.copy()
    changed.calls[0][name] = array
    return changed


def regression_test(program: Program, why: str) -> str:
    """Return a program as the text of a test."""
    values = program.runs(program.calls[0]).by_name
    proto = program.proto(values)
    name = "_".join(re.sub(r"\W", "", n.op_type).lower() for n in program.nodes)[:60]
    lines = [f"def test_importer_{name}_agrees_with_onnx() -> None:", f'    """{why[:100]}"""']
    try:
        text = onnx.printer.to_text(proto)
        if onnx.parser.parse_model(text).graph.node != proto.graph.node:
            raise ValueError
        lines += [
            '    proto = onnx.parser.parse_model("""',
            *(f"      {line}" for line in text.splitlines()),
            '    """)',
        ]
    except Exception:
        lines += [f"    proto = onnx.load_model_from_string({proto.SerializeToString()!r})"]
    arrays = ", ".join(literal(program.calls[0][i]) for i in program.inputs)
    return "\n".join([*lines, f"    check(proto, [{arrays}])", ""])


def literal(a: Array) -> str:
    kind = "bool" if a.dtype.kind == "b" else a.dtype.str[1:]
    with np.printoptions(threshold=10**6):
        return f"np.array({a.tolist()!r}, {kind!r})".replace("nan", "np.nan").replace("inf", "np.inf")


def stored(program: Program, folder: Path, name: str) -> Path:
    """Write the model and the arguments of its first call; return the path of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    values = program.runs(program.calls[0]).by_name
    path = folder / f"{name}.onnx"
    path.write_bytes(program.proto(values).SerializeToString())
    np.savez(folder / f"{name}.npz", **{f"x{k}": program.calls[0][i] for k, i in enumerate(program.inputs)})
    return path


def read(path: Path) -> Program:
    """Return a stored program."""
    proto = onnx.load(str(path))
    arrays = np.load(path.with_suffix(".npz"))
    inputs = {}
    for i in proto.graph.input:
        t = i.type.tensor_type
        dims = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in t.shape.dim)
        inputs[i.name] = Input(np.dtype(helper.tensor_dtype_to_np_dtype(t.elem_type)), dims)
    opsets = {o.domain: o.version for o in proto.opset_import}
    return Program(
        opsets.pop(""), list(proto.graph.node), inputs, {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer},
        [o.name for o in proto.graph.output], [{i.name: arrays[f"x{k}"] for k, i in enumerate(proto.graph.input)}],
        {d: v for d, v in opsets.items() if d != "ai.onnx"},
    )  # fmt: skip


def shown(program: Program) -> str:
    """Return nodes and values of a program, for a report."""
    values = program.runs(program.calls[0]).by_name
    lines = [f"opset {program.opset}"]
    for name in (*program.inputs, *program.constants):
        form = "input" if name in program.inputs else "constant"
        dims: Any = program.inputs[name].dims if name in program.inputs else ""
        lines.append(f"{form} {name} {dims} = {_array(values[name])}")
    for n in program.nodes:
        lines.append(onnx.printer.to_text(n))
        for o in n.output:
            if o and isinstance(values[o], np.ndarray):
                lines.append(f"  {o} = {_array(values[o])}")
    return "\n".join(lines)


def _array(a: Any) -> str:
    array = np.asarray(a)
    return f"{np.array2string(array, threshold=16, edgeitems=2, precision=9)} {array.dtype}"
