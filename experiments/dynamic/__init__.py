"""Dynamic shapes: the loss against static builds, the choice among kernels, buckets, tails and planning."""
