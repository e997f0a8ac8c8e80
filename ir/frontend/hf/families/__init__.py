"""Families of transformers: tables of `Family` entries by `model_type`, and `family`, which reads a configuration by one."""
