"""Library calls as alternatives to generated kernels: the table of routines, matching, lowering, epilogues.

From outside, import `library_forms` (the table and its classes) and `library_lowering`.
"""
