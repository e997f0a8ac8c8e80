"""Instructions as loop nests: tensor-core products, warp operations, shared-memory swizzles."""
