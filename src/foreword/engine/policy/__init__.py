"""Applies the operator's policy file in an engine."""
