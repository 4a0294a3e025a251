"""Measures a GPU's peak rates, and the fraction that decoding reaches."""
