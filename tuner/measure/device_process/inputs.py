"""Random inputs and constants of a program, equal in both processes and for every variant of a task.

Each buffer has a separate random stream, keyed by (seed, buffer name) only. So all candidates of a task get the same data regardless
of the order, roles and additional buffers of their programs, and the tuner computes its reference from the data of the device process.

Tests: `tests/tuner/measure/test_codec.py`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import UserError
from relax_tune.runtime.program.program import BufferSpec, Fill, Program
from relax_tune.runtime.program.scalars import constant_values, evaluate


def random_array(name: str, dtype: str, shape: tuple[int, ...], fill: Fill, seed: int) -> NDArray[Any]:
    """Return the contents of the buffer `name` under `seed`: a C-contiguous array of `dtype` and `shape`.

    `normal` is standard normal times `fill.high` (rounded for integers, its sign for bool); `integers` is uniform in
    [fill.low, fill.high), and `low` where that is empty; `offsets` increase from 0 by
    integers of mean `fill.high`, up to the largest value of the type.
    """
    # Not Python's `hash`, which differs between processes. Philox (Salmon et al., 2011) has an independent stream for
    # each key.
    key = int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest(), "little")
    generator = np.random.Generator(np.random.Philox(key=key))
    element = np.dtype(dtype)
    count = math.prod(shape)
    if fill.kind == "integers":
        low, high = math.ceil(fill.low), math.ceil(fill.high)
        values: NDArray[Any] = generator.integers(low, max(high, low + 1), size=count, dtype=np.int64)
    elif fill.kind == "offsets":
        most = np.iinfo(element).max if element.kind in "iu" else 1 << 24
        steps = generator.integers(0, 2 * math.ceil(fill.high), size=count, dtype=np.int64, endpoint=True)
        values = np.minimum(np.cumsum(steps) - steps[:1].sum(), most)
    elif element == np.float64:
        values = generator.standard_normal(count) * fill.high
    else:
        values = generator.standard_normal(count, dtype=np.float32) * np.float32(fill.high)
    if element == np.bool_:
        values = values > 0
    elif element.kind in "iu" and values.dtype.kind == "f":
        values = np.rint(values)
    return values.astype(element, copy=False).reshape(shape)


def symbol_values(program: Program, symbols: Mapping[str, int]) -> tuple[int, ...]:
    """Return the values in the program's order. Raises UserError for a missing, unknown or out-of-bounds symbol."""
    names = [symbol.name for symbol in program.symbols]
    if set(names) != set(symbols):
        raise UserError(
            f"expected values for the symbols {sorted(names)} of {program.name!r}, got {sorted(symbols)}; "
            "give each symbol exactly one value"
        )
    for symbol in program.symbols:
        value = symbols[symbol.name]
        if value < symbol.lower or (symbol.upper is not None and value > symbol.upper):
            upper = "" if symbol.upper is None else f" <= {symbol.upper}"
            raise UserError(
                f"expected {symbol.lower} <= {symbol.name}{upper} for {program.name!r}, got {value}; "
                "measure inside the declared bounds"
            )
    return tuple(int(symbols[name]) for name in names)


def buffer_shapes(program: Program, symbols: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    """Return the shape of every buffer at this symbol binding. Raises UserError as `symbol_values` does."""
    slots = evaluate(program.scalars, symbol_values(program, symbols))
    return tuple(tuple(slots[slot] for slot in buffer.shape) for buffer in program.buffers)


def random_inputs(program: Program, symbols: Mapping[str, int], seed: int) -> tuple[NDArray[Any], ...]:
    """Return the program's inputs at this symbol binding, in call order. Raises UserError as `symbol_values` does."""
    shapes = buffer_shapes(program, symbols)
    return tuple(_contents(program.buffers[index], shapes[index], seed) for index in program.inputs)


def constant_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    """Return the shape of every constant, by name. Raises UserError when one depends on a symbol."""
    slots = constant_values(program.scalars, len(program.symbols))
    shapes: dict[str, tuple[int, ...]] = {}
    for buffer in program.buffers:
        if buffer.role != "const":
            continue
        sizes = [slots[slot] for slot in buffer.shape]
        if any(size is None for size in sizes):
            raise UserError(
                f"expected a fixed shape for the constant {buffer.name!r} of {program.name!r}, got one that depends "
                "on a symbol; make it an input"
            )
        shapes[buffer.name] = tuple(size for size in sizes if size is not None)
    return shapes


def random_constants(program: Program, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return the program's constants by name. Raises UserError when a constant's shape depends on a symbol."""
    shapes = constant_shapes(program)
    return {
        buffer.name: _contents(buffer, shapes[buffer.name], seed)
        for buffer in program.buffers
        if buffer.role == "const"
    }


def _contents(buffer: BufferSpec, shape: tuple[int, ...], seed: int) -> NDArray[Any]:
    return random_array(buffer.name, buffer.dtype, shape, buffer.fill, seed)
