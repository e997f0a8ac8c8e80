"""Parts of a `Program`: arrays, scalar slots, kernels and steps of one variant or of one graph function."""
