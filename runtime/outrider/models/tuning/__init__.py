"""The first load of a model on a device: what is measured then, and what later loads read of it."""
