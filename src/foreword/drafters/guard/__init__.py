"""Drafters that fail, hang or talk nonsense cost their guesses, never a request."""
