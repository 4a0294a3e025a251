"""Checkpoints as they are published."""
