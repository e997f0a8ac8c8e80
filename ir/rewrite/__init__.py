"""The rewrite engine: patterns, matching, rules, the emitter of new bindings."""
