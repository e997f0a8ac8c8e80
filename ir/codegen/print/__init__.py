"""Printing of lowered statements as C, OpenCL, CUDA and WGSL. `generate.generate` chooses the printer; nothing else imports one."""
