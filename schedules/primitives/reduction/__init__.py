"""Primitives that factor reductions or replace them by other algorithms: scans, scatters, sorts, online softmax, Stream-K."""
