"""One program as C functions: the numbers of a call, and the call itself.

Tests: `tests/tuner/export/test_c_export.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import numpy as np

from relax_tune.runtime.program.plan_c import slots_in_c
from relax_tune.runtime.program.program import CallSite, LaunchStep
from relax_tune.runtime.program.scalars import WIDTH, Opcode
from relax_tune.tuner.export.layout import Layout

_PLACEHOLDER = re.compile(r"\{(\d{1,6})\}")


class FunctionPrinter:
    """A printer of one program.

    Args:
        name: Prefix of the program's C functions.
        kernels: C name of each kernel.
    """

    def __init__(self, name: str, layout: Layout, kernels: Mapping[str, str]) -> None:
        self.name, self.layout, self.program, self.kernels = name, layout, layout.program, kernels
        self.code = layout.scalars.code
        self._values: dict[int, int] = {}
        self._pointers: dict[int, None] = {}

    @property
    def values(self) -> int:
        """The number of values that a call needs."""
        return len(self._values)

    def place_of(self, slot: int) -> int:
        """Return the place of a slot of the layout's list among the values of a call."""
        return self._values.setdefault(slot, len(self._values))

    def number(self, slot: int) -> str:
        """Return the C text of a slot of the layout's list."""
        opcode, operand = self.code[slot * WIDTH : slot * WIDTH + 2]
        return f"INT64_C({operand})" if opcode == Opcode.CONST else f"v[{self.place_of(slot)}]"

    def of_program(self, slot: int) -> str:
        """Return the C text of a slot of the program's list."""
        return self.number(self.layout.slots[slot])

    def array(self, index: int) -> str:
        """Return the C name of an array's address."""
        while (base := self.program.buffers[index].base) is not None:
            index = base
        self._pointers[index] = None
        return f"b{index}"

    def call(self) -> str:
        """Return the function that checks, launches and copies results."""
        body = [*self._checks(), *self._launches(), *self._ends()]
        pointers = [line for index in sorted(self._pointers) for line in self._pointer(index)]
        lines = [
            f"static int {self.name}_call(@NAME@ *m, const int64_t *v, const void *const *in, void *const *out) {{",
            "  (void)m, (void)v, (void)in, (void)out;",
            *pointers,
            *body,
            "  return 0;",
            "}",
        ]
        return "\n".join(lines)

    def _pointer(self, index: int) -> list[str]:
        place = self.layout.places[index]
        if place.kind == "in":
            return [f"  const void *const b{index} = in[{place.at}];"]
        if place.kind == "out":
            return [f"  void *const b{index} = out[{place.at}];"]
        if place.kind == "weights":
            return [f"  const void *const b{index} = m->weights + {place.at};"]
        if place.kind == "packed":
            return [f"  const void *const b{index} = m->packed + {place.at};"]
        return [f"  void *const b{index} = m->workspace + {self.number(place.at)};"]

    def _checks(self) -> list[str]:
        program, lines = self.program, list[str]()
        for check in program.checks:
            text, values = _format(check.message)
            numbers = "".join(f", {self.of_program(check.values[v])}" for v in values)
            lines.append(
                f"  if (!{self.of_program(check.slot)}) return fail(m, {c_text(program.name)} {text}{numbers});"
            )
        for position, index in enumerate(program.inputs):
            spec = program.buffers[index]
            if spec.fill.kind == "integers" and np.dtype(spec.dtype).kind in "iu":
                lines += self._range(
                    position, f"INT64_C({int(spec.fill.low)})", f"INT64_C({int(spec.fill.high)})", 1, 0
                )
        for r in program.ranges:
            position = program.inputs.index(r.buffer)
            lines += self._range(position, self.of_program(r.low), self.of_program(r.high), r.every, r.column)
        return lines

    def _range(self, position: int, low: str, high: str, every: int, column: int) -> list[str]:
        spec = self.program.buffers[self.program.inputs[position]]
        what = c_text(f"{self.program.name}: parameter {spec.name}")
        end = c_text(" of the array; do the inputs (token ids, say) belong to this model?")
        return self._outside(
            self.program.inputs[position], f"in[{position}]", (low, high, every, column),
            f'{what} ": expected values from %" PRId64 " to %" PRId64 ", which the model uses as indices, got %" PRId64 '
            f'" at element %" PRId64 {end}, {low}, {high} - 1',
        )  # fmt: skip

    def _outside(self, index: int, array: str, bounds: tuple[str, str, int, int], message: str) -> list[str]:
        """Return the check of an array's elements.

        Args:
            message: Format of the error; the offending value and its position follow as arguments.
        """
        low, high, every, column = bounds
        dtype = np.dtype(self.program.buffers[index].dtype)
        kind = f"'{dtype.char.replace('l', 'q').replace('L', 'Q').replace('?', 'B')}'"
        count = f"{self.number(self.layout.nbytes[index])} / {dtype.itemsize}"
        return [
            "  {",
            f"    const int64_t at = outside({array}, {kind}, {count}, {every}, {column}, {low}, {high});",
            f"    if (at >= 0) return fail(m, {message}, integer_at({array}, at, {kind}), at);",
            "  }",
        ]

    def _launches(self) -> list[str]:
        program, lines = self.program, list[str]()
        for index in self.layout.copied:
            position = program.inputs.index(index)
            size = self.number(self.layout.nbytes[index])
            lines.append(f"  copy({self.array(index)}, in[{position}], {size});")
        for call in program.calls:
            lines += self._site(call)
        return lines

    def _site(self, call: CallSite) -> list[str]:
        title = f"  /* {comment(call.name)} */"
        launches = [[f"{self.step(s)};" for s in variant.steps] for variant in call.variants]
        if len(launches) == 1:
            return [title, *(f"  {line}" for line in launches[0])]
        lines = [title, f"  switch ({self.of_program(call.choice)}) {{"]
        for number, (variant, steps) in enumerate(zip(call.variants, launches)):
            label = "default" if number == len(launches) - 1 else f"case {number}"
            lines += [f"    {label}: /* {comment(variant.label)} */", *(f"      {s}" for s in steps), "      break;"]
        return [*lines, "  }"]

    def step(self, step: LaunchStep) -> str:
        """Return the call of a kernel."""
        arguments = [*map(self.array, step.buffers), *map(self.of_program, step.scalars)]
        return f"{self.kernels[step.target]}({', '.join(arguments)})"

    def _ends(self) -> list[str]:
        program, lines = self.program, list[str]()
        for check in program.checked:
            size = self.of_program(check.size)
            what = c_text(f"{program.name}: {check.operator}: expected indices of at least 0 and below ")
            array = self.array(check.buffer)
            lines += self._outside(
                check.buffer, array, ("INT64_C(0)", size, check.every, check.column),
                f'{what} "%" PRId64 ", got %" PRId64 " at element %" PRId64 "; do the inputs belong to this model?", {size}',
            )  # fmt: skip
        for number, index in enumerate(program.outputs):
            place = self.layout.places[index]
            if (place.kind, place.at) != ("out", number):
                size = self.number(self.layout.nbytes[index])
                lines.append(f"  copy(out[{number}], {self.array(index)}, {size});")
        return lines

    def evaluation(self) -> str:
        """Return the function that computes the values of a call, after all texts that name one."""
        dims = {self.layout.slots[slot] for spec in self.program.buffers for slot in spec.shape}
        variable = sorted(slot for slot in dims if self.code[slot * WIDTH] != Opcode.CONST)
        lines = [
            f"static int32_t {self.name}_evaluate(const int64_t *symbols, int64_t *v) {{",
            *slots_in_c(self.code, [*self._values, *variable]),
            *(f"  v[{place}] = x{slot};" for slot, place in self._values.items()),
            f"  bad |= ({' | '.join(f'x{slot}' for slot in variable) or '0'}) < 0;",
            "  (void)symbols, (void)v;",
            "  return bad;",
            "}",
        ]
        return "\n".join(lines)


def comment(text: str) -> str:
    """Return a text that may stand in a C comment."""
    return text.replace("*/", "* /").replace("\n", " ")


def c_text(text: str) -> str:
    """Return a C format string that prints a text unchanged."""
    plain = json.dumps(text.replace("%", "%%"), ensure_ascii=False)
    return re.sub(r"\\u00([0-9a-f]{2})", lambda m: f'\\x{m[1]}""', plain).replace("??", "?\\?")


def _format(message: str) -> tuple[str, Sequence[int]]:
    """Return the format of a check's message, after its function's name, and the numbers of its values in order."""
    parts, values, at = [c_text(": ")], list[int](), 0
    for placeholder in _PLACEHOLDER.finditer(message):
        parts += [c_text(message[at : placeholder.start()]), '"%" PRId64']
        values.append(int(placeholder[1]))
        at = placeholder.end()
    return " ".join([*parts, c_text(message[at:])]), values
