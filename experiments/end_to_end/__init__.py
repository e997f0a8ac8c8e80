"""Whole models beside torch, ONNX Runtime, TVM and OpenVINO, and what decides their speed: packs, placements, types, caches."""
