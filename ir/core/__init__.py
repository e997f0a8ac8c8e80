"""The nodes of the program: scalar expressions, buffers, statements, graph values, functions, and the builders of both levels."""
