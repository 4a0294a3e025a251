"""Trained draft heads: what their files are, in every published layout."""
