"""The first load of models: what is measured then, and what later loads read of it. Its door is `loaded.load_models`."""
