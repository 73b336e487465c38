"""What apps call: engines, their chats, scoring and transcription.

Internal: apps import what docs/api.md lists.
"""
