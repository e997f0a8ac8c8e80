"""Operators of the domain com.microsoft, which ONNX Runtime's optimizer and quantizer write, as operators of the graph."""
