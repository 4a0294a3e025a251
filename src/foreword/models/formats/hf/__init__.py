"""Reads Hugging Face directories."""
