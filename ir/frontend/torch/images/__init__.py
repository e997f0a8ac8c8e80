"""Import of ONNX operators on images: windows, resampling, sampling."""
