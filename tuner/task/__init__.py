"""Tasks: extraction from a module, shape domain, reference results, alternatives."""
