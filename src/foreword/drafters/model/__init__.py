"""Drafters that run a decoder."""
