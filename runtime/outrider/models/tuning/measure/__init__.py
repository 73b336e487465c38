"""Measurements on this machine: which rows are exact, and what models' calls cost at the same time."""
