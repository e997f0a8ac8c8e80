"""Stand-in for cuda-bindings."""
