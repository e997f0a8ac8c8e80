"""Export of an artifact as C: sources, a header, the weights and what builds them.

Kernels, plans and places of arrays are the same as in the artifact. With the same compiler and flags, results are bit-identical to
the artifact's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relax_tune.errors import ArtifactError, UserError
from relax_tune.runtime.artifact import Artifact
from relax_tune.runtime.atomic_write import reason, write_whole
from relax_tune.runtime.device.c_compiler import KERNEL_FLAGS, TEAM, UNIT_KERNELS
from relax_tune.runtime.device.source import group_by_flags, join_sources
from relax_tune.runtime.hashed_zip import tool_version
from relax_tune.runtime.program.host_program import Apply, Branch, CallHostProgram, CallHostRoutine, HostProgram, Repeat
from relax_tune.runtime.program.plan_c import PRELUDE
from relax_tune.runtime.program.program import SIZE_LIMIT, KernelSource, LaunchStep, Program
from relax_tune.runtime.program.scalars import constant_values
from relax_tune.runtime.signature import tensor_specs
from relax_tune.tuner.export.c_function import FunctionPrinter, c_text, comment
from relax_tune.tuner.export.layout import ALIGNMENT, ArrayPlace, lay_out, workspace_bound
from relax_tune.tuner.processors import machine_flags

HEADER_BYTES = 64
MAGIC = b"RTWEIGHT"
_WASM_PAGE, _WASM_SPARE = 1 << 16, 64 << 20
_TEMPLATES = Path(__file__).parent / "templates"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,59}")
_KEYWORDS = frozenset(
    re.findall(
        r"\w+",
        "auto break case char const continue default do double else enum extern float for goto if inline int long register restrict "
        "return short signed sizeof static struct switch typedef union unsigned void volatile while bool true false class new delete "
        "this template try catch throw namespace using public private protected operator friend virtual and or not xor",
    )
) | {"model", "symbols", "inputs", "outputs"}
"""Words of C and C++, and names in the header."""
_TYPES = {
    "bool": "uint8_t", "float32": "float", "float64": "double", "float16": "uint16_t", "bfloat16": "uint16_t",
    **{f"{sign}int{bits}": f"{sign}int{bits}_t" for bits in (8, 16, 32, 64) for sign in ("", "u")},
}  # fmt: skip
"""C types of elements; elements of other types are bytes."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    Attributes:
        files: Names of the written files.
        sources: C files of the library, each with its extra compiler flags.
        functions: Names of the functions.
        nbytes: Size of sources and weights together.
    """

    files: tuple[str, ...]
    sources: Mapping[str, tuple[str, ...]]
    functions: tuple[str, ...]
    nbytes: int


def export_c(artifact: Artifact, folder: Path, name: str | None = None, functions: Sequence[str] = ()) -> Exported:
    """Write the C form of an artifact's functions to a folder.

    Args:
        name: Prefix of all names in C; by default the artifact's file name.
        functions: Functions to export; by default all.

    Raises:
        UserError: C cannot express the artifact or a function, or the name is no identifier.
        ArtifactError: A kernel has an unknown form.
    """
    programs = _chosen(artifact, functions)
    stem = re.sub(r"\W", "_", Path(artifact.path).stem, flags=re.ASCII) or "model"
    chosen = name or (stem if stem[0].isalpha() else f"m{stem}")
    if not _NAME.fullmatch(chosen):
        raise UserError(
            f"--name {chosen!r:.80}: expected letters, digits and _, a letter first, at most 60; give another"
        )
    project = _Project(artifact, programs, chosen)
    contents = project.files()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, data in contents.items():
            write_whole(folder / file, memoryview(data))
    except (OSError, ValueError) as error:
        raise UserError(f"--c {folder}: cannot be written: {reason(error)}; give another folder") from None
    return Exported(tuple(contents), project.sources, tuple(p.name for p in programs), sum(map(len, contents.values())))


def _chosen(artifact: Artifact, functions: Sequence[str]) -> tuple[Program, ...]:
    if artifact.device_kind != "c":
        raise UserError(
            f"artifact {artifact.path}: expected one of target c, got one of {artifact.device_kind}; build it with --target c"
        )
    unknown = [f for f in functions if f not in artifact.functions]
    if unknown:
        raise UserError(
            f"--function {unknown[0]!r:.80}: expected one of {', '.join(artifact.functions)}, which {artifact.path} has"
        )
    chosen = [f for f in artifact.functions if f in functions or not functions]
    hosted = {h.name: h for h in artifact.host_programs}
    for f in chosen:
        if f in hosted:
            others = [x for x in artifact.functions if x not in hosted]
            instead = (
                f"leave it out with --function {others[0]}" if others else "export its straight parts as functions"
            )
            raise UserError(
                f"function {f}: expected one without branches, calls and sizes that data decide, but it "
                f"{_obstacle(hosted[f])}; {instead}, and write what it decides in C"
            )
    programs = tuple(p for p in artifact.programs if p.name in chosen)
    for program in programs:
        _check_libraries(program)
    return programs


def _obstacle(host_program: HostProgram) -> str:
    """Return what a host program does that a program does not."""
    instructions = list(host_program.instructions())
    texts = [f"calls the host routine {i.routine!r}" for i in instructions if isinstance(i, CallHostRoutine)]
    texts += [f"computes {i.operator}, whose size data decide" for i in instructions if isinstance(i, Apply)]
    texts += ["branches" for i in instructions if isinstance(i, Branch)]
    texts += ["loops" for i in instructions if isinstance(i, Repeat)]
    texts += [f"calls {i.function or 'a function'}" for i in instructions if isinstance(i, CallHostProgram)]
    return texts[0] if texts else "is run by the virtual machine"


def _check_libraries(program: Program) -> None:
    steps = [(c.name, s) for c in program.calls for v in c.variants for s in v.steps]
    calls = [
        (name, s.target) for name, s in (*steps, *(("a packing", s) for s in program.prepare)) if s.kind == "library"
    ]
    if calls:
        names, routines = sorted({name for name, _ in calls}), sorted({target for _, target in calls})
        raise UserError(
            f"function {program.name}: expected only kernels, got {', '.join(routines)} in {len(names)} calls, {names[0]} first; "
            "build the model with --no-libraries, which takes the fastest kernel of ours for each"
        )


class _Project:
    """The files of an export. `name` is the prefix of all names in C."""

    def __init__(self, artifact: Artifact, programs: Sequence[Program], name: str) -> None:
        self.artifact, self.programs, self.name = artifact, programs, name
        self.kernels: dict[KernelSource, str] = {}
        self.prototypes: dict[str, str] = {}
        self.kernel_names = [self._kernel_names(p) for p in programs]
        self.weights, self.identity, offsets = _weights(artifact, programs)
        self.packed_bytes = 0
        self.prepared: list[str] = []
        packed_places: dict[object, ArrayPlace] = {}
        self.layouts = [
            lay_out(p, self._fixed(p, offsets, packed_places, names), self._written(p, names))
            for p, names in zip(programs, self.kernel_names)
        ]
        functions = _identifiers([p.name for p in programs])
        self.printers = [
            FunctionPrinter(f"f{i}", x, k) for i, (x, k) in enumerate(zip(self.layouts, self.kernel_names))
        ]
        self.functions = functions
        self.sources: dict[str, tuple[str, ...]] = {f"{name}.c": ()}

    def files(self) -> dict[str, bytes]:
        """Return the contents of all files."""
        units = [
            (group[at : at + UNIT_KERNELS], flags)
            for flags, group in group_by_flags(self.kernels).items()
            for at in range(0, len(group), UNIT_KERNELS)
        ]
        sources = {f"{self.name}_kernels{i}.c": self._unit(kernels) for i, (kernels, _) in enumerate(units)}
        self.sources |= {file: flags for file, (_, flags) in zip(sources, units)}
        own = "".join(
            f'set_source_files_properties({file} PROPERTIES COMPILE_OPTIONS "{";".join(flags)}")\n'
            for file, (_, flags) in zip(sources, units)
            if flags
        )
        body = self._body()
        words = self._words() | {"KERNEL_FILES": " ".join(sources), "OWN_FLAGS": own} | body
        texts = {
            f"{self.name}.h": "model.h", f"{self.name}.c": "model.c", f"{self.name}_internal.h": "internal.h",
            f"{self.name}_weights.c": "weights.c", f"{self.name}_team.c": "team.c",
            f"{self.name}_main.c": "main.c", f"{self.name}.pc.in": "model.pc.in", "CMakeLists.txt": "CMakeLists.txt",
        }  # fmt: skip
        filled = {file: _filled((_TEMPLATES / template).read_text(), words) for file, template in texts.items()}
        every = {file: text.encode() for file, text in {**filled, **sources}.items()}
        return every | {f"{self.name}.weights": self.weights}

    def _words(self) -> dict[str, str]:
        bounds = [workspace_bound(x) for x in self.layouts]
        memory_bytes = len(self.weights) + self.packed_bytes + max(bounds)
        fingerprint = self.artifact.manifest["extra"].get("fingerprint")
        return {
            "NAME": self.name,
            "TITLE": comment(", ".join(p.name for p in self.programs))[:200],
            "VERSION": tool_version(),
            "ARTIFACT": comment(Path(self.artifact.path).name or "an artifact"),
            "COUNT": str(len(self.programs)),
            "ENUM": ", ".join(f"{self.name}_number_of_{f} = {i}" for i, f in enumerate(self.functions)),
            "WEIGHTS_BYTES": str(len(self.weights)),
            "PACKED_BYTES": str(self.packed_bytes),
            "WORKSPACE_BYTES": str(max(bounds)),
            "WASM_BYTES": str(-(-memory_bytes // _WASM_PAGE) * _WASM_PAGE + _WASM_SPARE),
            "IDENTITY": ", ".join(map(str, self.identity)),
            "PLAN_ARITHMETIC": PRELUDE,
            "PROTOTYPES": "\n".join(f"{p};" for p in self.prototypes.values()),
            "FLAGS": " ".join(KERNEL_FLAGS),
            "TEAM_SOURCE": TEAM.read_text(encoding="utf-8"),
            "MACHINE": machine_flags(fingerprint if isinstance(fingerprint, dict) else {}),
        }

    def _body(self) -> dict[str, str]:
        """Return the parts of the model's file that depend on its functions."""
        calls = [p.call() for p in self.printers]
        texts, rows = list[str](), list[str]()
        for i, (layout, printer) in enumerate(zip(self.layouts, self.printers)):
            program = layout.program
            crossing = [*program.inputs, *program.outputs]
            dims = [printer.place_of(layout.slots[s]) for index in crossing for s in program.buffers[index].stored]
            sizes = [printer.place_of(layout.nbytes[index]) for index in crossing]
            aliased = [layout.aliased.get(position, -1) for position in range(len(program.inputs))]
            rows.append(
                f"  {{f{i}_evaluate, f{i}_call, {_list(dims)}, {_list(sizes)}, {_list(aliased)}, {printer.place_of(layout.workspace)}}},"
            )
        for printer, call in zip(self.printers, calls):
            texts += [printer.evaluation(), call, ""]
        plans = "\n".join(texts) + self._prepare()
        functions = [*self._tables(), "static const struct function implementations[] = {", *rows, "};", ""]
        return {
            "PLANS": _filled(plans, {"NAME": self.name}),
            "FUNCTIONS": "\n".join(functions),
            "MOST_VALUES": str(max(1, *(p.values for p in self.printers))),
            "CALLS": "\n".join(self._inline(i) for i in range(len(self.programs))),
        }

    def _tables(self) -> list[str]:
        name, lines, rows = self.name, list[str](), list[str]()
        for i, program in enumerate(self.programs):
            symbols = [
                f"{{{c_string(s.name)}, INT64_C({s.lower}), INT64_C({SIZE_LIMIT if s.upper is None else s.upper})}}"
                for s in program.symbols
            ]
            lines.append(
                f"static const {name}_symbol symbols{i}[] = {{{', '.join(symbols) or '{0}'}}};".replace(
                    "INT64_C(-9223372036854775808)", "INT64_MIN"
                )
            )
            for side, buffers in (("inputs", program.inputs), ("outputs", program.outputs)):
                tensors = [
                    f'{{{c_string(s.name)}, "{s.dtype}", {len(s.shape)}, {np.dtype(s.dtype).itemsize}, {c_string(dims)}}}'
                    for s, dims in ((program.buffers[b], ", ".join(self._dims(program, b))) for b in buffers)
                ]
                lines.append(f"static const {name}_tensor {side}{i}[] = {{{', '.join(tensors) or '{0}'}}};")
            numbers = f"{len(program.symbols)}, {len(program.inputs)}, {len(program.outputs)}"
            rows.append(f"  {{{c_string(program.name)}, {numbers}, symbols{i}, inputs{i}, outputs{i}}},")
        return [*lines, f"const {name}_function {name}_functions[{len(self.programs)}] = {{", *rows, "};", ""]

    def _dims(self, program: Program, index: int) -> list[str]:
        """Return the dims of an array as text, in the order in memory."""
        shape = list(map(str, tensor_specs(program, (index,))[0].shape))
        outer = program.buffers[index].outer
        return [*shape[outer : outer + 1], *shape[:outer], *shape[outer + 1 :]]

    def _inline(self, number: int) -> str:
        """Return the call of a function with arguments of their types."""
        program, name = self.programs[number], self.name
        symbols = _identifiers([s.name for s in program.symbols])
        given = [f"int64_t {s}" for s in symbols]
        specs = [program.buffers[i] for i in (*program.inputs, *program.outputs)]
        arrays = _identifiers([s.name for s in specs], symbols)
        shapes = [self._dims(program, i) for i in (*program.inputs, *program.outputs)]
        inputs = len(program.inputs)
        for at, (spec, array) in enumerate(zip(specs, arrays)):
            given.append(f"{'const ' if at < inputs else ''}{_TYPES.get(spec.dtype, 'uint8_t')} *{array}")
        shown = "\n".join(f"     {a}: {s.dtype} ({', '.join(d)})" for a, s, d in zip(arrays, specs, shapes))
        function = self.functions[number]
        return "\n".join([
            f"/* Call {comment(program.name)}:\n{comment_lines(shown)} */",
            f"static inline int {name}_call_{function}({', '.join([f'{name} *model', *given])}) {{",
            f"  const int64_t symbols[] = {{{', '.join(symbols) or '0'}}};",
            f"  const void *inputs[] = {{{', '.join(arrays[:inputs]) or '0'}}};",
            f"  void *outputs[] = {{{', '.join(arrays[inputs:]) or '0'}}};",
            f"  return {name}_run(model, {name}_number_of_{function}, symbols, inputs, outputs);",
            "}",
            "",
        ])  # fmt: skip

    def _kernel_names(self, program: Program) -> dict[str, str]:
        """Return the C names of a program's kernels; equal kernels of several programs are one."""
        c_names = {}
        for kernel in program.kernels:
            if kernel not in self.kernels:
                plain = f"{self.name}_{kernel.name}"
                taken = set(self.kernels.values())
                numbered = (f"{plain}_{k}" for k in range(len(taken)))
                self.kernels[kernel] = plain if plain not in taken else next(n for n in numbered if n not in taken)
                self.prototypes[self.kernels[kernel]] = _prototype(kernel, self.kernels[kernel])
            c_names[kernel.name] = self.kernels[kernel]
        return c_names

    def _fixed(
        self,
        program: Program,
        offsets: Mapping[str, int],
        packed_places: dict[object, ArrayPlace],
        kernels: Mapping[str, str],
    ) -> dict[int, ArrayPlace]:
        """Return the places of constants and packed weights, and record the packing steps, once for all programs."""
        places = {i: ArrayPlace("weights", offsets[b.name]) for i, b in enumerate(program.buffers) if b.role == "const"}
        values = constant_values(program.scalars, len(program.symbols))
        sizes = {i: _size(values, program, i) for i, b in enumerate(program.buffers) if b.role == "packed"}

        def take(index: int) -> ArrayPlace:
            place = ArrayPlace("packed", self.packed_bytes)
            self.packed_bytes += -(-sizes[index] // ALIGNMENT) * ALIGNMENT
            return place

        for step in program.prepare:
            numbers = tuple(values[s] for s in step.scalars)
            new = [i for i in step.buffers if i in sizes and i not in places]
            key = (kernels[step.target], numbers, tuple(None if i in new else places[i] for i in step.buffers))
            # A step that another program has added already (equal kernel, sources and numbers) is not added again.
            fresh = not new
            for position, i in enumerate(new):
                fresh = fresh or (key, position) not in packed_places
                if (key, position) not in packed_places:
                    packed_places[key, position] = take(i)
                places[i] = packed_places[key, position]
            if fresh:
                self.prepared.append(self._preparing(step, kernels, places, numbers))
        return places | {i: take(i) for i in sizes if i not in places}

    def _preparing(
        self,
        step: LaunchStep,
        kernels: Mapping[str, str],
        places: Mapping[int, ArrayPlace],
        numbers: Sequence[int | None],
    ) -> str:
        arrays = [f"{'weights' if places[i].kind == 'weights' else 'packed'} + {places[i].at}" for i in step.buffers]
        casts = [f"(void *)({a})" if a.startswith("packed") else f"(const void *)({a})" for a in arrays]
        return f"  {kernels[step.target]}({', '.join([*casts, *(f'INT64_C({n})' for n in numbers)])});"

    def _prepare(self) -> str:
        lines = [
            "/* Pack weights as kernels read them. */",
            "static void prepare(const unsigned char *weights, unsigned char *packed) {",
            "  (void)weights, (void)packed;",
            *self.prepared,
            "}",
            "",
        ]
        return "\n".join(lines)

    def _written(self, program: Program, kernels: Mapping[str, str]) -> frozenset[int]:
        """Return the buffers that a kernel may write."""
        written = set[int]()
        for step in (s for c in program.calls for v in c.variants for s in v.steps):
            parameters = self.prototypes[kernels[step.target]].partition("(")[2].split(",")
            written |= {i for i, p in zip(step.buffers, parameters) if not p.strip().startswith("const ")}
        return frozenset(written)

    def _unit(self, kernels: Sequence[KernelSource]) -> str:
        text = re.sub(r"^#line .*\n", "", join_sources(kernels), flags=re.MULTILINE)
        for kernel in kernels:
            text = re.sub(rf"\b(rt_[a-z]+_\d+_)?{kernel.name}\b", rf"\g<1>{self.kernels[kernel]}", text)
        return (_TEMPLATES / "kernels.c").read_text().replace("@NAME@", self.name).replace(
            "@VERSION@", tool_version()
        ) + text


def _weights(artifact: Artifact, programs: Sequence[Program]) -> tuple[bytes, bytes, dict[str, int]]:
    """Return the file of weights, its identity, and the offset of each constant."""
    names = sorted({b.name for p in programs for b in p.buffers if b.role == "const"})
    offsets, parts, at = dict[str, int](), list[bytes](), HEADER_BYTES
    for name in names:
        data = np.ascontiguousarray(artifact.constants[name]).tobytes()
        offsets[name] = at
        parts.append(data + b"\0" * (-len(data) % ALIGNMENT))
        at += len(parts[-1])
    identity = hashlib.blake2b(digest_size=32)
    for name, part in zip(names, parts):
        identity.update(f"{name}:{len(part)}:".encode() + part)
    header = MAGIC + at.to_bytes(8, "little") + identity.digest()
    return b"".join([header.ljust(HEADER_BYTES, b"\0"), *parts]), identity.digest(), offsets


def _size(values: Sequence[int | None], program: Program, index: int) -> int:
    size = np.dtype(program.buffers[index].dtype).itemsize
    for slot in program.buffers[index].shape:
        dim = values[slot]
        if dim is None:
            raise ArtifactError(
                f"{program.name}: buffer {program.buffers[index].name}: expected a fixed size, got another"
            )
        size *= dim
    return size


def _prototype(kernel: KernelSource, name: str) -> str:
    """Return the declaration of a kernel under another name."""
    match = re.search(rf"\bvoid {kernel.name}\(([^)]*)\)", kernel.source)
    if match is None:
        raise ArtifactError(
            f"kernel {kernel.name}: expected the text `void {kernel.name}(...)`, got none; build it again"
        )
    return f"void {name}({' '.join(match[1].split())})"


def _identifiers(names: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """Return distinct C identifiers for names."""
    identifiers: list[str] = []
    for name in names:
        plain = re.sub(r"\W", "_", name, flags=re.ASCII) or "array"
        plain = f"{plain}_" if plain in _KEYWORDS else plain if not plain[0].isdigit() else f"x{plain}"
        used = {*identifiers, *taken}
        identifiers.append(next(n for n in (plain, *(f"{plain}_{k}" for k in range(len(used) + 1))) if n not in used))
    return identifiers


def _filled(text: str, words: Mapping[str, str]) -> str:
    """Replace `@WORD@` by texts. Inside the texts only `@NAME@` is replaced, since names of the model may look like words."""
    text = re.sub(r"@([A-Z_]+)@", lambda m: m[0] if m[1] == "NAME" else words.get(m[1], m[0]), text)
    return text.replace("@NAME@", words["NAME"])


def _list(numbers: Sequence[int]) -> str:
    return f"(const int32_t[]){{{', '.join(map(str, numbers)) or '0'}}}"


def c_string(text: str) -> str:
    """Return a C string literal."""
    return c_text(text).replace("%%", "%")


def comment_lines(text: str) -> str:
    """Return lines that may stand in a C comment."""
    return text.replace("*/", "* /")
