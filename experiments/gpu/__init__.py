"""Measurements for a machine with an NVIDIA GPU, and estimates of resources compared with its assembler."""
