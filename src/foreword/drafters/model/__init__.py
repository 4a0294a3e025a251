"""Drafters that run a decoder: draft models and reduced versions of the target."""
