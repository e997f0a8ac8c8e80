"""Kernels of functions that a person wrote and scheduled: their source, results, times, features and tuning."""
