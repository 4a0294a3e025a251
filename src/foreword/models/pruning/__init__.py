"""Copies of a model with some of its layers."""
