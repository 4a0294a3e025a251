"""Evaluates the controller against plain decoding and fixed settings, also under changing conditions."""
