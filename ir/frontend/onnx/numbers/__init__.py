"""Import of ONNX operators that make numbers or reduce matrices to them: random numbers, determinants."""
