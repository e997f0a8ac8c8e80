"""The WebAssembly device: the compiler of its modules, and kernels in node."""
