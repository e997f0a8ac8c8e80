"""The build: plans and a lowered module to programs. Enter by `build.build_programs` and `emit_placed`."""
