"""Import of ONNX operators on signals: Fourier transforms and mel scales."""
