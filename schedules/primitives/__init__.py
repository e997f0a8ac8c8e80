"""Schedule primitives: functions that check, edit and return a new tensor function. Other folders call them as methods of `Schedule`."""
