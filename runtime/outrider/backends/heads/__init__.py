"""Graphs of drafters that read the main model's hidden states, built from their weights at load."""
