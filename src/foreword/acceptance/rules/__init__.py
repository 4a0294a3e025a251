"""Exact acceptance rules, one file each."""
