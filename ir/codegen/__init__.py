"""Scheduled tensor functions to source text. Import `generate`, and `loop_passes` for devices that limit the passes of loops."""
