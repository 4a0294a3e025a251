"""Families with mixtures of experts."""
