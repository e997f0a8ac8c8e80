"""Import of ATen operators on complex numbers, which become pairs of real tensors, and of Fourier transforms."""
