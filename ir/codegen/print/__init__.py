"""Printing of lowered statements as C, OpenCL and CUDA."""
