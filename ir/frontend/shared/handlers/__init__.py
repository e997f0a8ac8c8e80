"""Operators as importers of both formats write them. Importers may import every module."""
