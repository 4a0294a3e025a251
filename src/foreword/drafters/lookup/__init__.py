"""Guesses looked up in texts: no model is run."""
