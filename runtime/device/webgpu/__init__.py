"""The WebGPU device."""
