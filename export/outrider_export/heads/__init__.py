"""Drafters that are not whole models: heads and modules that read the main model's hidden states."""
