"""Operator fusion on the graph and on the loops, and its reverse."""
