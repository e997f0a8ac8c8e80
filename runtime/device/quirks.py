"""Facts about devices and compilers that they do not report: one table, read when a device is opened.

An entry applies where its patterns match the device's fingerprint. It changes a limit of `DeviceInfo.limits`, refuses a compiler or an
option, or says what may not be trusted. `relax-tune devices` and `doctor` show the entries that apply. Facts that are worked around on
every device are listed in `docs/design/opencl.md`.
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

    Attributes:
        kind: Kind of the device.
        where: (field of the fingerprint, regular expression) pairs, which must all match.
        changes: Effect of the entry.
        symptom: What was observed.
        caps: Largest values of limits.
        facts: Limits that the device does not report.
        refused: The compiler cannot be used.
        ranks_nothing: Times of the device say nothing about other devices of its kind.
        misreported: Limits that the device reports wrongly for a kernel (`group`, `local`); the device's limits apply instead.
        options: Refused compiler options.
    """

    name: str
    kind: str
    where: tuple[tuple[str, str], ...]
    changes: str
    symptom: str
    caps: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    facts: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    refused: bool = False
    ranks_nothing: bool = False
    misreported: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def applies(self, kind: str, fingerprint: Mapping[str, str]) -> bool:
        """Return whether it applies to a device of this kind and fingerprint."""
        return kind == self.kind and all(re.search(p, fingerprint.get(key, "")) for key, p in self.where)

    def matched(self, fingerprint: Mapping[str, str]) -> str:
        """Return the text that its first pattern matches in a fingerprint."""
        key, pattern = self.where[0]
        match = re.search(pattern, fingerprint.get(key, ""))
        return match[0] if match else ""


_POCL = (("platform", r"PoCL"),)
_RUSTICL = (("platform", r"^rusticl"),)
_LLVMPIPE = ("device", r"llvmpipe")
_OTHERS = (("platform", r"^(?!.*PoCL|rusticl)"),)
_OLD_POCL = (("platform", r"PoCL ([012]\.|3\.0)"),)
_NOT_INTEL = (("cpu", r"^(?!.*Intel)"),)

QUIRKS: tuple[Quirk, ...] = (
    Quirk(
        "wide vectors",
        "opencl",
        (*_OLD_POCL, *_NOT_INTEL),
        "vectors are at most 8 floats wide",
        "on Zen 4, vectors of 16 floats caused the compiler of the 3.0 wheel to abort, or loop for more than 90 s; never on an Intel Xeon",
        caps={"max_vector_lanes": 8},
    ),
    Quirk(
        "slow launches",
        "opencl",
        _POCL,
        "groups are few and large; kernels are queued together and waited for once; where PoCL's serial driver is offered, a single "
        "group runs in the calling thread",
        "31 to 54 us for one launch, 1.5 to 5 us each when many are queued; 1.4 us in the calling thread. Polling an event "
        "instead of sleeping until it completes saves nothing",
        facts={"launch_ns": 31_000},
    ),
    Quirk(
        "slow launches of rusticl",
        "opencl",
        _RUSTICL,
        "groups are few and large",
        "650 us for a launch of 1,000 work-items on llvmpipe, queued with others or not, on a busy machine",
        facts={"launch_ns": 500_000},
    ),
    Quirk(
        "work-items are lanes",
        "opencl",
        (*_RUSTICL, _LLVMPIPE),
        "rules for GPUs are used, and no vectors within a work-item",
        "llvmpipe reports 32 work-items in lockstep and vectors of one float. It splits the vectors of a kernel, and version 22.3 gave "
        "wrong sums for private arrays that are written as scalars and read as vectors. With the processor's 16 registers as the limit "
        "of a work-item, no candidate was allowed",
        caps={"max_vector_lanes": 1},
        facts={"warp": 32, "registers": 255},
    ),
    *(
        Quirk(
            "ended loops",
            kind,
            where,
            "kernels whose work-items may exceed the number of loop iterations, at any shape of the declared range, are refused",
            "llvmpipe of Mesa 22.3 silently ends all loops of a work-item after 65,535 iterations, counting all loops and the test that "
            "ends each: of 40,000 iterations and 40,000 more, it did 65,534",
            facts={"loop_passes": 65_535},
        )
        for kind, where in (("opencl", (*_RUSTICL, _LLVMPIPE)), ("webgpu", (_LLVMPIPE,)))
    ),
    Quirk(
        "wrong limits of kernels",
        "opencl",
        (*_RUSTICL, ("driver", r"^22\.")),
        "groups may be as large as the device's limit, and local memory is counted when a kernel is generated",
        "it reports for every kernel a group size of 32, the size of the warp, and twice the local memory that the kernel declares; groups "
        "of 128 with 19 KB run correctly",
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
        "repeated launches are recorded and replayed as one; times are measured over many launches in one recording",
        "not measured: 3 us is the usual figure for a launch; `experiments/gpu/suite.py` measures it",
        facts={"launch_ns": 3_000},
    ),
    Quirk(
        "unreported sizes",
        "webgpu",
        (),
        "rules assume a warp of 32 invocations and 16 multiprocessors",
        "WebGPU reports neither the size of subgroups nor the number of multiprocessors",
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
        "regions",
        "c",
        (),
        "small work is also tried on one thread, in a function without parallel loops",
        "a parallel loop takes about 1 us while the threads still spin; after a pause its caller starts first and others join it",
        facts={"launch_ns": 1_100},
    ),
    Quirk(
        "other builtins",
        "c",
        (("compiler", r"clang"),),
        "clang is refused",
        "kernels use gcc's builtins for masks and shuffles, which clang lacks",
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
        "fast math",
        "c",
        (),
        "-ffast-math and what implies it are refused",
        "a library linked with it flushes denormals to zero in the whole process, and breaks rounding by magic numbers",
        options=("-ffast-math", "-Ofast", "-funsafe-math-optimizations"),
    ),
)
"""Every quirk. A new one is added here, and nowhere else."""


def quirks_of(kind: str, fingerprint: Mapping[str, str] | Sequence[tuple[str, str]]) -> tuple[Quirk, ...]:
    """Return the quirks of a device, in the order of the table."""
    facts = dict(fingerprint)
    return tuple(q for q in QUIRKS if q.applies(kind, facts))


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
