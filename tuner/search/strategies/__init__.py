"""The built-in search strategies. Every module lists its own in `STRATEGIES`, which `search.registry` collects."""
