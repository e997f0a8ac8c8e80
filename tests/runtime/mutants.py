"""Kernels made wrong on purpose, in their text: each must be caught by the very set-up that finds nothing in the right ones."""

from __future__ import annotations

import re
from collections.abc import Callable

Mutation = Callable[[str], str]
_CALL = re.compile(r"(RT_PARALLEL_FOR\(rt_part_\w+, &rt_data, )(.+?)(, [01], )")
_LOOP = re.compile(r"for \((\w+) (\w+) = \(\1\)rt_from; \2 < \(\1\)rt_to; \2\+\+\) \{")


def one_too_many(text: str) -> str:
    """The threads run one iteration more; in OpenCL, the groups start at 1."""
    text = _CALL.sub(r"\1(\2) + 1\3", text)
    return text.replace("get_group_id(0)", "(get_group_id(0) + 1)")


def no_tail_guard(text: str) -> str:
    """The last tile runs whole."""
    return re.sub(r"if \([^{}\n]* < s0_?\) \{", "if (1) {", text)


def no_initial_value(text: str) -> str:
    """Sums start from what was there."""
    return re.sub(r"^ +\w+(\[[^\n]*\])? = (rt_splat_\w+\()?0\.0f\)?;$", "", text, flags=re.MULTILINE)


def two_threads_one_element(text: str) -> str:
    """Two neighbouring iterations (groups) do the same."""
    text = _LOOP.sub(r"for (\1 \2_2 = (\1)rt_from; \2_2 < (\1)rt_to; \2_2++) { const \1 \2 = \2_2 / 2;", text)
    return text.replace("get_group_id(0)", "(get_group_id(0) / 2)")


MUTATIONS: dict[str, Mutation] = {
    f.__name__: f for f in (one_too_many, no_tail_guard, no_initial_value, two_threads_one_element)
}
# What catches each: the recorder, the sanitizers, or that outputs depend on what memory held before (`bits`).
CAUGHT_C = {
    "one_too_many": {"recorder", "sanitizer"},
    "no_tail_guard": {"recorder", "sanitizer"},
    "no_initial_value": {"recorder", "bits"},
    "two_threads_one_element": {"recorder"},
}
CAUGHT_OPENCL = {
    "one_too_many": {"Invalid write"},
    "no_tail_guard": {"Invalid write"},
    "no_initial_value": {"bits"},
    "two_threads_one_element": {"data race"},
}
BARRIER = {
    "missing": ("barrier(CLK_LOCAL_MEM_FENCE);", ""),
    "divergent": ("barrier(", "if (get_local_id(0) < 3) barrier("),
}
CAUGHT_BARRIER = {"missing": "data race", "divergent": "divergence"}
