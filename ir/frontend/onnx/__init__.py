"""Importer of ONNX models. Enter by `importer.load_onnx`; `file.read_model` reads a model without importing it."""
