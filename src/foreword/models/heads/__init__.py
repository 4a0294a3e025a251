"""Trained draft heads: what their files are, whoever wrote them."""
