"""Tasks, their shape domains, reference results and variants. Enter by `extract`, `task` and `variants`."""
