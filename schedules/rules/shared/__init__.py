"""Parts that schedule rules of processors and GPUs share."""
