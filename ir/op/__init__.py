"""One class per operator: deduction, loops and NumPy meaning. From outside import the classes, `base` and `registry`."""
