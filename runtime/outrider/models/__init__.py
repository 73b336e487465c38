"""One model on one device: loading, settings, what its calls cost, backends and their KV caches.

Internal: apps import what docs/api.md lists.
"""
