"""The cost model and its warm start from records."""
