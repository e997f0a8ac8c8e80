"""Import of ONNX operators of domains beside the standard one."""
