"""What a prompt is made of: text, tools, images and audio.

Internal: apps import what docs/api.md lists.
"""
