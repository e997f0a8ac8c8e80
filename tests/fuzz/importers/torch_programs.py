"""Random programs for the importer of torch.export, compared with torch: lines of Python that a module runs.

A program has inputs whose dims are tied, separate or constant, and constants. `make` evaluates each line as it adds it, so that the
next one knows what it reads. The same lines are evaluated by torch with moved results, and exported, imported and interpreted.
"""

from __future__ import annotations

import logging
import random
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.fuzz.importers.builder import FLOATS, SIGNED, STYLES, broadcasts, numbers
from tests.fuzz.importers.minimise import literal
from tests.fuzz.importers.oracles import Expected, expected
from tests.fuzz.importers.program import Array, Input, Invalid, Program, Values
from tests.fuzz.importers.rounding import Jitter
from tests.fuzz.importers.torch_operators import EXACT, INEXACT, JUMPS
from tests.fuzz.importers.trial import Outcome, Run, interpreted, judged

from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.torch import control
from relax_tune.ir.frontend.torch.export import plain_program
from relax_tune.ir.frontend.torch.importer import SUPPORTED, import_program

logging.getLogger("torch").setLevel(logging.ERROR)
torch.set_num_threads(1)  # a forked child has no threads of its parent

LINES = (1, 2, 3, 4, 5, 6, 8, 10)
ATTEMPTS = 6
MOST = 6000
SYMBOLS = {"a": 5, "b": 7, "c": 11}
"""Sizes of the symbols at the first call; no constant dim is among them."""
KINDS = {"f": "f", "i": "iu", "b": "b", "n": "fiu", "a": "fiub"}
INTS = tuple(t for t in (*SIGNED, np.dtype("u1")))
ROUGH = re.compile(
    "interpolate|grid_sample|gamma|fft|det|special|erfinv|conv_transpose|quantile|cdist|i0|var|std|norm|attention"
)
"""Lines whose results are open by more units."""
ABSOLUTE = re.compile("_window|gelu|mish|logsigmoid|tanhshrink|softplus|interpolate|logaddexp|logcumsumexp")
"""Lines that subtract numbers of magnitude 1."""
PLACE = re.compile(r"\{(\w+)(?::([^{}]*))?\}")


@dataclass(frozen=True)
class Line:
    """A line `output = text`. ulps: units by which its result is open; 0 for exact results."""

    output: tuple[str]
    input: tuple[str, ...]
    text: str
    ulps: float = 0
    attribute: tuple[()] = ()
    op_type: str = "torch"


@dataclass
class TorchCode(Program):
    """A program whose nodes are lines. dims: "named", "auto" or "fixed" dims of inputs at the export."""

    dims: str = "named"
    nodes: list[Line] = field(default_factory=list)

    def needed(self) -> TorchCode:
        read, lines = {*self.outputs}, []
        for n in reversed(self.nodes):
            if n.output[0] in read:
                lines.append(n)
                read |= {*n.input}
        return self.copy(
            nodes=lines[::-1],
            inputs={k: v for k, v in self.inputs.items() if k in read},
            constants={k: v for k, v in self.constants.items() if k in read},
            calls=[{k: v for k, v in c.items() if k in read} for c in self.calls],
        )

    def runs(self, call: Mapping[str, Array], jitter: Jitter | None = None) -> Values:
        values: dict[str, Any] = {**self.constants, **call}
        v = Values(values, set(values), set(values), set(values), set())
        for n in self.nodes:
            given = {name: values[name] for name in n.input}
            if jitter is not None and n.ulps:
                given = {k: _shaken(a, jitter, n.ulps / 2) for k, a in given.items()}
            result = evaluate(n, given)
            opened = not v.open.isdisjoint(n.input) or _is_open(n, given, result)
            if jitter is not None and n.ulps and result.dtype.kind == "f":
                if ABSOLUTE.search(n.text):
                    result = (result + 4 * np.finfo(result.dtype).eps * jitter.steps(result.shape)).astype(result.dtype)
                result = jitter.moved(result, n.ulps * (8 if result.dtype.itemsize == 2 else 1), zeros=True)
            name = n.output[0]
            values[name] = result
            v.pure.add(name)
            v.native.add(name)
            v.exact |= {name} if not n.ulps and v.exact.issuperset(n.input) else set()
            v.open |= {name} if opened else set()
        return v

    def function(self, name: str = "f") -> str:
        """Return the program as the text of a function of a module and its inputs."""
        lines = [f"def {name}(m, {', '.join(self.inputs)}):"]
        lines += [f"    {c} = m.{c}" for c in self.constants]
        lines += [f"    {n.output[0]} = {n.text}" for n in self.nodes]
        return "\n".join([*lines, f"    return {', '.join(self.outputs)},"])


def _shaken(a: Array, jitter: Jitter, ulps: float) -> Array:
    """Move what a line reads, so that sums whose terms cancel show it."""
    return Jitter(2, jitter.rng).moved(a, 4 * ulps if a.dtype.itemsize == 2 else ulps) if a.dtype.kind == "f" else a


def _large(a: Array) -> bool:
    with np.errstate(all="ignore"):
        return bool(a.dtype.kind == "f" and (np.abs(a[np.isfinite(a)]) > 1e3).any())


def _is_open(line: Line, given: Mapping[str, Any], result: Array) -> bool:
    """Return whether torch leaves a result open: the order of the terms of a sum decides it, or its algorithm."""
    if "pixel_" in line.text and not result.size:
        return True  # eager torch returns its argument
    if re.search("%|//|remainder|fmod|floor'", line.text) and any(_large(a) for a in given.values()):
        return True  # quotients of more digits than the type has
    if not line.ulps:
        return False
    if "polygamma" in line.text and result.dtype.itemsize == 8:
        return True  # torch has nine digits
    most = {2: 100.0, 4: 1e15, 8: 1e120}
    floats = [a for a in given.values() if a.dtype.kind == "f"]
    with np.errstate(all="ignore"):
        huge = any(bool((np.abs(a[np.isfinite(a)]) > most[a.dtype.itemsize]).any()) for a in floats)
    finite = all(np.isfinite(a).all() for a in floats)
    if not finite and re.search(
        "var|std|_norm|einsum|attention|grid|interpolate|fft|det|cdist|cov|corr|quantile", line.text
    ):
        return True
    return huge or (finite and result.dtype.kind == "f" and not np.isfinite(result).all())


def tensor(a: Array) -> Any:
    return torch.from_numpy(np.array(a, order="C", copy=True))


def evaluate(line: Line, given: Mapping[str, Array]) -> Array:
    """Evaluate a line by torch. Raises Invalid where torch refuses it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = eval(line.text, {"torch": torch}, {k: tensor(a) for k, a in given.items()})
    except Exception as error:
        raise Invalid(f"{line.text}: {type(error).__name__}: {error}") from None
    if not isinstance(result, torch.Tensor) or result.dtype not in TYPES or result.numel() > MOST:
        raise Invalid(line.text)
    return np.array(result.detach().resolve_conj().resolve_neg().numpy(), order="C", copy=True)


TYPES = frozenset(
    getattr(torch, n) for n in ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"]
)


class Builder:
    """A program that grows."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.np_rng = rng, np.random.default_rng(rng.randrange(1 << 40))
        self.p = TorchCode(0, dims=rng.choice(("named", "named", "named", "auto", "auto", "fixed")))
        self.values: dict[str, Array] = {}
        self.style = rng.choice(STYLES)
        self.separate = rng.random() < 0.2

    def given(self, dims: Sequence[int | str], dtype: np.dtype[Any], high: int = 0) -> str:
        """Return a new input, or a constant where all dims are. high: most of an index."""
        style = self.style if self.rng.random() < 0.8 else self.rng.choice(STYLES)
        draw = numbers(style, dtype)
        if high:

            def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
                return rng.integers(0, high, shape)

        name = f"x{len(self.p.inputs)}"
        shape = tuple(SYMBOLS[d] if isinstance(d, str) else d for d in dims)
        array = draw(self.np_rng, shape)
        if not any(isinstance(d, str) for d in dims) and self.rng.random() < 0.3:
            name = f"c{len(self.p.constants)}"
            self.p.constants[name] = array
        else:
            self.p.inputs[name] = Input(dtype, tuple(dims), draw)
        self.values[name] = array
        return name

    def dims(self, rank: int) -> list[int | str]:
        return [self.rng.choice((*SYMBOLS, *SYMBOLS, 1, 2, 3, 4)) for _ in range(rank)]

    def named(self, shape: Sequence[int]) -> list[int | str]:
        """Return the dims of an input of a shape. Raises Invalid for sizes that only a result has."""
        names = {v: k for k, v in SYMBOLS.items()}
        if any(d not in names and d > 4 for d in shape):
            raise Invalid("size")
        return [names.get(d, d) for d in shape]

    def dtype(self, kind: str) -> np.dtype[Any]:
        if kind == "b":
            return np.dtype(bool)
        if kind == "i" or (kind in "na" and self.rng.random() < 0.3):
            return np.dtype("i8") if self.rng.random() < 0.5 else self.rng.choice(INTS)
        if kind == "a" and self.rng.random() < 0.15:
            return np.dtype(bool)
        return np.dtype("f4") if self.rng.random() < 0.7 else self.rng.choice(FLOATS)

    def existing(self, kinds: str, accepts: Any) -> str | None:
        names = [n for n, v in self.values.items() if v.dtype.kind in kinds and accepts(v)]
        if not names or self.rng.random() < 0.15:
            return None
        return names[-1] if self.rng.random() < 0.5 else self.rng.choice(names)

    def line(self, template: str, ulps: float, **bound: str) -> str:
        """Add a line and return the name of its result. Raises Invalid where torch refuses it."""
        texts, before = dict(bound), (dict(self.p.inputs), dict(self.p.constants), dict(self.values))
        try:
            text = PLACE.sub(lambda m: self.operand(texts, m[1], m[2]), template)
            read = tuple(dict.fromkeys(n for n in re.findall(r"\b[vxc]\d+\b", text)))
            line = Line((f"v{len(self.values)}",), read, text, ulps)
            result = evaluate(line, {n: self.values[n] for n in read})
        except (Invalid, ValueError, KeyError, IndexError):
            self.p.inputs, self.p.constants, self.values = before
            raise Invalid(template) from None
        self.p.nodes.append(line)
        self.values[line.output[0]] = result
        return line.output[0]

    def operand(self, texts: dict[str, str], name: str, what: str | None) -> str:
        """Return the text of an operand: `what` as the module of the templates writes it."""
        if what is None:
            return texts[name]
        first = self.values.get(texts.get("x", ""))
        shown = ""
        if what.startswith("|"):
            texts[name] = self.rng.choice(what[1:].split("|"))
        elif what.startswith("@"):
            rank = self.values[texts[what.strip("@+")]].ndim + ("+" in what)
            texts[name] = str(self.rng.randrange(-rank, rank))
        elif what.startswith("perm:"):
            texts[name] = str(tuple(self.rng.sample(range(first.ndim), first.ndim)))
        elif what.startswith("dtype:"):
            targets = "float16 float32 float64" if first.dtype.kind == "f" else "int8 int16 int32 int64 float32 float64"
            texts[name] = f"torch.{self.rng.choice(targets.split())}"
        elif what.startswith("index:"):
            _, bound, form = what.split(":")
            axis = bound.rpartition(".")[2]
            size = bound if bound.isdigit() else f"{texts['x']}.shape[{texts.get(axis, axis)}]"
            dims = (
                self.dims(self.rng.randrange(3))
                if form == "any"
                else self.dims(int(form[1]))
                if form[1:].isdigit()
                else None
            )
            dims = dims if dims is not None else self.named(first.shape if form == "=x" else first.shape[:1])
            shown = texts[name] = f"({self.given(dims, np.dtype('i8'), 100)} % {size})"
        else:
            texts[name] = shown = self.tensor(texts, what, first)
        return shown or texts[name]

    def tensor(self, texts: dict[str, str], what: str, first: Array | None) -> str:
        body, _, more = what.partition(":")
        element = first.dtype if first is not None else self.dtype("f")
        if more in ("b", "i", "n", "f"):
            element = self.dtype(more) if more != "n" or element.kind == "b" else element
        if body.startswith("["):
            dims: list[int | str] = []
            for part in body[1:-1].split(","):
                source, _, axis = part.partition(".")
                if axis == "*":
                    dims += self.named(first.shape[1 if dims else 0 :])
                elif axis:
                    dims += self.named([self.values[texts[source]].shape[int(axis)]])
                else:
                    dims.append(int(self.rng.choice(part.split("/"))))
            kept = self.existing(element.kind, lambda v: v.dtype == element and list(v.shape) == dims)
            return self._limited(kept or self.given(dims, element), more)
        if body.startswith("="):
            shape = self.values[texts[body[1:]]].shape
            kept = self.existing(element.kind, lambda v: v.dtype == element and v.shape == shape)
            return self._limited(kept or self.given(self.named(shape), element), more)
        if body.startswith("~"):
            a = self.values.get(texts[body[1:]])
            shape, element = (
                (a.shape, element if more in ("b", "i", "n") else a.dtype) if a is not None else ((), element)
            )
            if self.rng.random() < 0.1:
                element = self.dtype(element.kind)
            kept = self.existing(element.kind, lambda v: v.dtype == element and broadcasts(v.shape, shape))
            part = [d if self.rng.random() < 0.7 else 1 for d in shape][self.rng.randrange(len(shape) + 1) :]
            if kept is None:
                kept = self.given(self.named(part if self.rng.random() < 0.6 else shape), element)
            return self._limited(kept, more)
        kind, fixed, rank = body[0], "=" in body, int(body.strip("finba=") or 0)
        kept = self.existing(KINDS[kind], lambda v: v.ndim == rank if fixed else v.ndim >= rank)
        ranks = [rank] if fixed else [r for r in (0, 1, 2, 2, 3, 3, 4) if r >= rank]
        return self._limited(kept or self.given(self.dims(self.rng.choice(ranks)), self.dtype(kind)), more)

    def _limited(self, name: str, more: str) -> str:
        if more == "unit":
            return f"{name}.clamp(-0.9, 0.9)"
        if more == "nonzero" and self.values[name].dtype.kind != "f":
            return f"torch.where({name} == 0, 1, {name})"
        return name


def make(seed: int, number: int) -> TorchCode | None:
    """Return a program; None where torch refuses all lines."""
    rng = random.Random(f"torch {seed} {number}")
    b = Builder(rng)
    for _ in range(rng.choice(LINES)):
        for _ in range(ATTEMPTS):
            exact = rng.random() < len(EXACT) / (len(EXACT) + len(INEXACT))
            try:
                template = rng.choice(EXACT if exact else INEXACT)
                b.line(template, 0 if exact else 16 if ROUGH.search(template) else 4)
                break
            except Invalid:
                continue
    for n in [*b.p.nodes]:
        if b.values[n.output[0]].dtype.kind == "f" and rng.random() < 0.5:
            try:
                b.line(rng.choice(JUMPS), 0, x=n.output[0])
            except Invalid:
                continue
    read = {i for n in b.p.nodes for i in n.input}
    ends = [n.output[0] for n in b.p.nodes if n.output[0] not in read]
    inner = [n.output[0] for n in b.p.nodes if n.output[0] in read and rng.random() < 0.2]
    b.p.outputs = [*ends, *inner]
    if not ends or not b.p.inputs:
        return None
    program = b.p.needed()
    if not program.inputs:
        return None
    if b.separate and program.dims == "named":
        program.dims = "auto"
    program.calls = [{k: b.values[k] for k in program.inputs}]
    for _ in range(2 if program.dims != "fixed" else 1):
        program.calls.append(_another(program, rng))
    return program


def _another(p: TorchCode, rng: random.Random) -> dict[str, Array]:
    """Return arguments of other sizes."""
    assumed = p.dims == "auto" or any("squeeze()" in n.text for n in p.nodes)  # torch takes sizes to be at least 2
    low = (2, 2, 3, 4, 6, 8, 9, 13) if assumed else (0, 1, 1, 2, 2, 3, 4, 6, 8, 9, 13)
    sizes = {name: size if p.dims == "fixed" else rng.choice(low) for name, size in SYMBOLS.items()}
    np_rng = np.random.default_rng(rng.randrange(1 << 40))
    call = {}
    for name, i in p.inputs.items():
        assert i.draw is not None
        call[name] = i.draw(np_rng, tuple(sizes[d] if isinstance(d, str) else int(d or 0) for d in i.dims))
    return call


def module_of(p: TorchCode) -> Any:
    """Return the module that runs a program."""
    scope: dict[str, Any] = {"torch": torch}
    exec(p.function("forward").replace("(m,", "(self,").replace("= m.", "= self."), scope)
    module = type("Generated", (torch.nn.Module,), {"forward": scope["forward"]})()
    for name, array in p.constants.items():
        module.register_buffer(name, tensor(array))
    return module


def exported(p: TorchCode) -> tuple[Any, str]:
    """Return the exported program, and how dims are declared: those that torch does not let be named are `Dim.AUTO`.

    Raises:
        Invalid: torch refuses the program.
    """
    args = tuple(tensor(p.calls[0][k]) for k in p.inputs)
    reason: Exception | None = None
    for kind in ("fixed",) if p.dims == "fixed" else ("named", "auto") if p.dims == "named" else ("auto",):
        axes = [{k: _declared(d, kind) for k, d in enumerate(i.dims) if isinstance(d, str)} for i in p.inputs.values()]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                shapes = None if kind == "fixed" else tuple(axes)
                return torch.export.export(module_of(p), args, dynamic_shapes=shapes, strict=False), kind
        except Exception as error:
            reason = error
    raise Invalid(f"not exported: {reason}")


def _declared(name: str, kind: str) -> Any:
    return torch.export.Dim.AUTO if kind == "auto" else torch.export.Dim(name, min=0, max=64)


class Exported:
    """The exported program, as torch runs it."""

    def __init__(self, p: TorchCode, program: Any) -> None:
        self.p, self.module = p, program.module()

    def results(self, call: Mapping[str, Array]) -> dict[str, Array]:
        values = self.module(*(tensor(call[k]) for k in self.p.inputs))
        return {n: np.array(v.numpy(), order="C") for n, v in zip(self.p.outputs, values, strict=True)}


def attempt(program: TorchCode, run: Run = interpreted, seed: int = 0) -> Outcome:
    """Export and import a program, run each call, and compare the results with those of the lines and of the exported program."""
    outcome = Outcome()
    try:
        source, kind = exported(program)
        oracle = Exported(program, source)
    except Exception as error:
        return Outcome("no program", str(error)[:300])
    calls: list[Expected | None] = []
    for call in program.calls:
        if kind == "auto" and any(
            isinstance(d, str) and size < 2
            for name, i in program.inputs.items()
            for d, size in zip(i.dims, call[name].shape, strict=True)
        ):
            calls.append(None)  # torch takes sizes to be at least 2
            continue
        try:
            calls.append(expected(program, call, oracle, seed))
        except Exception as error:
            calls.append(None)
            outcome.why = f"{type(error).__name__}: {error}"[:300]
    outcome.expected = calls
    if calls[0] is None:
        outcome.kind = "no oracle"
        return outcome

    def load() -> IRModule:
        plain = plain_program(source, False, {*SUPPORTED, *control.HANDLERS})
        outcome.operators = sorted({c.op for c in plain.nodes})
        return import_program(plain)

    return judged(program, outcome, load, run)


def operators() -> list[tuple[str, str]]:
    return [("", op) for op in (*SUPPORTED, *control.HANDLERS)]


def uncovered() -> list[str]:
    return []


def regression_test(program: TorchCode, why: str) -> str:
    """Return a program as the text of a test of `test_exported_programs.py`."""
    args = ", ".join(f"torch.tensor(np.{literal(program.calls[0][i])})" for i in program.inputs)
    dims = [{k: d for k, d in enumerate(i.dims) if isinstance(d, str)} for i in program.inputs.values()]
    constants = "".join(f", {c}=torch.tensor(np.{literal(a)})" for c, a in program.constants.items())
    body = program.function().replace("\n", "\n    ")
    return f'def test_program() -> None:\n    """{why[:100]}"""\n\n    {body}\n\n    compare(f, [{args}]{constants})  # {dims}\n'


def shown(program: TorchCode) -> str:
    values = program.runs(program.calls[0]).by_name
    return "\n".join(
        f"{k} {a.dtype}{a.shape} = {np.array2string(a, threshold=16, edgeitems=2)}" for k, a in values.items()
    )


def stored(program: TorchCode, folder: Path, name: str) -> Path:
    """Write a program as a test."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(regression_test(program, ""))
    return path
