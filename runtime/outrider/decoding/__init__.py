"""Rounds of all requests: what is drafted for each, the target pass that verifies it, and what is committed.

Internal: apps import what docs/api.md lists.
"""
