"""Three models, and peers with quantised weights: ONNX Runtime, OpenVINO, IREE and llama.cpp."""
