"""Stands in for pycuda where a test's child process wants a GPU: see `tests/cuda_emulation/driver.py`."""
