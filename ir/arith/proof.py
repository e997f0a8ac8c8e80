"""Answers of proofs: yes, no, or unknown.

Tests: `tests/ir/arith/test_case_split.py`.
"""

from __future__ import annotations

from enum import Enum


class Proof(Enum):
    """YES: true for every assignment the env allows. NO: false for every one. UNKNOWN: neither was proved."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"

    def __bool__(self) -> bool:
        raise TypeError("a proof has three answers; compare with `is Proof.YES` or `is Proof.NO`")


FLIP = {Proof.YES: Proof.NO, Proof.NO: Proof.YES, Proof.UNKNOWN: Proof.UNKNOWN}
