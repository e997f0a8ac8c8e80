"""Launches of the C device: calls of kernels through ctypes, and loops in C over many of them.

Tests: `tests/runtime/device/test_device_contract.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_tune.runtime.device.base import Launch

_MOST_ARGUMENTS = 48
"""Arguments of a kernel that the loop over launches can call; more are called one by one."""
LAUNCHES = f"""#include <stdint.h>
void relax_tune_launches(const int64_t* rows, int64_t count) {{
  for (int64_t n = 0; n < count; ++n, rows += 3) {{
    const int64_t* const* cells = (const int64_t* const*)rows[2];
    int64_t a[{_MOST_ARGUMENTS}];
    for (int64_t i = 0; i < rows[1]; ++i) a[i] = *cells[i];
    switch (rows[1]) {{
{
    "".join(
        f"      case {n}: ((void (*)({', '.join(['int64_t'] * n)}))rows[0])({', '.join(f'a[{i}]' for i in range(n))}); break;{chr(10)}"
        for n in range(1, _MOST_ARGUMENTS + 1)
    )
}    }}
  }}
}}
"""
REPEAT = """#include <stdint.h>
void relax_tune_launches(const int64_t* rows, int64_t count);
void relax_tune_repeat(const int64_t* rows, int64_t launches, int64_t steps, const int64_t* table, const int64_t* cells,
                       int64_t width, const int64_t* moves, int64_t count) {
  int64_t next[count > 0 ? count : 1];
  for (int64_t n = 0; n < steps; ++n, table += width) {
    for (int64_t i = 0; i < width; ++i) *(int64_t*)cells[i] = table[i];
    relax_tune_launches(rows, launches);
    for (int64_t i = 0; i < count; ++i) next[i] = *(const int64_t*)moves[3 * i + 1] + moves[3 * i + 2];
    for (int64_t i = 0; i < count; ++i) *(int64_t*)moves[3 * i] = next[i];
  }
}
"""
ADVANCE = """#include <stdint.h>
#include <string.h>
struct advance {
  const int64_t* code;
  int64_t* symbols;
  const int64_t* moves;
  int64_t *v, *numbers, slots, count, first;
};
int64_t relax_tune_advance(const struct advance* given) {
  const int64_t *code = given->code, *moves = given->moves, slots = given->slots, count = given->count;
  int64_t *symbols = given->symbols, *v = given->v, *numbers = given->numbers;
  for (int64_t i = 0; i < count; ++i) symbols[moves[2 * i]] = numbers[moves[2 * i + 1]];
  for (int64_t slot = 0; slot < slots; ++slot, code += 4) {
    const int64_t op = code[0], x = op > 1 ? v[code[1]] : 0, y = op > 1 ? v[code[2]] : 0;
    int64_t r = 0;
    switch (op) {
      case 0: r = code[1]; break;
      case 1: r = symbols[code[1]]; break;
      case 2: if (__builtin_add_overflow(x, y, &r)) return 0; break;
      case 3: if (__builtin_sub_overflow(x, y, &r)) return 0; break;
      case 4: if (__builtin_mul_overflow(x, y, &r)) return 0; break;
      case 5: if (y == 0 || (y == -1 && x == INT64_MIN)) return 0; r = x / y - (x % y != 0 && (x ^ y) < 0); break;
      case 6: if (y == 0) return 0; r = y == -1 ? 0 : x % y; if (r != 0 && (r ^ y) < 0) r += y; break;
      case 7: r = x < y ? x : y; break;
      case 8: r = x > y ? x : y; break;
      case 9: r = x < y; break;
      case 10: r = x <= y; break;
      case 11: r = x == y; break;
      case 12: r = x != y; break;
      case 13: r = x != 0 && y != 0; break;
      case 14: r = x != 0 || y != 0; break;
      case 15: r = x == 0; break;
      case 16: r = x != 0 ? y : v[code[3]]; break;
      default: return 0;
    }
    v[slot] = r;
  }
  if (slots == 0 || v[slots - 1] == 0) return 0;
  memcpy(numbers, v, given->first * sizeof *v);
  return 1;
}
"""


class KernelLaunch(partial[None]):
    """A launch of a kernel through ctypes, which says what a loop in C needs to do the same."""

    @cached_property
    def row(self) -> tuple[int, int, int]:
        """The kernel's address, the number of arguments, and the address of the addresses of their values, which may change."""
        self._cells = (ctypes.c_void_p * len(self.args))(*map(ctypes.addressof, self.args))
        function: Any = self.func
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        return address, len(self.args), ctypes.addressof(self._cells)


def joined(loop: Any, launches: Sequence[Launch]) -> list[Launch]:
    """Return launches that do the same, each run of several kernels as one call of `relax_tune_launches`."""
    fewer: list[Launch] = []
    for together, run in groupby(launches, _can_join):
        own = list(run)
        if not together or len(own) == 1:
            fewer += own
            continue
        rows = _rows(own)
        fewer.append(partial(_call_loop, loop, _address(rows), ctypes.c_int64(len(own)), (rows, own)))
    return fewer


def repeated(
    loop: Any, launches: Sequence[Launch], cells: NDArray[np.int64], moves: NDArray[np.int64]
) -> Callable[[NDArray[np.int64]], None] | None:
    """Return a function that calls `relax_tune_repeat`; see `RepeatsLaunches`."""
    if not launches or not all(map(_can_join, launches)):
        return None
    rows = _rows(launches)
    head = (_address(rows), ctypes.c_int64(len(launches)))
    tail = (_address(cells), ctypes.c_int64(len(cells)), _address(moves), ctypes.c_int64(len(moves)))
    alive = (rows, launches, cells, moves)  # what the addresses point to

    def run(table: NDArray[np.int64], _: object = alive) -> None:
        loop(*head, ctypes.c_int64(len(table)), _address(table), *tail)

    return run


def advances(
    function: Any,
    code: NDArray[np.int64],
    symbols: NDArray[np.int64],
    moves: NDArray[np.int64],
    numbers: NDArray[np.int64],
) -> Callable[[], bool]:
    """Return a function that calls `relax_tune_advance`; see `JoinsLaunches`."""
    values = np.zeros(len(code) // 4, np.int64)
    arrays = (code, symbols, moves, values, numbers)
    # In one block: after a step, every object that a call looks at has to be fetched from memory.
    given = np.array(
        [*(_address(array).value or 0 for array in arrays), len(values), len(moves), len(numbers)], np.int64
    )
    address = _address(given)

    def advance(_: object = (given, arrays)) -> bool:
        return bool(function(address))

    return advance


def _rows(launches: Sequence[Launch]) -> NDArray[np.int64]:
    """Return what the loop over launches reads: addresses of arguments and not their values, which may change between calls."""
    return np.array([launch.row for launch in launches if isinstance(launch, KernelLaunch)], np.int64)


def _address(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(int(array.__array_interface__["data"][0]))


def _can_join(launch: Launch) -> bool:
    return isinstance(launch, KernelLaunch) and 0 < len(launch.args) <= _MOST_ARGUMENTS


def _call_loop(loop: Any, rows: ctypes.c_void_p, count: ctypes.c_int64, _: object) -> None:
    """Call the loop over launches; the last argument keeps alive what its rows point to."""
    loop(rows, count)


def call_all(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch()
