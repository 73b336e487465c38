"""What apps call: engines, their chats, scoring and transcription."""
