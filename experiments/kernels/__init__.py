"""Single kernels: tuned ones compared with libraries, other compilers and programs written by hand, and the limits of the processor."""
