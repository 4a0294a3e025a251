"""Paths of the API."""
