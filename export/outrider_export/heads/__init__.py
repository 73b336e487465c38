"""Drafters that are not whole models: heads, modules and masks that read the main model's hidden states."""
