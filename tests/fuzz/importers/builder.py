"""Builder of random ONNX programs: each node is evaluated as it is added, so that the next one knows what it reads."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import helper
from tests.fuzz.importers.formulas import MICROSOFT
from tests.fuzz.importers.program import Array, Dim, Draw, Input, Invalid, Program, evaluate
from tests.fuzz.importers.rounding import is_exact

from relax_tune.ir.frontend.onnx.file import names_read_by

F16, F32, F64 = (np.dtype(t) for t in ("f2", "f4", "f8"))
FLOATS = (F16, F32, F64)
SIGNED = tuple(np.dtype(t) for t in ("i1", "i2", "i4", "i8"))
UNSIGNED = tuple(np.dtype(t) for t in ("u1", "u2", "u4", "u8"))
INTS = SIGNED + UNSIGNED
BOOL = np.dtype(bool)
I32, I64 = np.dtype("i4"), np.dtype("i8")
NUMBERS = FLOATS + INTS
EVERY = (*NUMBERS, BOOL)
SIMPLIFIED = "SimplifiedLayerNormalization"
"""An operator that ONNX Runtime's optimizer writes in the standard domain, which does not define it."""
SIZES = (1, 2, 3, 3, 4, 5, 5, 7, 8)
MOST = 4000
"""Elements of a value."""
NAMES = ("v{}", "v.{}", "v:{}", "a/b_{}:0", "вход{}", "层{}", "{}", "v-{}", "_v_{}", "V{} ")
STYLES = ("plain", "plain", "plain", "small", "small", "edges", "halves", "mixed")
ONNX_TYPES = {f"tensor({n})": np.dtype(t) for n, t in (
    ("float16", "f2"), ("float", "f4"), ("double", "f8"), ("int8", "i1"), ("int16", "i2"), ("int32", "i4"), ("int64", "i8"),
    ("uint8", "u1"), ("uint16", "u2"), ("uint32", "u4"), ("uint64", "u8"), ("bool", "?"))}  # fmt: skip


@cache
def schema(op: str, opset: int, domain: str = "") -> Any:
    return onnx.defs.get_schema(op, opset, domain) if not domain else onnx.defs.get_schema(op, domain=domain)


@cache
def types_of(op: str, opset: int, position: int = 0, domain: str = "") -> tuple[np.dtype[Any], ...]:
    """Return the element types that the definition of an operator allows for an input."""
    if op == SIMPLIFIED:
        return (F32,)
    form = schema(op, opset, domain)
    inputs = form.inputs
    if not inputs:
        return ()
    name = inputs[min(position, len(inputs) - 1)].type_str
    allowed = {name.removeprefix("seq(").removeprefix("optional(")}
    for c in form.type_constraints:
        if c.type_param_str == name:
            allowed = set(c.allowed_type_strs)
    return tuple(t for n, t in ONNX_TYPES.items() if n in allowed)


def number_of(dtype: np.dtype[Any]) -> int:
    return int(helper.np_dtype_to_tensor_dtype(dtype))


def edge_values(dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "f":
        info = np.finfo(dtype)
        tiny, least, eps = float(info.smallest_normal), float(info.smallest_subnormal), float(info.eps)
        edges = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, float(info.max), float(info.min), tiny, -tiny, least, -least,
                 tiny - least, 1 + eps, 1 - eps / 2, 0.5, -0.5, 1.5, 2.5, 1 / 3, 1e4, -88.0, 88.0]  # fmt: skip
        with np.errstate(all="ignore"):
            return np.array(edges).astype(dtype)
    if dtype.kind == "b":
        return np.array([True, False])
    info_int = np.iinfo(dtype)
    edges_int = {int(info_int.min), int(info_int.max), 0, 1, int(info_int.max) // 2, int(info_int.max) - 1, 7}
    return np.array(sorted(edges_int | ({-1, -7} if dtype.kind == "i" else set())), dtype)


def numbers(style: str, dtype: np.dtype[Any]) -> Draw:
    """Return a maker of arrays in a style."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        if dtype.kind == "b":
            return np.asarray(rng.random(shape) < 0.5)
        if style == "edges" or style == "mixed":
            edges = rng.choice(edge_values(dtype), shape)
            plain = numbers("plain", dtype)(rng, shape)
            return np.asarray(np.where(rng.random(shape) < (0.9 if style == "edges" else 0.15), edges, plain)).astype(
                dtype
            )
        if dtype.kind == "f":
            if style == "small":
                return np.asarray(rng.integers(-6, 7, shape)).astype(dtype)
            if style == "halves":
                return np.asarray(rng.integers(-13, 14, shape) / 2 + 0.0).astype(dtype)
            return np.asarray(rng.standard_normal(shape) * rng.choice([1.0, 1.0, 3.0, 20.0])).astype(dtype)
        low = -9 if dtype.kind == "i" else 0
        return np.asarray(rng.integers(low, 10, shape)).astype(dtype)

    return draw


def within(low: float, high: float, dtype: np.dtype[Any]) -> Draw:
    """Return a maker of numbers in `low <= x < high`, of integers or floats."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        if dtype.kind == "f":
            return np.asarray(low + (high - low) * rng.random(shape)).astype(dtype)
        return np.asarray(rng.integers(int(low), max(int(low) + 1, int(high)), shape)).astype(dtype)

    return draw


SINCE = {"LabelEncoder": 2, "TreeEnsembleRegressor": 3, "TreeEnsembleClassifier": 3, "TreeEnsemble": 5}
"""Versions of other domains by operator, where not 1."""


class Builder:
    """A program that grows. Values are concrete; `kinds` are the values by name."""

    def __init__(self, rng: random.Random, opset: int) -> None:
        self.rng, self.np_rng = rng, np.random.default_rng(rng.randrange(1 << 40))
        self.p = Program(opset)
        self.values: dict[str, Any] = {}
        self.form = rng.choice(NAMES)
        self.style = rng.choice(STYLES)
        self.fixed_sizes = rng.random() < 0.15
        self.large = rng.random() < 0.04
        self.zeros = rng.random() < 0.12
        self.uses: list[str] = []
        self.inexact: set[str] = set()

    @property
    def opset(self) -> int:
        return self.p.opset

    # choices

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def choose(self, items: Sequence[Any]) -> Any:
        return self.rng.choice(items)

    def size(self, low: int = 0, high: int = 8) -> int:
        if self.zeros and low == 0 and self.chance(0.2):
            return 0
        known = [
            d for v in self.values.values() if isinstance(v, np.ndarray) for d in v.shape if low <= d <= high and d
        ]
        if known and self.chance(0.5):
            return int(self.choose(known))
        if self.large and self.chance(0.2) and high == 8:
            return int(self.choose((13, 17, 31, 41)))
        return int(self.choose([s for s in SIZES if low <= s <= high]))

    def shape(self, rank: int | None = None, low: int = 0, most: int = 4) -> tuple[int, ...]:
        rank = self.choose((0, 1, 1, 2, 2, 2, 3, 3, 4)[: 2 * most + 1]) if rank is None else rank
        result = tuple(self.size(low) for _ in range(rank))
        while int(np.prod(result)) > MOST:
            result = tuple(min(d, 3) for d in result)
        return result

    def axis(self, rank: int) -> int:
        """Return an axis, also counted from the end."""
        return int(self.rng.randrange(-rank, rank))

    def dtype(
        self, op: str, position: int = 0, among: Iterable[np.dtype[Any]] = EVERY, domain: str = ""
    ) -> np.dtype[Any]:
        """Return an element type that an input may have; float32 half of the time."""
        allowed = [t for t in types_of(op, self.opset, position, domain) if t in tuple(among)]
        if not allowed:
            raise Invalid(f"{op}: no type")
        return F32 if F32 in allowed and self.chance(0.45) else self.choose(allowed)

    # values

    def name(self) -> str:
        name = self.form.format(len(self.values))
        while name in self.values:
            name += "_"
        return name

    def given(
        self, shape: Sequence[int], dtype: np.dtype[Any] = F32, draw: Draw | None = None, constant: bool | None = None
    ) -> str:
        """Return a new input or constant. draw: makes its values, also at another call."""
        draw = draw or numbers(self.style if self.chance(0.8) else self.choose(STYLES), dtype)
        name, array = self.name(), draw(self.np_rng, tuple(shape))
        assert array.dtype == dtype, f"expected {dtype}, got {array.dtype}"
        self.values[name] = array
        if constant if constant is not None else self.chance(0.25):
            self.p.constants[name] = array
        else:
            self.p.inputs[name] = Input(dtype, tuple(shape), draw)
        return name

    def ints(self, values: Any, constant: bool | None = None, dtype: np.dtype[Any] = I64) -> str:
        """Return integers that decide a shape: constants, but for a few that are fixed inputs."""
        return self.literal(np.asarray(values, dtype), constant)

    def literal(self, array: Array, constant: bool | None = True) -> str:
        """Return a constant, or an input whose values are fixed."""
        name, array = self.name(), np.asarray(array)
        self.values[name] = array
        if constant is False:
            self.p.inputs[name] = Input(array.dtype, array.shape, None)
        else:
            self.p.constants[name] = array
        return name

    def get(self, name: str) -> Array:
        value = self.values[name]
        assert isinstance(value, np.ndarray)
        return value

    def existing(
        self, dtypes: Sequence[np.dtype[Any]], rank: int | None = None, low: int = 0, least: int = 0
    ) -> str | None:
        """Return a value with one of the types, at least `least` dims, each at least `low`; the newest most often."""
        names = [
            n
            for n, v in self.values.items()
            if isinstance(v, np.ndarray)
            and v.dtype in dtypes
            and (rank is None or v.ndim == rank)
            and v.ndim >= least
            and min(v.shape, default=low) >= low
        ]
        if not names:
            return None
        return str(names[-1] if self.chance(0.6) else self.choose(names))

    def x(
        self, op: str, rank: int | None = None, low: int = 0, least: int = 0, among: Iterable[np.dtype[Any]] = EVERY,
        position: int = 0, domain: str = "", shape: Sequence[int] | None = None, draw: Draw | None = None,
    ) -> str:  # fmt: skip
        """Return an operand of an operator: an earlier value or a new one."""
        allowed = [t for t in types_of(op, self.opset, position, domain) if t in tuple(among)]
        if shape is None and draw is None and self.chance(0.85):
            name = self.existing(allowed, rank, low, least)
            if name is not None:
                return name
        dims = tuple(shape) if shape is not None else self.shape(rank, low)
        while shape is None and len(dims) < least:
            dims = (*dims, self.size(low))
        return self.given(dims, self.dtype(op, position, among, domain), draw)

    def mate(self, x: str, draw: Draw | None = None) -> str:
        """Return a value of the type of `x` that broadcasts with it."""
        a = self.get(x)
        if draw is None and self.chance(0.5):
            names = [
                n
                for n, v in self.values.items()
                if isinstance(v, np.ndarray) and v.dtype == a.dtype and broadcasts(v.shape, a.shape)
            ]
            if names:
                return str(self.choose(names))
        shape = list(a.shape)
        form = self.choose(("scalar", "same", "part", "one", "more"))
        if form in ("scalar", "one"):
            shape = [1] * (form == "one")
        if form == "part":
            shape = [d if self.chance(0.6) else 1 for d in shape][self.rng.randrange(len(shape) + 1) :]
        if form == "more" and len(shape) < 4:
            shape = [self.size(1), *[d if d != 1 else self.size(1) for d in shape]]
            if int(np.prod(shape)) > MOST:
                shape = list(a.shape)
        return self.given(
            shape, a.dtype, draw, constant=True if form in ("scalar", "one") and self.chance(0.7) else None
        )

    # nodes

    def node(self, op: str, inputs: Sequence[str], outputs: int = 1, domain: str = "", **attributes: Any) -> list[str]:
        """Add a node and return its results. Raises Invalid where no oracle evaluates it."""
        names: list[str] = []
        for k in range(outputs):
            name = self.form.format(len(self.values) + k)
            while name in self.values or name in names:
                name += "_"
            names.append(name)
        return self.named_node(op, inputs, names, domain, **attributes)

    def named_node(
        self, op: str, inputs: Sequence[str], names: list[str], domain: str = "", **attributes: Any
    ) -> list[str]:
        """Add a node whose results have the given names; "" for an omitted one. Raises Invalid as `node` does."""
        proto = helper.make_node(
            op, list(inputs), names, domain=domain, **{k: v for k, v in attributes.items() if v is not None}
        )
        given = {name: self.values[name] for name in sorted(names_read_by(proto))}
        if domain:
            version = max(self.p.domains.get(domain, 1), SINCE.get(op, 1))
            others = {op, *(n.op_type for n in self.p.nodes if n.domain == domain)} if domain != MICROSOFT else ()
            for other in others:
                if onnx.defs.get_schema(other, version, domain).deprecated:
                    raise Invalid(f"{other}: deprecated at version {version}")
            self.p.domains = {**self.p.domains, domain: version}
        if not domain:
            for position, i in enumerate(inputs):
                value = self.values.get(i)
                if isinstance(value, np.ndarray) and value.dtype not in types_of(op, self.opset, position):
                    raise Invalid(f"{op}: {value.dtype}")
        results, _ = evaluate(proto, given, self.opset, self.p.domains)
        for value in results:
            if isinstance(value, np.ndarray) and (value.size > 4 * MOST or value.dtype not in EVERY):
                raise Invalid(f"{op}: {value.dtype}{value.shape}")
        made = {name: r for name, r in zip(names, results, strict=True) if name}
        if not (is_exact(proto, given, results) and self.inexact.isdisjoint(given)):
            self.inexact |= {*made}
        self.p.nodes.append(proto)
        self.uses.append(f"{domain}.{op}" if domain else op)
        self.values.update(made)
        return names

    # the whole

    def finish(self) -> Program:
        """Return the program with declared dims, outputs and its first call."""
        made = [n for node in self.p.nodes for n in node.output if n and isinstance(self.values.get(n), np.ndarray)]
        read = {i for node in self.p.nodes for i in names_read_by(node)}
        ends = [n for n in made if n not in read]
        inner = [n for n in made if n in read and self.chance(0.15)]
        self.p.outputs = [*ends, *inner][-5:]
        program = self.p.needed()
        program.calls = [{n: self.values[n] for n in program.inputs}]
        declare(program, self.rng)
        return program


def broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    try:
        return int(np.prod(np.broadcast_shapes(tuple(a), tuple(b)))) <= MOST
    except ValueError:
        return False


def declare(program: Program, rng: random.Random) -> None:
    """Declare dims of inputs: as numbers, or symbols that are tied by size, separate or unnamed."""
    style = rng.choice(("fixed", "tied", "tied", "mixed", "mixed", "mixed", "unnamed"))
    symbols = rng.choice(("n{}", "batch_{}", "d-{}", "размер{}", "N{}"))
    wrong, known = rng.random() < 0.02, rng.random() < 0.8
    for name, i in program.inputs.items():
        shape = program.calls[0][name].shape
        dims: list[Dim] = []
        for axis, size in enumerate(shape):
            kind = style if style != "mixed" else rng.choice(("fixed", "tied", "separate", "unnamed", "placeholder"))
            # an input with fixed values decides sizes
            stated = i.draw is None or (known and size in program.stated)
            kind = "fixed" if stated or (size == 0 and kind in ("unnamed", "placeholder")) else kind
            if kind == "fixed":
                dims.append(size)
            elif kind == "tied":
                dims.append(symbols.format(0 if wrong else size))
            elif kind == "separate":
                dims.append(f"{symbols.format(size)}_{len(program.inputs)}{axis}_{list(program.inputs).index(name)}")
            else:
                dims.append(None if kind == "unnamed" else rng.choice(("?", "None", "unk__0")))
        program.inputs[name] = Input(i.dtype, tuple(dims), i.draw)
    sizes: dict[str, int] = {}
    for name, i in program.inputs.items():
        for d, size in zip(i.dims, program.calls[0][name].shape, strict=True):
            if isinstance(d, str) and d not in ("?", "None", "unk__0"):
                program.wrongly_tied |= sizes.setdefault(d, size) != size


def another_call(program: Program, rng: random.Random) -> dict[str, Array] | None:
    """Return arguments of other sizes where dims are symbols; None where nothing can change."""
    fixed: set[int] = {1} if rng.random() < 0.7 else set()
    free: set[int] = set()
    for name, i in program.inputs.items():
        for d, size in zip(i.dims, program.calls[0][name].shape, strict=True):
            (fixed if isinstance(d, int) else free).add(size)
    fixed |= {d for a in program.constants.values() for d in a.shape} | program.stated
    sizes = {
        s: int(rng.choice((s + 1, s + 2, 2 * s, 11, 1, max(1, s - 1)))) if s in free - fixed else s
        for s in fixed | free
    }
    call = {}
    generator = np.random.default_rng(rng.randrange(1 << 40))
    for name, i in program.inputs.items():
        first = program.calls[0][name]
        shape = tuple(sizes[d] for d in first.shape)
        if (i.draw is None and shape != first.shape) or int(np.prod(shape)) > 4 * MOST:
            return None
        call[name] = first if i.draw is None else i.draw(generator, shape)
    return call
