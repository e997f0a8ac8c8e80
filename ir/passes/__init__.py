"""Passes from module to module, and their standard order (`pipeline`). Import the modules; `pipeline.lower` runs them all."""
