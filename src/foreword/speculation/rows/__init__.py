"""The rows of a pass."""
