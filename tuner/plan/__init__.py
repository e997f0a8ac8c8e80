"""Plans: which variant each shape dispatches, chosen by records or predictions. Enter by `plans` and `stored_plans`."""
