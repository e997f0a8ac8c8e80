"""The choice of a device for each call of a model, from costs and measured links. Enter by `choose.place_functions`."""
