"""Pages that run artifacts in a browser."""
