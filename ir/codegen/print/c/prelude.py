"""The prelude of kernels in C: vectors by GCC's extensions, and the processor's own instructions where these are slow.

Tests: `tests/ir/codegen/test_codegen.py`, `tests/ir/codegen/test_math.py`, `tests/ir/codegen/test_halves.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_tune.ir.codegen.print import integers
from relax_tune.ir.codegen.print.prelude import HALF, Prelude
from relax_tune.ir.core.dtype import DType, f32, i32, u64
from relax_tune.ir.core.scalar_ops import SCALAR_OPS

# max and min of f32 vectors, by lanes: suffix of the builtins, macro of their extension, type of masks, last argument.
EXTREMES = {
    16: ("512", "__AVX512F__", "unsigned short", ", 4"),
    8: ("256", "__AVX512VL__", "unsigned char", ""),
    4: ("", "__AVX512VL__", "unsigned char", ""),
}

# Suffix of AVX's builtins, by lanes, for processors without mask registers.
AVX = {8: "256", 4: ""}

# min(l, x) of f32 vectors, which is x if x is NaN, by lanes: macro of its extension, end of the builtin's name.
LIMITS = {8: ("__AVX__", "256"), 4: ("__SSE__", "")}

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
            # In memory, vectors are aligned only to an element.
            f"typedef {one} {name}u __attribute__((vector_size({size}), aligned({dtype.bytes}), may_alias));"
        )

    def literal(self, vector: str, parts: list[str]) -> str:
        return f"({vector}){{{', '.join(parts)}}}"

    def scalar_builtin(self, name: str, dtype: DType) -> tuple[tuple[str, ...], str]:
        f = "f" if dtype is f32 else ""
        if name == "bits":
            # A cast of the pointer would break C's aliasing rules.
            return (), "STATIC $I $N($V a) { $I r; __builtin_memcpy(&r, &a, sizeof r); return r; }"
        if name == "unbits":
            return (), "STATIC $V $N($I a) { $V r; __builtin_memcpy(&r, &a, sizeof r); return r; }"
        c = SCALAR_OPS[name].c_name
        if SCALAR_OPS[name].arity == 2:
            return (), f"STATIC $V $N($V a, $V b) {{ return __builtin_{c}{f}(a, b); }}"
        if name == "atan":
            # gcc 12 folds sin(atan(x)) and cos(atan(x)) to 1 and 0 for NaN, so atan is called under a name it does not know
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
        if name in ("gather", "gatherm", "scatter", "scatterm"):
            return (), self._spaced(name, width)
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
                # predicate 3, unordered: true where an operand is NaN
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
        """Return the helper that stores a vector with a nontemporal hint. Unaligned vectors are stored as usual."""
        known = {64: ("__AVX512F__", "512"), 32: ("__AVX__", "256"), 16: ("__SSE__", "")}
        plain = "*(${V}u *)p = v;"
        if size not in known:
            return f"STATIC void $N($E *p, $V v) {{ {plain} }}"
        macro, suffix = known[size]
        fast = f"if (((__UINTPTR_TYPE__)p & {size - 1}) == 0) "
        fast += f"{{ __builtin_ia32_movntps{suffix}((float *)p, ({self.vector(f32, size // 4)})v); return; }}"
        return f"STATIC void $N($E *p, $V v) {{\n#ifdef {macro}\n  {fast}\n#endif\n  {plain} }}"

    def _avx512(self, name: str, portable: str) -> str:
        """Return a helper as one AVX-512 instruction. The instruction max(a, b) gives b if either operand is NaN."""
        if name == "sqrt":
            fast = "STATIC $V $N($V x) { return __builtin_ia32_sqrtps512_mask(x, x, (unsigned short)-1, 4); }"
        elif name in ("floor", "rint"):
            # bits 0 and 1 choose the direction (1: down, 0: to nearest even), bit 3 suppresses the exception for inexact results
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
        """Return a lookup as one permutation of the sixteen values, which ignores all but the lowest four bits."""
        if width != 16:
            return super().lookup(values, width, plain)
        table = self.literal(self.vector(f32, 16), [f"{x}.0f" for x in values])
        fast = f"return __builtin_ia32_permvarsf512_mask({table}, n, {table}, (unsigned short)-1);"
        return f"\n#ifdef __AVX512F__\n  {fast}\n#else\n  {plain}\n#endif\n"

    def _extreme(self, name: str, width: int, portable: str) -> str:
        """Return a minimum or maximum as two instructions.

        The instruction max(b, a) gives `a` if either operand is NaN; lanes in which `b` is NaN are masked out and keep `b`. In a
        reduction whose accumulator is `a`, only one of the two instructions waits for the previous step.
        """
        stem, macro, bits, end = EXTREMES[width]
        head = "STATIC $V $N($V a, $V b)"
        fast = (
            f"{head} {{\n"
            # predicate 7, ordered: true where b is a number
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
        """Return a fold. Four lanes are folded within one register, since no register has two f32 lanes."""
        op = name.removeprefix("fold_")
        if dtype is not f32 or width != 4:
            return super()._fold(name, dtype, width)
        high = "($V){a[2], a[3], a[2], a[3]}"
        if op in ("add", "mul"):
            sign = "+" if op == "add" else "*"
            return (), f"STATIC $E $N($V a) {{ a = a {sign} {high}; return a[0] {sign} a[1]; }}"
        best = f"rt_{op}_$S"
        return (
            op,
        ), f"STATIC $E $N($V a) {{ a = {best}(a, {high}); return {best}(a, ($V){{a[1], a[1], a[1], a[1]}})[0]; }}"

    def _masked(self, name: str, dtype: DType, width: int) -> str:
        """Return a masked load or store of the first n lanes. Other lanes load 0, and their memory is not accessed.

        Without masked instructions it is a loop in a function that is not inlined: a kernel may have hundreds of masked accesses,
        and compilers took minutes on as many inlined loops.
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

    def _spaced(self, name: str, width: int) -> str:
        """Return an access to every s-th element; a masked one accesses the first n, and other lanes load 0.

        Masked accesses are loops in functions that are not inlined, as in `_masked`. The compiler chooses whether to inline a store: a
        tile that is stored by sixteen instructions for each vector took half of a build's time, and calls are as fast.
        """
        is_load = name.startswith("gather")
        head = "$V $N(const $E *p, i64 s" if is_load else "void $N($E *p, i64 s, $V v"
        if name.endswith("m"):
            step = f"for (int k = 0; k < {width}; k++) if (k < n)"
            body = f"$V r = {{0}}; {step} r[k] = p[k * s]; return r;" if is_load else f"{step} p[k * s] = v[k];"
            return f"static __attribute__((noinline)) {head}, i64 n) {{ {body} }}"
        if is_load:
            body = f"return {self.literal('$V', [f'p[{k} * s]' for k in range(width)])};"
            return f"STATIC {head}) {{ {body} }}"
        body = " ".join(f"p[{k} * s] = v[{k}];" for k in range(width))
        return f"static {head}) {{ {body} }}"

    def _avx512_masked(self, is_load: bool, dtype: DType, width: int) -> list[tuple[str, str]]:
        """Return a masked access by a mask register as (macro of its extension, body); [] if there is no instruction."""
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
        # n is at most the width, 16, so the shift stays within 32 bits
        bits, vector = f"({mask})((1u << n) - 1u)", self._shorts(width) if dtype is HALF else "$V"
        if is_load:
            return [
                (macro, f"{{ return ($V)__builtin_ia32_load{stem}((const {element} *)p, ({vector}){{0}}, {bits}); }}")
            ]
        return [(macro, f"{{ __builtin_ia32_store{stem}(({element} *)p, ({vector})v, {bits}); }}")]

    def _avx_masked(self, is_load: bool, dtype: DType, width: int) -> list[tuple[str, str]]:
        """Return masked accesses of 32-bit elements by the signs of a vector, eight at a time; [] for other elements."""
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
        """Return a conversion of 8-bit and 16-bit integers to int32.

        `__builtin_convertvector` of gcc 12 is an order of magnitude slower than the instruction.
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
        """Return a conversion by F16C or AVX-512: from f16 exact, to f16 to nearest even (mode 0)."""
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
        """Return the type of sixteen bytes that builtins take."""
        self.add("type_qi16", "typedef char rt_qi16 __attribute__((vector_size(16)));")
        return "rt_qi16"

    def _shorts(self, width: int) -> str:
        """Return the type of 16-bit integers that builtins take."""
        self.add(f"type_hi{width}", f"typedef short rt_hi{width} __attribute__((vector_size({2 * width})));")
        return f"rt_hi{width}"
