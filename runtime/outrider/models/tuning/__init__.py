"""The first load of models: what is measured then, and read by later loads. Its door is `loading.load_models`."""
