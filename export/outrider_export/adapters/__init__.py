"""LoRA adapters in PEFT's format: read, merged at export, or added to a bundle for requests to choose."""
