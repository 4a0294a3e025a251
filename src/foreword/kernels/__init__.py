"""Kernels with slow references."""
