"""ATen operators with graphs of their own, dims and conditions on them, and results whose sizes data decide."""
