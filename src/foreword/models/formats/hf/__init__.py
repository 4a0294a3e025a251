"""Hugging Face directories."""
