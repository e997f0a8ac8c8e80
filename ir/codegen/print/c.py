"""The C target: GCC vector extensions, OpenMP loops, plain pointers.

Meant for `gcc -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp`; no header is included.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf, isnan

import numpy as np

from relax_tune.ir.codegen.lower.affine import Poly
from relax_tune.ir.codegen.lower.guards import conditional_groups
from relax_tune.ir.codegen.print import integers
from relax_tune.ir.codegen.print.addressing import Address, Lane
from relax_tune.ir.codegen.print.cfamily import CFamilyPrinter, Grid
from relax_tune.ir.codegen.print.prelude import HALF, Prelude, stored
from relax_tune.ir.codegen.work import FEW, at_least, steps
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, f32, i32, i64, u32, u64
from relax_tune.ir.core.expr import Expr, Load, postorder
from relax_tune.ir.core.scalar_ops import SCALAR_OPS
from relax_tune.ir.core.stmt import For, Stmt, accesses, walk

# max and min of f32 vectors, by lanes: suffix of the builtins, macro that declares them, type of masks, last argument.
EXTREMES = {
    16: ("512", "__AVX512F__", "unsigned short", ", 4"),
    8: ("256", "__AVX512VL__", "unsigned char", ""),
    4: ("", "__AVX512VL__", "unsigned char", ""),
}

# AVX's forms where the processor has no masks, by lanes: suffix of the builtins, of stems that end in 128 otherwise.
AVX = {8: "256", 4: ""}

# What has vector registers of so many lanes of f32.
KEPT = {4: "__SSE__", 8: "__AVX__", 16: "__AVX512F__"}
KEEP = """#if defined({macro}) && defined(__GNUC__)
#define RT_KEEP_{width}(v) __asm__("" : "+v"(v))
#else
#define RT_KEEP_{width}(v)
#endif"""

# The machine's min(l, x) of f32 vectors, which is x where x is NaN, by lanes: what declares it, the end of its name.
LIMITS = {8: ("__AVX__", "256"), 4: ("__SSE__", "")}

# gcc 12 may give all vectors of a group of conditional reads the condition of the first (GCC PR 114375 is another defect of such
# groups), so these stay branches. What is written as vectors does not depend on it.
UNROLLED_TRIPS = 32
BRANCHES = """#if defined(__GNUC__) && !defined(__clang__)
#define RT_KEEP_BRANCHES __attribute__((optimize("no-tree-loop-if-convert")))
#else
#define RT_KEEP_BRANCHES
#endif"""

SCALARS = {
    "bool": "unsigned char", "i8": "signed char", "u8": "unsigned char", "i16": "short", "i32": "int", "i64": "i64",
    "u16": "unsigned short", "u32": "unsigned", "u64": "unsigned long long", "f32": "float", "f64": "double",
}  # fmt: skip


class CPrelude(Prelude):
    inline = "static inline __attribute__((always_inline))"
    language = "c"
    scalars = SCALARS

    def __init__(self) -> None:
        super().__init__()
        self.add("type_i64", "typedef __INT64_TYPE__ i64;")

    def vector_types(self, dtype: DType, width: int, name: str) -> str:
        size, one = dtype.bytes * width, self.scalar(dtype)
        return (
            f"typedef {one} {name} __attribute__((vector_size({size})));\n"
            f"typedef {one} {name}u __attribute__((vector_size({size}), aligned({dtype.bytes}), may_alias));"
        )

    def literal(self, vector: str, parts: list[str]) -> str:
        return f"({vector}){{{', '.join(parts)}}}"

    def scalar_builtin(self, name: str, dtype: DType) -> tuple[tuple[str, ...], str]:
        f = "f" if dtype is f32 else ""
        if name == "bits":
            return (), "STATIC $I $N($V a) { $I r; __builtin_memcpy(&r, &a, sizeof r); return r; }"
        if name == "unbits":
            return (), "STATIC $V $N($I a) { $V r; __builtin_memcpy(&r, &a, sizeof r); return r; }"
        c = SCALAR_OPS[name].c_name
        if SCALAR_OPS[name].arity == 2:
            return (), f"STATIC $V $N($V a, $V b) {{ return __builtin_{c}{f}(a, b); }}"
        if (
            name == "atan"
        ):  # gcc 12 folds sin(atan(x)) and cos(atan(x)) to 1 and 0 for NaN, so it must not know the function
            declared = f'extern $V ${{N}}_called($V) __asm__("atan{f}") __attribute__((const));'
            return (), f"{declared}\nSTATIC $V $N($V a) {{ return ${{N}}_called(a); }}"
        return (), f"STATIC $V $N($V a) {{ return __builtin_{c}{f}(a); }}"

    def define(self, name: str, dtype: DType, width: int) -> tuple[tuple[str, ...], str]:
        if width == 1:
            return super().define(name, dtype, width)
        fixed = {
            "bits": "STATIC $I $N($V a) { return ($I)a; }",
            "unbits": "STATIC $V $N($I a) { return ($V)a; }",
            "sel": "STATIC $V $N($I m, $V a, $V b) { return ($V)((($I)a & m) | (($I)b & ~m)); }",
            "tofloat": "STATIC $V $N($I a) { return __builtin_convertvector(a, $V); }",
        }
        if name in fixed:
            return (), fixed[name]
        if name == "splat":
            parts = self.literal("$V", ["a"] * width)
            return (), f"STATIC $V $N($E a) {{ return {parts}; }}"
        if name in ("loadm", "storem"):
            return (), self._masked(name, dtype, width)
        if name == "stream":
            return (), self._stream(dtype.bytes * width)
        if name == "alternate":
            mask = [*range(0, width, 2), *range(width + 1, 2 * width, 2)]
            return (
                (),
                f"STATIC $V $N($V a, $V b) {{ return __builtin_shufflevector(a, b, {', '.join(map(str, mask))}); }}",
            )
        wide = dtype is f32 and width == 16
        if name == "widen":
            return (), self._widen(dtype, width)
        if name == "narrow":
            return (), self._narrow(dtype, width)
        if name in ("from_f16", "to_f16"):
            needs, text = super().define(name, dtype, width)
            return needs, self._f16c(name, width, text)
        needs, text = super().define(name, dtype, width)
        if dtype is f32 and name == "whole_i32":
            v = self.vector(i32, width)
            return needs, integers.truncated_fast(f"STATIC {v} $N($V x)", v, width, text)
        if dtype is f32 and width in EXTREMES and name in ("max", "min"):
            return needs, self._extreme(name, width, text)
        if dtype is f32 and width in AVX and name in ("above", "below", "unordered"):
            call = f"{'max' if name == 'above' else 'min'}ps{AVX[width]}(a, b)"
            fast = f"STATIC $V $N($V a, $V b) {{ return __builtin_ia32_{call}; }}"
            if name == "unordered":
                fast = f"STATIC $I $N($V a, $V b) {{ return ($I)__builtin_ia32_cmpps{AVX[width]}(a, b, 3); }}"
            return needs, f"#ifdef __AVX__\n{fast}\n#else\n{text}\n#endif"
        if wide and name in ("least", "most", "sqrt", "floor", "rint"):
            return needs, self._avx512(name, text)
        if dtype is f32 and width in LIMITS and name in ("least", "most"):
            (macro, end), stem = LIMITS[width], "min" if name == "least" else "max"
            fast = f"STATIC $V $N($V x, $E l) {{ return __builtin_ia32_{stem}ps{end}(rt_splat_$S(l), x); }}"
            return needs, f"#ifdef {macro}\n{fast}\n#else\n{text}\n#endif"
        return needs, text

    def truncated(self, name: str, source: DType, target: DType, v: str) -> str:
        if target is u64:
            return super().truncated(name, source, target, v)
        return integers.truncated_gcc(source, target, v, "back" in name)

    def _stream(self, size: int) -> str:
        """Return the helper that stores a vector past the caches. Vectors that are not aligned are stored as usual."""
        known = {64: ("__AVX512F__", "512"), 32: ("__AVX__", "256"), 16: ("__SSE__", "")}
        plain = "*(${V}u *)p = v;"
        if size not in known:
            return f"STATIC void $N($E *p, $V v) {{ {plain} }}"
        macro, suffix = known[size]
        fast = f"if (((__UINTPTR_TYPE__)p & {size - 1}) == 0) "
        fast += f"{{ __builtin_ia32_movntps{suffix}((float *)p, ({self.vector(f32, size // 4)})v); return; }}"
        return f"STATIC void $N($E *p, $V v) {{\n#ifdef {macro}\n  {fast}\n#endif\n  {plain} }}"

    def _avx512(self, name: str, portable: str) -> str:
        """Return a helper as one AVX-512 instruction. The machine's max(a, b) is b when either is NaN."""
        if name == "sqrt":
            fast = "STATIC $V $N($V x) { return __builtin_ia32_sqrtps512_mask(x, x, (unsigned short)-1, 4); }"
        elif name in ("floor", "rint"):
            mode = 9 if name == "floor" else 8
            fast = (
                f"STATIC $V $N($V x) {{ return __builtin_ia32_rndscaleps_mask(x, {mode}, x, (unsigned short)-1, 4); }}"
            )
        else:
            stem = "min" if name == "least" else "max"
            fast = (
                "STATIC $V $N($V x, $E l) { return "
                f"__builtin_ia32_{stem}ps512_mask(rt_splat_$S(l), x, x, (unsigned short)-1, 4); }}"
            )
        return f"#ifdef __AVX512F__\n{fast}\n#else\n{portable}\n#endif"

    def lookup(self, values: Sequence[int], width: int, plain: str) -> str:
        """Return a lookup as one permutation of the sixteen values, which ignores all other bits."""
        if width != 16:
            return super().lookup(values, width, plain)
        table = self.literal(self.vector(f32, 16), [f"{x}.0f" for x in values])
        fast = f"return __builtin_ia32_permvarsf512_mask({table}, n, {table}, (unsigned short)-1);"
        return f"\n#ifdef __AVX512F__\n  {fast}\n#else\n  {plain}\n#endif\n"

    def _extreme(self, name: str, width: int, portable: str) -> str:
        """Return a minimum or maximum as two instructions.

        The machine's max(b, a) is `a` when either is NaN. A mask leaves it out where only `b` is NaN. In a reduction over `b`
        just one of the two instructions waits for the previous step.
        """
        stem, macro, bits, end = EXTREMES[width]
        head = "STATIC $V $N($V a, $V b)"
        fast = (
            f"{head} {{\n"
            f"  {bits} number = __builtin_ia32_cmpps{stem or '128'}_mask(b, b, 7, ({bits})-1{end});\n"
            f"  return __builtin_ia32_{name}ps{stem}_mask(b, a, b, number{end}); }}"
        )
        if width not in AVX:
            return f"#ifdef {macro}\n{fast}\n#else\n{portable}\n#endif"
        end = AVX[width]
        blend = f"__builtin_ia32_{name}ps{end}(b, a), b, __builtin_ia32_cmpps{end}(b, b, 3)"
        avx = f"{head} {{ return __builtin_ia32_blendvps{end}({blend}); }}"
        return f"#ifdef {macro}\n{fast}\n#elif defined(__AVX__)\n{avx}\n#else\n{portable}\n#endif"

    def _fold(self, name: str, dtype: DType, width: int) -> tuple[tuple[str, ...], str]:
        """Return a fold to four lanes, which keeps them in a register of four, since none has two."""
        op = name.removeprefix("fold_")
        if dtype is not f32 or width != 4:
            return super()._fold(name, dtype, width)
        high = "($V){a[2], a[3], a[2], a[3]}"
        if op in ("add", "mul"):  # of floats
            sign = "+" if op == "add" else "*"
            return (), f"STATIC $E $N($V a) {{ a = a {sign} {high}; return a[0] {sign} a[1]; }}"
        best = f"rt_{op}_$S"
        return (
            op,
        ), f"STATIC $E $N($V a) {{ a = {best}(a, {high}); return {best}(a, ($V){{a[1], a[1], a[1], a[1]}})[0]; }}"

    def _masked(self, name: str, dtype: DType, width: int) -> str:
        """Return a masked load or store of the first n lanes. Lanes beyond read as 0, and their memory is not touched.

        Without the processor's masks it is a call of a loop: a kernel may have hundreds, on which compilers spend minutes.
        """
        is_load = name == "loadm"
        head = "STATIC $V $N(const $E *p, i64 n)" if is_load else "STATIC void $N($E *p, $V v, i64 n)"
        if is_load:
            loop = f"{{ $V r = {{0}}; for (int k = 0; k < {width}; k++) if (k < n) r[k] = p[k]; return r; }}"
        else:
            loop = f"{{ for (int k = 0; k < {width}; k++) if (k < n) p[k] = v[k]; }}"
        forms = [*self._avx512_masked(is_load, dtype, width), *self._avx_masked(is_load, dtype, width)]
        called = f"{head.replace('STATIC', 'static __attribute__((noinline))')} {loop}"
        if not forms:
            return called
        (first, text), *others = forms
        rest = "".join(f"#elif defined({macro})\n{head} {body}\n" for macro, body in others)
        return f"#ifdef {first}\n{head} {text}\n{rest}#else\n{called}\n#endif"

    def _avx512_masked(self, is_load: bool, dtype: DType, width: int) -> list[tuple[str, str]]:
        """Return a masked access by a register of bits as (macro that declares it, body), or nothing."""
        builtin = {
            ("f32", 16): ("ups512_mask", "float", "__AVX512F__", "unsigned short"),
            ("f64", 8): ("upd512_mask", "double", "__AVX512F__", "unsigned char"),
            ("i32", 16): ("dqusi512_mask", "int", "__AVX512F__", "unsigned short"),
            ("f32", 8): ("ups256_mask", "float", "__AVX512VL__", "unsigned char"),
            ("f32", 4): ("ups128_mask", "float", "__AVX512VL__", "unsigned char"),
            ("u16", 16): ("dquhi256_mask", "short", "__AVX512BW__", "unsigned short"),
        }.get((dtype.short, width))
        if builtin is None:
            return []
        stem, element, macro, mask = builtin
        bits, held = f"({mask})((1u << n) - 1u)", self._shorts(width) if dtype is HALF else "$V"
        if is_load:
            return [
                (macro, f"{{ return ($V)__builtin_ia32_load{stem}((const {element} *)p, ({held}){{0}}, {bits}); }}")
            ]
        return [(macro, f"{{ __builtin_ia32_store{stem}(({element} *)p, ({held})v, {bits}); }}")]

    def _avx_masked(self, is_load: bool, dtype: DType, width: int) -> list[tuple[str, str]]:
        """Return masked accesses of 32-bit elements by the signs of a vector, eight at a time, or nothing."""
        if dtype not in (f32, i32) or width not in (4, 8, 16):
            return []
        lanes = min(width, 8)
        self.add(f"type_mf{lanes}", f"typedef float rt_mf{lanes} __attribute__((vector_size({4 * lanes}), may_alias));")
        self.add(f"type_mi{lanes}", f"typedef int rt_mi{lanes} __attribute__((vector_size({4 * lanes}), may_alias));")
        steps = []
        for at in range(0, width, lanes):
            left = f"(int)n - {at}" if at else "(int)n"
            places, bound = ", ".join(map(str, range(lanes))), ", ".join(["left"] * lanes)
            mask = f"((rt_mi{lanes}){{{places}}} < (rt_mi{lanes}){{{bound}}})"
            part, memory = f"((rt_mf{lanes} *)&v)[{at // lanes}]", f"(p + {at})"
            if is_load:
                done = f"{part} = __builtin_ia32_maskloadps{AVX[lanes]}((const rt_mf{lanes} *){memory}, {mask});"
            else:
                done = f"__builtin_ia32_maskstoreps{AVX[lanes]}((rt_mf{lanes} *){memory}, {mask}, {part});"
            steps.append(f"{{ const int left = {left}; {done} }}")
        body = " ".join(steps)
        return [("__AVX__", f"{{ $V v; {body} return v; }}" if is_load else f"{{ {body} }}")]

    def _widen(self, dtype: DType, width: int) -> str:
        """Return a conversion of 8-bit and 16-bit integers to int32. The general one of gcc 12 is an order of magnitude
        slower.
        """
        target = self.vector(i32, width)
        plain = f"STATIC {target} $N($V a) {{ return __builtin_convertvector(a, {target}); }}"
        if width != 16:
            return plain
        if dtype is HALF:
            of, narrow = "zxwd", self._shorts(16)
        else:
            of, narrow = "sxbd" if dtype.short == "i8" else "zxbd", self._chars()
        fast = (
            f"STATIC {target} $N($V a) {{ return ({target})__builtin_ia32_pmov{of}512_mask("
            f"({narrow})a, ({target}){{0}}, (unsigned short)-1); }}"
        )
        return f"#ifdef __AVX512F__\n{fast}\n#else\n{plain}\n#endif"

    def _narrow(self, dtype: DType, width: int) -> str:
        """Return a conversion of int32 to the bits of 16-bit floats or small types."""
        head = f"STATIC $V $N({self.vector(i32, width)} a)"
        plain = f"{head} {{ return __builtin_convertvector(a, $V); }}"
        if width != 16:
            return plain
        of, kind = ("dw", self._shorts(16)) if dtype is HALF else ("db", self._chars())
        fast = f"{head} {{ return ($V)__builtin_ia32_pmov{of}512_mask(a, ({kind}){{0}}, (unsigned short)-1); }}"
        return f"#ifdef __AVX512F__\n{fast}\n#else\n{plain}\n#endif"

    def _f16c(self, name: str, width: int, portable: str) -> str:
        """Return the machine's conversions. They are exact; to f16 they round to nearest even (mode 0)."""
        if width not in (8, 16):
            return portable
        short, bits = self._shorts(width), self.vector(HALF, width)
        macro, wide, mask = (
            ("__AVX512F__", "512_mask", ", (unsigned short)-1") if width == 16 else ("__F16C__", "256", "")
        )
        if name == "from_f16":
            old = ", ($V){0}" if mask else ""
            rest = f"{old}{mask}, 4" if mask else ""
            fast = f"STATIC $V $N({bits} h) {{ return __builtin_ia32_vcvtph2ps{wide}(({short})h{rest}); }}"
        else:
            rest = f", ({short}){{0}}{mask}" if mask else ""
            fast = f"STATIC {bits} $N($V x) {{ return ({bits})__builtin_ia32_vcvtps2ph{wide}(x, 0{rest}); }}"
        return f"#ifdef {macro}\n{fast}\n#else\n{portable}\n#endif"

    def _chars(self) -> str:
        """Return the vector of sixteen bytes that the machine's builtins are declared with."""
        self.add("type_qi16", "typedef char rt_qi16 __attribute__((vector_size(16)));")
        return "rt_qi16"

    def _shorts(self, width: int) -> str:
        """Return the vector of 16-bit integers that the machine's builtins are declared with."""
        self.add(f"type_hi{width}", f"typedef short rt_hi{width} __attribute__((vector_size({2 * width})));")
        return f"rt_hi{width}"


class CPrinter(CFamilyPrinter):
    """One C function; the outermost parallel loop of a nest is an OpenMP loop."""

    streamed = False
    pairs = frozenset({4, 8, 16})
    # gcc treats a masked result over an undefined register as wholly undefined
    unset = " = {0}"
    chained = frozenset(AVX)
    body: Stmt
    back: bool | None = None

    def space(self, buffer: Buffer) -> str:
        return ""

    def kept(self, e: Expr, order: Sequence[Expr]) -> str:
        """Keep what minima and maxima read. gcc makes operands in memory of a vector that several instructions read."""
        width, used = self.width, any(e in m.args for m in order if m.op in ("min", "max"))
        if not used or not isinstance(e, Load) or e.dtype is not f32 or width not in KEPT:
            return ""
        self.prelude.add(f"kept_{width}", KEEP.format(width=width, macro=KEPT[width]))
        return f"RT_KEEP_{width}"

    def is_short(self, f: For) -> bool:
        """Return whether the compiler, or we, may unroll the loop completely."""
        high = self.algebra.interval(self.algebra.poly(f.extent))[1]
        return f.kind == "unrolled" or (high is not None and 1 < high <= UNROLLED_TRIPS)

    def float_text(self, value: float, dtype: DType) -> str:
        return float_literal(value, dtype, "__builtin_inff()", '__builtin_nanf("")')

    def load_vector(self, b: Buffer, at: Address, lane: Lane) -> str:
        dtype = stored(b.dtype)
        name = self.prelude.vector(dtype, lane.width)
        if lane.count is not None:
            return f"{self.prelude.helper('loadm', dtype, lane.width)}({at.text}, {lane.count})"
        return f"(*(const {name}u *)({at.text}))"

    def store_vector(self, b: Buffer, at: Address, value: str, lane: Lane) -> str:
        dtype = stored(b.dtype)
        name = self.prelude.vector(dtype, lane.width)
        if lane.count is not None:
            return f"{self.prelude.helper('storem', dtype, lane.width)}({at.text}, {value}, {lane.count});"
        return f"*({name}u *)({at.text}) = {value};"

    def store_nontemporal(self, b: Buffer, at: Address, value: str, lane: Lane) -> str:
        self.streamed = True
        return f"{self.prelude.helper('stream', stored(b.dtype), lane.width)}({at.text}, {value});"

    def prefetch_statement(self, at: str) -> str:
        return f"__builtin_prefetch({at});"

    def declare_array(self, b: Buffer, name: str, size: int) -> None:
        self.line(f"{self.prelude.storage(b.dtype)} {name}[{max(size, 1)}] __attribute__((aligned(64)));")

    def pointer(self, b: Buffer) -> str:
        return f"{'' if b in self.written else 'const '}{self.prelude.storage(b.dtype)} *restrict "

    def thread_loop(self, f: For, extent: Poly) -> None:
        if f.kind == "item" or self.in_threads:
            self.serial_loop(f, extent)
            return
        self.in_threads = True
        inner = f.body
        nested = inner if isinstance(inner, For) and inner.kind in ("parallel", "group") else None
        if nested is not None and f.var in self.algebra.free(nested.extent):
            nested = None
        how = "dynamic" if f.var in self.varying else "static"
        pays = at_least(steps(f, lambda e: self.poly_text(self.algebra.poly(e)), self.lanes), FEW)
        if pays:
            when = "" if pays is True else f" if({pays})"
            self.lines.append(f"#pragma omp parallel for schedule({how})" + (" collapse(2)" if nested else "") + when)
        (kind, name), text = self.counted(f.var, extent), self.poly_text(extent)
        with self.indented(f"for ({kind} {name} = 0; {name} < {text}; {name}++) {{"):
            if nested is not None:
                below = self.algebra.poly(nested.extent)
                (kind, again), more = self.counted(nested.var, below), self.poly_text(below)
                with self.indented(f"for ({kind} {again} = 0; {again} < {more}; {again}++) {{"):
                    self.thread_body(nested.body)
            else:
                self.thread_body(inner)
        self.in_threads = False

    def thread_body(self, body: Stmt) -> None:
        """Print the body with pointers of its own.

        The compiler forgets `restrict` when it moves the loop into a function.
        """
        outer = dict(self.buffers)
        for b in dict.fromkeys(b for b, _i, _w in accesses(body)):
            if b in outer:
                self.buffers[b] = self.fresh(b.name)
                self.line(f"{self.pointer(b)}{self.buffers[b]} = {outer[b]};")
        self.statement(body)
        self.fence()
        self.buffers.update(outer)

    def whole(self, target: DType) -> str:
        if self.back is None:
            nodes = postorder(tuple(e for n in walk(self.body) for e in n.own_exprs))
            self.back = any(
                n.op == "cast" and n.dtype.is_float and n.args[0].dtype in (i32, u32, i64, u64) for n in nodes
            )
        return f"whole_back_{target}" if self.back else super().whole(target)

    def fence(self) -> None:
        """Order nontemporal stores before everything that follows (`sfence`)."""
        if self.streamed:
            text = "void rt_fence(void) {\n#ifdef __SSE__\n  __builtin_ia32_sfence();\n#endif\n}"
            self.prelude.add("rt_fence", f"{self.prelude.inline} {text}")
            self.line("rt_fence();")
            self.streamed = False

    def kernel(
        self, name: str, buffers: tuple[Buffer, ...], written: frozenset[Buffer], body: Stmt
    ) -> tuple[str, Grid]:
        self.written, self.body = written, body
        for b in buffers:
            self.buffers[b] = self.fresh(b.name)
        parameters = [self.pointer(b) + self.buffers[b] for b in buffers]
        self.statement(body)
        self.fence()
        parameters += [f"i64 {self.names[v]}" for v in self.symbols]
        attribute = ""
        if conditional_groups(body, self.is_short):
            self.prelude.add("branches", BRANCHES)
            attribute = "RT_KEEP_BRANCHES "
        return self.finish(f"{attribute}void {name}({', '.join(parameters) or 'void'})"), Grid()


def float_literal(value: float, dtype: DType, infinity: str, nan: str) -> str:
    """Return a floating literal that reads back as the same number of `dtype`, of 16-bit floats as the same float32."""
    if isnan(value):
        return f"({nan})"
    if isinf(value):
        return infinity if value > 0 else f"(-{infinity})"
    if dtype is f32 or dtype.is_packed:
        rounded = np.float32(value)
        if np.isinf(rounded):
            return infinity if value > 0 else f"(-{infinity})"
        text = f"{float(str(rounded))!r}f"
    else:
        text = repr(value)
    return f"({text})" if text[0] == "-" else text
