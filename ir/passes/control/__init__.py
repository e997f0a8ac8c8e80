"""Control flow: inlining, outlining of subgraphs, shapes known only at run time, checks of indices.

From outside, import `inline.Inline`, `outline`, and `checked_indices.IndexCheck`.
"""
