"""WebGPU's shading language (WGSL): printer, prelude, functions, 64-bit integers."""
