"""Where models come from: the hub, checkpoint folders and GGUF files."""
