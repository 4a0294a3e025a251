"""Trained draft heads in all published file layouts."""
