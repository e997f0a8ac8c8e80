"""The nodes of programs: scalar expressions, buffers, statements, graph values and functions. Any module may be imported from outside."""
