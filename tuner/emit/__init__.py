"""Conversion of candidates and modules to runtime programs; the build."""
