"""Passes that say where values live: wishes, transfers, and the parts of a program that run on one device each."""
