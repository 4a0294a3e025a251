"""File formats of checkpoints."""
