"""Logits to the distribution that the sampling parameters mean."""
