"""What records teach: valid records of a device, histories and priors for cost models. Enter by `device_records` and `prior`."""
