"""Compares drafters with plain decoding, by category."""
