"""The server of artifacts: protocols, batches by measured times, limits."""
