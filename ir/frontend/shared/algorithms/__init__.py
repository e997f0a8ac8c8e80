"""Algorithms as compositions of operators: sizes from data, elimination, Fourier transforms, random numbers."""
