"""Known facts about devices and compilers that they do not report: one table, read when a device is opened.

An entry applies where its patterns are found in the device's fingerprint. It changes a limit of `DeviceInfo.limits`, or
refuses a compiler or an option. An entry that does neither names in its text a workaround that is always on.
`relax-tune devices` and `doctor` show the entries that apply.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Quirk:
    """A fact observed about a device.

    kind: device kind
    where: (field of the fingerprint, regular expression), which must all match
    changes: effect of the entry
    seen: symptom
    caps: largest values of limits
    facts: limits that the device does not report
    refused: the compiler cannot be used
    ranks_nothing: times of the device say nothing about others of its kind
    misreported: limits that the device tells wrongly of a kernel (`group`, `local`); its own hold
    options: refused compiler options
    """

    name: str
    kind: str
    where: tuple[tuple[str, str], ...]
    changes: str
    seen: str
    caps: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    facts: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    refused: bool = False
    ranks_nothing: bool = False
    misreported: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def applies(self, kind: str, fingerprint: Mapping[str, str]) -> bool:
        """Return True if it applies to a device of this kind and fingerprint."""
        return kind == self.kind and all(re.search(p, fingerprint.get(key, "")) for key, p in self.where)

    def matched(self, fingerprint: Mapping[str, str]) -> str:
        """Return the text that its first pattern matches in a fingerprint."""
        key, pattern = self.where[0]
        found = re.search(pattern, fingerprint.get(key, ""))
        return found[0] if found else ""


_POCL = (("platform", r"PoCL"),)
_RUSTICL = (("platform", r"^rusticl"),)
_LLVMPIPE = ("device", r"llvmpipe")
_OTHERS = (("platform", r"^(?!.*PoCL|rusticl)"),)
_OLD_POCL = (("platform", r"PoCL ([012]\.|3\.0)"),)
_NOT_INTEL = (("cpu", r"^(?!.*Intel)"),)

# Every quirk. A new one is added here, and nowhere else.
QUIRKS: tuple[Quirk, ...] = (
    Quirk(
        "wide vectors",
        "opencl",
        (*_OLD_POCL, *_NOT_INTEL),
        "vectors are at most 8 floats wide",
        "on Zen4, 16 floats made the compiler of the 3.0 wheel abort, or loop for more than 90 s; not once on an Intel Xeon",
        caps={"max_vector_lanes": 8},
    ),
    Quirk(
        "builtin calls",
        "opencl",
        _POCL,
        "kernels use operators, pointer loads and our own polynomials where OpenCL has builtin functions",
        "vload, min, rsqrt, convert and mad are calls that are not inlined: softmax took 644 us with them, 221 without",
    ),
    Quirk(
        "local memory",
        "opencl",
        _POCL,
        "local memory is counted when a kernel is generated, and again when it is compiled",
        "a kernel with more local memory than the device has is built and run without an error by 3.0",
    ),
    Quirk(
        "slow launches",
        "opencl",
        _POCL,
        "groups are few and large; kernels are queued together and waited for once; where PoCL's serial driver is offered, a single "
        "group runs in the calling thread",
        "31 to 54 us from one launch to its end, 1.5 to 5 us each when many are queued; 1.4 us in the calling thread. Watching an "
        "event instead of sleeping until it ends saves nothing",
        facts={"launch_ns": 31_000},
    ),
    Quirk(
        "slow launches of rusticl",
        "opencl",
        _RUSTICL,
        "groups are few and large",
        "650 us for a launch of 1,000 work-items on llvmpipe, queued or alone, on a busy machine",
        facts={"launch_ns": 500_000},
    ),
    Quirk(
        "work-items are lanes",
        "opencl",
        (*_RUSTICL, _LLVMPIPE),
        "rules for GPUs are used, and no vectors within a work-item",
        "llvmpipe tells 32 work-items in lockstep and vectors of one float; what a kernel writes as vectors is taken apart, and arrays of "
        "a work-item that are written as scalars and read as vectors gave wrong sums with 22.3; with the processor's 16 registers for "
        "those of a work-item no candidate was allowed",
        caps={"max_vector_lanes": 1},
        facts={"warp": 32, "registers": 255},
    ),
    *(
        Quirk(
            "ended loops",
            kind,
            where,
            "kernels whose work-items may make more passes through loops, at any shape of the declared range, are refused",
            "llvmpipe of Mesa 22.3 ends all loops of a work-item after 65,535 passes, those in which loops end among them, without an "
            "error: of 40,000 steps and 40,000 more, 65,534 were made",
            facts={"loop_passes": 65_535},
        )
        for kind, where in (("opencl", (*_RUSTICL, _LLVMPIPE)), ("webgpu", (_LLVMPIPE,)))
    ),
    Quirk(
        "wrong limits of kernels",
        "opencl",
        (*_RUSTICL, ("driver", r"^22\.")),
        "groups may be as large as the device says, and local memory is counted when a kernel is generated",
        "every kernel is told to take groups of 32, the warp's size, and twice the local memory that it declares; groups of 128 with 19 KB "
        "run rightly",
        misreported=("group", "local"),
    ),
    Quirk(
        "launches",
        "opencl",
        _OTHERS,
        "groups are few and large",
        "3 to 5 us for a launch",
        facts={"launch_ns": 4_000},
    ),
    Quirk(
        "launches",
        "cuda",
        (),
        "launches that come again are recorded and replayed as one; times are those of many in one recording",
        "taken as 3 us for a launch, which is what is commonly told of them; `experiments/gpu_suite.py` measures it",
        facts={"launch_ns": 3_000},
    ),
    Quirk(
        "unreported sizes",
        "webgpu",
        (),
        "rules take 32 invocations for a warp and 16 multiprocessors",
        "WebGPU tells neither the size of subgroups nor the number of multiprocessors",
        facts={"warp": 32, "workers": 16, "launch_ns": 20_000},
    ),
    Quirk(
        "software adapter",
        "webgpu",
        (("adapter", r"CPU"),),
        "times rank nothing: it is for tests of results",
        "the adapter runs shaders on the processor; tiled kernels are slower there than naive ones",
        ranks_nothing=True,
    ),
    Quirk(
        "after PoCL",
        "webgpu",
        (_LLVMPIPE,),
        "PoCL is opened before the adapters, where it is installed",
        "the LLVM of PoCL's wheel aborts a process that has lavapipe's LLVM loaded; the other order works",
    ),
    Quirk(
        "denormal numbers",
        "webgpu",
        (),
        "they may be read and given as 0",
        "WGSL leaves that to the implementation; Mesa's lavapipe gives 0",
    ),
    Quirk(
        "regions",
        "c",
        (),
        "small work is also tried on one thread, in a function without a parallel region",
        "libgomp: 1.1 us for a region when its threads still spin, 19 us after a pause; 0.9 us when `if()` says no",
        facts={"launch_ns": 1_100},
    ),
    Quirk(
        "stores past the caches",
        "c",
        (),
        "they are tried where a call may write more than the cores' own caches hold, and measured like any candidate",
        "above the last cache they write 1.4 times as fast, inside the caches 2 to 10 times slower",
    ),
    Quirk(
        "one thread",
        "c",
        (("compiler", r"clang"),),
        "clang is refused",
        "its binaries run one thread with gcc's libgomp, without a word",
        refused=True,
    ),
    Quirk(
        "wrong vectors",
        "c",
        (("compiler", r"\btcc\b"),),
        "tcc is refused",
        "it compiles vector extensions to wrong code",
        refused=True,
    ),
    Quirk(
        "slow widening",
        "c",
        (("compiler", r"\b12\.\d"),),
        "bytes become integers by the machine's own instruction",
        "`__builtin_convertvector` of 8-bit integers takes 8 to 13 times as long with gcc 12",
    ),
    Quirk(
        "masks of vectors",
        "c",
        (("compiler", r"gcc"),),
        "reads behind a condition stay branches (`no-tree-loop-if-convert`); what is written as vectors has masks of its own",
        "gcc 12.2 gave the vectors of a short loop of conditional reads the mask of the first",
    ),
    Quirk(
        "fast math",
        "c",
        (),
        "-ffast-math and what implies it are refused",
        "a library linked with it flushes denormals to zero in the whole process, and breaks rounding by magic numbers",
        options=("-ffast-math", "-Ofast", "-funsafe-math-optimizations"),
    ),
)


def quirks_of(kind: str, fingerprint: Mapping[str, str] | Sequence[tuple[str, str]]) -> tuple[Quirk, ...]:
    """Return the quirks of a device, in the order of the table."""
    found = dict(fingerprint)
    return tuple(q for q in QUIRKS if q.applies(kind, found))


def with_quirks(kind: str, fingerprint: Mapping[str, str], limits: Mapping[str, int]) -> dict[str, int]:
    """Return the limits of a device, capped and extended by its quirks."""
    result = dict(limits)
    for quirk in quirks_of(kind, fingerprint):
        result |= {key: min(result.get(key, most), most) for key, most in quirk.caps.items()}
        result |= {key: value for key, value in quirk.facts.items() if key not in result}
    return result


def refusal(kind: str, fingerprint: Mapping[str, str]) -> Quirk | None:
    """Return the quirk that forbids a device or compiler, else None."""
    return next((q for q in quirks_of(kind, fingerprint) if q.refused), None)


def refused_option(kind: str, fingerprint: Mapping[str, str], options: Sequence[str]) -> tuple[str, Quirk] | None:
    """Return the first option that a quirk forbids, and the quirk."""
    for quirk in quirks_of(kind, fingerprint):
        for option in options:
            if option in quirk.options:
                return option, quirk
    return None
