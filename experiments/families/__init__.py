"""Correctness over many models and operators: every way to import them, against torch or ONNX's test suite."""
