"""Stands in for cuda-bindings, as the package pycuda beside it does for pycuda."""
