"""Machine instructions as loop nests: dot products, tensor-core products, swizzles of shared memory.

From outside, import `intrinsics.INTRINSICS`, the classes of `intrinsic`, and `swizzle`.
"""
