"""Import of GGUF files: decoders whose tensors may be quantised. Outside, import `importer.load_gguf`."""
