"""Schedule rules: generators of sketches. Other folders reach them through `relax_tune.schedules.sketch`."""
