"""Runs: workers, order, time budget, and the results' folder."""
