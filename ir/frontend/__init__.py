"""Importers of models: Hugging Face folders, GGUF, ONNX, torch.export, text. Others import `load` and `graph_builder`."""
