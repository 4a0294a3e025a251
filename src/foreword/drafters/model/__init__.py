"""Guesses of a decoder that writes ahead."""
