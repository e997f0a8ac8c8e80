"""Texts: tokens of a model's folder (`tokens`, `folder`), embeddings (`encoder.SentenceEncoder`), tasks by name (`tasks.pipeline`)."""
