"""The process and the disk: files, saved values, forks, OpenVINO's core, and calls of an app's own code.

Internal: apps import what docs/api.md lists.
"""
