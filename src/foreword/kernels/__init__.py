"""Kernels, each beside a slow reference that it must equal."""
