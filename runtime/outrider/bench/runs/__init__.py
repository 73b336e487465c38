"""Runs: who makes them, in which order, how long, and where they are kept."""
