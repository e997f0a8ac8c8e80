"""Kernels in C: printer and prelude."""
