"""Trains the draft head on the texts that a server answers, and rolls new versions out."""
