"""Lookups: draft tokens from texts; no model is run."""
