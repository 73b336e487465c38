"""The form of a model's weights that is fastest on this machine, found from slices of it."""
