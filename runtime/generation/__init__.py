"""Generation of tokens with a decoder: settings, choice of tokens, ends, beams, text.

Import `config` and `detokenizer`; `runtime.generate` has the calls.
"""
