"""Import of ONNX operators with graphs of their own, and of recurrent layers."""
