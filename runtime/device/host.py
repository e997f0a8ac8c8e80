"""Facts about this machine's processor and memory, from the operating system.

Tests: `tests/runtime/device/test_processors.py`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_SVE_LENGTH = Path("/proc/sys/abi/sve_default_vector_length")
_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_GROUP_LIMIT = _GROUPS / "memory.max"
# Flags of x86 processors that are instructions of programs, as opposed to features of the kernel and to faults.
_INSTRUCTIONS = re.compile(
    r"(s?sse|avx|amx|fma|bmi|xop|tbm|sha|vaes|aes|gfni|vpclmul|pclmul|apx|sm[34]).*|pni|popcnt|abm|f16c|movbe|xsave\w*|rdrand|rdseed|adx|cx16"
    r"|lahf_lm|fsgsbase|3dnowprefetch|clflushopt|clwb|cldemote|movdiri|movdir64b|lwp|rdpid|waitpkg|serialize|cmpccxadd|raoint|prefetchi"
)
_DEFAULT_CACHE_BYTES = {1: 32 * 1024, 2: 512 * 1024, 3: 8 * 1024 * 1024}


def _cpuinfo() -> dict[str, str]:
    """Return the first processor's lines of /proc/cpuinfo; empty if there is no such file."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    facts: dict[str, str] = {}
    # Only the first processor: the others repeat its lines, hundreds of times on large machines.
    for line in text.split("\n\n", 1)[0].splitlines():
        key, _, value = line.partition(":")
        facts[key.strip()] = value.strip()
    return facts


def cpu_model() -> str:
    """Return the processor's name with family and model numbers, which distinguish generations of one name."""
    facts = _cpuinfo()
    name = facts.get("model name") or facts.get("CPU part") or platform.processor() or "unknown"
    numbers = [facts[key] for key in ("cpu family", "model", "stepping") if key in facts]
    return f"{platform.machine()} {name}" + (f" ({'.'.join(numbers)})" if numbers else "")


def processor_unit() -> str:
    """Return the unit of this machine's processors, which all devices on them share."""
    return f"cpu:{socket.gethostname()}"


def cpu_flags() -> frozenset[str]:
    """Return instruction set flags as Linux names them (`avx2`, `avx512f`, `asimd` ...)."""
    facts = _cpuinfo()
    return frozenset((facts.get("flags") or facts.get("Features") or "").split())


def instruction_flags() -> frozenset[str]:
    """Return the flags of this machine that name instructions which a compiler may use."""
    if platform.machine() not in ("x86_64", "i686"):
        return cpu_flags() - {"cpuid", "evtstrm"}
    return frozenset(flag for flag in cpu_flags() if _INSTRUCTIONS.fullmatch(flag))


def c_library() -> tuple[int, int] | None:
    """Return the version of this system's GNU C library; None for another one."""
    try:
        name, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        major, minor = number.split(".")[:2]
        return (int(major), int(minor)) if name == "glibc" else None
    except (ValueError, OSError):
        return None


def short_hash(text: str) -> str:
    """Return sixteen hex digits of a BLAKE2 hash, for fingerprints."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def vector_bits(flags: frozenset[str] | None = None) -> int:
    """Return the width of the widest vector register, in bits. SVE's is the one that this process runs with.

    Args:
        flags: instruction set flags of another processor; None for this machine's
    """
    flags = cpu_flags() if flags is None else flags
    # Before the others: processors with SVE also name `asimd`, whose vectors are narrower.
    if "sve" in flags:
        return sve_bits()
    if "avx512f" in flags:
        return 512
    return 256 if "avx2" in flags or "avx" in flags else 128


def vector_registers(flags: frozenset[str] | None = None) -> int:
    """Return the number of vector registers that the instruction set names; `flags` as in `vector_bits`."""
    of_machine = flags is None and platform.machine() in ("aarch64", "arm64", "ppc64le")
    flags = cpu_flags() if flags is None else flags
    return 32 if of_machine or flags & {"avx512f", "asimd"} else 16


def dot_products(flags: frozenset[str] | None = None) -> dict[str, int]:
    """Return the products that the processor has, as limits: `byte_dots` (VNNI), `bf16_dots`, `tile_products` (AMX); none where missing.

    `flags` as in `vector_bits`.
    """
    flags = cpu_flags() if flags is None else flags
    wide = vector_bits(flags) == 512
    has = {
        "byte_dots": "avx512_vnni" in flags if wide else "avx_vnni" in flags,
        "bf16_dots": wide and "avx512_bf16" in flags,
        "tile_products": wide and {"amx_tile", "amx_bf16", "amx_int8"} <= flags,
    }
    return {name: 1 for name, present in has.items() if present}


def sve_bits() -> int:
    """Return the width of SVE's vectors here; 128, which every such processor has, if the system does not tell."""
    try:
        return 8 * int(_SVE_LENGTH.read_text().strip())
    except (OSError, ValueError):
        return 128


def vector_flags() -> tuple[str, ...]:
    """Return compiler flags without which vectors of `vector_bits` are no registers: gcc compiles SVE for any length."""
    return (f"-msve-vector-bits={sve_bits()}",) if "sve" in cpu_flags() and sve_bits() > 128 else ()


def emulator() -> str | None:
    """Return the program that emulates this machine's processor, such as qemu's user mode; None on a real one."""
    try:
        program = os.path.basename(os.readlink("/proc/thread-self/exe"))
    except OSError:
        return None
    return program if program.startswith("qemu-") else None


def usable_cpus() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_bytes() -> dict[str, int]:
    """Return `l1_bytes`, `l2_bytes`, `l3_bytes` of the first processor's data caches. Unknown sizes are typical ones."""
    sizes = dict(_DEFAULT_CACHE_BYTES)
    for index in sorted(_CACHES.glob("index*")):
        try:
            kind, level = (index / "type").read_text().strip(), int((index / "level").read_text())
            size = (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if kind != "Instruction" and level in sizes and size[:-1].isdigit():
            sizes[level] = int(size[:-1]) * {"K": 1024, "M": 1024**2, "G": 1024**3}.get(size[-1], 1)
    return {f"l{level}_bytes": size for level, size in sizes.items()}


def memory_bytes() -> int:
    """Return the memory that this process may use: the machine's, or its container's limit if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _GROUP_LIMIT.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def cpu_quota(groups: Path = _GROUPS, own: Path = _OWN_GROUPS) -> float | None:
    """Return the number of processors whose time this process may use by its control groups; None without a limit.

    A group is limited by each group around it, so the least limit counts.

    Args:
        groups: Folder of the control groups, of version 1 or 2.
        own: File that names the groups of the process.
    """
    try:
        listed = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        listed = []
    limits = []
    for _, controllers, path in (entry for entry in listed if len(entry) == 3):
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # version 2 has no names of controllers; version 1 mounts each group of controllers in a folder
        names = [""] if not controllers else [controllers, "cpu"] if "cpu" in controllers.split(",") else []
        for name in names:
            folders = (groups.joinpath(name, *parts[:depth]) for depth in range(len(parts) + 1))
            # Each group limits all groups below it, so the smallest quota on the path counts.
            limits += [limit for folder in folders if (limit := _quota_of(folder)) is not None]
    return min(limits, default=None)


def _quota_of(folder: Path) -> float | None:
    """Return the quota that the files of one control group state."""
    try:
        if (folder / "cpu.max").exists():
            allowed, period = (folder / "cpu.max").read_text().split()
        else:
            allowed, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(allowed) / int(period) if allowed.isdigit() else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def worker_threads() -> int:
    """Return the number of threads that a parallel kernel or library should use.

    It is the least of the processors that this process may use, the whole processors of its quota, and `$OMP_NUM_THREADS`. With more
    threads than the quota allows, the system stops all of them for the rest of each period.
    """
    quota, asked = cpu_quota(), os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    threads = [usable_cpus()]
    if quota is not None:
        threads.append(max(1, int(quota)))
    if asked.isdigit() and int(asked) > 0:
        threads.append(int(asked))
    return min(threads)
