"""Lookup drafters: draft tokens from texts, without running a model."""
