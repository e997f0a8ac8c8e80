"""Import of GGUF files: decoders whose tensors may be quantised."""
