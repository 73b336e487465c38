"""Bundles, written: exported, imported, cached and added to."""
