"""The rewrite engine: patterns, matching, rules and the emitter of new bindings. Any module may be imported from outside."""
