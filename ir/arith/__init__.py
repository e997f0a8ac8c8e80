"""Simplification, bounds and proofs about integers.

From outside import `prove`, `proof`, `simplify`, `bounds`, `linear` and `injectivity`; the other modules are their parts.
"""
