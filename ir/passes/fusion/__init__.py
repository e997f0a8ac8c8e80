"""Operator fusion: grouping calls in the graph, merging their tensor functions, and splitting fused functions again.

From outside, import `fuse.FuseOps`, `gates.FuseGates`, and the functions of `unfuse` and `symbol_interface`.
"""
