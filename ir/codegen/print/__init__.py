"""Printing of lowered statements as C, OpenCL, CUDA and WGSL."""
