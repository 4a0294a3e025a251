"""Families whose layers are all alike dense."""
