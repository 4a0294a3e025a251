"""LoRA adapters: what they are, and the files that they come in."""
