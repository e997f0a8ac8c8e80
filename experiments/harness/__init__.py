"""Shared parts: contenders in separate processes, result pages, and the models that several folders compare."""
