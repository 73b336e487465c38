"""What a prompt is made of: text, tools, images and audio."""
