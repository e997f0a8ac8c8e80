"""Stand-in for pycuda in child processes of tests that use the emulated GPU (`tests/cuda_emulation/driver.py`)."""
