"""Trainable drafters, one file per method."""
