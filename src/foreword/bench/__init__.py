"""Measure it."""
